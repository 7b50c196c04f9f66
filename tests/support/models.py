"""Tiny decoders and checkpoints on disk, with odd sizes on purpose: no tensor is a multiple of 512 bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tierstream.tiered.layout import Unit, pack_unit

SIZES = {
    "vocab_size": 259, "hidden_size": 44, "intermediate_size": 77, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 22, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
DENSE = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def tiny_hf_config(family: str = "llama", **changes: Any) -> Any:
    return DENSE[family](**{**SIZES, "tie_word_embeddings": False, **changes})


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 7, **changes: Any
) -> Any:
    """A real model whose norms and biases are not 1 and 0."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_hf_config(family, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_model(path: Path, *, shard: str = "5GB", **options: Any) -> Any:
    """Write `tiny_model(**options)` as a Hugging Face directory and return it."""
    model = tiny_model(**options)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def rewrite(file: Path, change: Any) -> None:
    """Apply `change(dict of tensors)` to one safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def two_units(model: Any) -> list[Unit]:
    """The parameters of a (meta) model in two units: any cut will do for loading and export."""
    tensors = [(name, tuple(value.shape), int(value.dim() < 2)) for name, value in model.named_parameters()]
    dtype = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[model.dtype]
    half = len(tensors) // 2
    return [pack_unit("first", dtype, tensors[:half]), pack_unit("second", dtype, tensors[half:])]


class Flat:
    """Takes what `load_weights` and `init_weights` write; every element must be written once."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = list(units)
        self.values = {unit.name: np.full(unit.numel, np.nan, np.float32) for unit in self.units}
        self.largest = 0

    def write(self, unit: str, start: int, values: np.ndarray) -> None:
        target = self.values[unit][start : start + values.size]
        assert values.dtype == np.float32
        assert values.ndim == 1
        assert np.isnan(target).all(), "written twice"
        target[:] = values
        self.largest = max(self.largest, values.size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Whole parameters; views of the values where they are no stacks of parts."""
        found: dict[str, torch.Tensor] = {}
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for unit in self.units:
            for spec in unit.tensors:
                value = torch.from_numpy(self.values[unit.name][spec.offset : spec.end]).view(spec.shape)
                if spec.part is None:
                    found[spec.name] = value
                else:
                    parts.setdefault(spec.name, {})[spec.part] = value
        stacks = {name: torch.stack([of[part] for part in range(len(of))]) for name, of in parts.items()}
        return found | stacks


def different(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are on one side only, or whose tensors differ in shape or in a value (as fp32)."""
    return [
        name
        for name in sorted(got.keys() | expected.keys())
        if name not in got
        or name not in expected
        or not torch.equal(got[name].float(), expected[name].detach().float())
    ]


def dequantised_by_transformers(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In the type of the scales."""
    made = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scales})["weight"]
    return made[0] if isinstance(made, list) else made  # before 5.24 a list
