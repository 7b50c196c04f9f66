"""Experts in MXFP4 load as transformers dequantises them, to the bit; what does not fit is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.exports import stored
from support.families import moe_config
from support.models import Flat, different, edit_json, rewrite
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tierstream.engine.export.export import export_model
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.parity.twin import randomise
from tierstream.engine.weights.mxfp4 import dequantise
from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.source import LoadPlan, load_weights, plan_load
from tierstream.io.errors import ModelSourceError

QUANTISATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
PAIR = (f"{GATE_UP}_blocks", f"{GATE_UP}_scales")


def quantised(path: Path, hidden_size: int = 64, **other: int) -> Path:
    """A model whose experts are random bytes: every element and most scales occur."""
    config = moe_config("gpt_oss", **{"hidden_size": hidden_size, "intermediate_size": 96, **other})
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise(model)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    random = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = random.integers(0, 250, (experts, rows, columns // 32), np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", lambda content: content.update(quantization_config=QUANTISATION))
    return path


def plan_of(path: Path, dtype: str = "bfloat16") -> tuple[Any, LoadPlan]:
    model, _ = build_meta_model(ModelConfig(path=str(path), dtype=dtype, attention="eager"))  # type: ignore[arg-type]
    return model, plan_load(model, open_checkpoint(path))


def test_elements_and_scales_are_those_of_the_format() -> None:
    """Two rows of one block: all sixteen elements, each alone in its byte, with scales 2 and 2^-127."""
    codes = np.arange(16, dtype=np.uint8)
    values = dequantise(np.stack([codes, codes << 4])[:, None], np.array([[128], [0]], np.uint8))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    elements = np.concatenate([magnitudes, -magnitudes])
    assert values.shape == (32, 2)
    assert np.array_equal(values[0::2, 0], 2 * elements)
    assert np.array_equal(values[1::2, 1], elements * np.float32(2.0**-127))
    assert not values[1::2, 0].any()
    assert not values[0::2, 1].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_load_equals_transformers(tmp_path: Path, dtype: str) -> None:
    quantised(tmp_path)
    model, plan = plan_of(tmp_path, dtype)
    flat = Flat(find_units(model).in_forward_order)
    load_weights(plan, flat.units, flat.write)
    values = flat.tensors()
    full = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    assert different(values, dict(full.named_parameters())) == []
    tensors = load_file(tmp_path / "model.safetensors")
    blocks, scales = (tensors[key] for key in PAIR)
    for expert in range(len(blocks)):
        one = convert_moe_packed_tensors(blocks[expert : expert + 1], scales[expert : expert + 1])[0]
        assert torch.equal(one.float(), values[GATE_UP][expert])


def test_one_expert_is_in_memory(tmp_path: Path) -> None:
    """A stack is 24 MiB in fp32, a matrix of an expert 768 KiB."""
    quantised(tmp_path, hidden_size=512, intermediate_size=192, num_local_experts=32, num_hidden_layers=1)
    model, plan = plan_of(tmp_path)
    units = find_units(model).in_forward_order
    written: list[int] = []
    tracemalloc.start()
    load_weights(plan, units, lambda unit, start, values: written.append(values.nbytes), buffer_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(written) == 512 * 2 * 192 * 4
    assert sum(written) == sum(p.numel() for p in model.parameters()) * 4
    assert peak < 4 * max(written)


def test_export_is_not_quantised(tmp_path: Path) -> None:
    model, plan = plan_of(quantised(tmp_path / "source"))
    flat = Flat(find_units(model).in_forward_order)
    load_weights(plan, flat.units, flat.write)

    def read(unit: str, start: int, out: np.ndarray) -> None:
        values = torch.from_numpy(flat.values[unit][start : start + out.size])
        out[:] = values.bfloat16().view(torch.uint16).numpy()

    export_model(read, model, flat.units, tmp_path / "out")
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert {value.dtype for value in stored(tmp_path / "out").values()} == {torch.bfloat16}
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert different(dict(back.named_parameters()), flat.tensors()) == []


Tensors = dict[str, torch.Tensor]
MISFITS: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "no scales": (
        lambda t: t.pop(f"{GATE_UP}_scales"),
        [f"1 missing: {GATE_UP};", f"1 not of this model: {GATE_UP}_blocks"],
    ),
    "scales of another shape": (
        lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, :-1].contiguous()}),
        [f"{GATE_UP}_blocks is [8, 192, 2, 16] and {GATE_UP}_scales is [8, 191, 2]; MXFP4 wants"],
    ),
    "fewer experts": (
        lambda t: t.update({key: t[key][:-1].contiguous() for key in PAIR}),
        [f"{GATE_UP}_blocks and 1 more make [7, 64, 192] where the model has [8, 64, 192]"],
    ),
    "stored in full as well": (
        lambda t: t.update({GATE_UP: torch.zeros(8, 64, 192)}),
        [f"2 not of this model: {GATE_UP}_blocks", f"{GATE_UP}_scales"],
    ),
    "of no layer": (
        lambda t: t.update({key.replace("layers.1.mlp.experts", "layers.3"): t[key] + 0 for key in PAIR}),
        ["2 not of this model: model.layers.3.gate_up_proj_blocks", "model.layers.3.gate_up_proj_scales"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, words = MISFITS[case]
    rewrite(quantised(tmp_path) / "model.safetensors", change)
    with pytest.raises(ModelSourceError) as caught:
        plan_of(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{GATE_UP}_scales"][2, 3, 1] = 255

    rewrite(quantised(tmp_path) / "model.safetensors", spoil)
    model, plan = plan_of(tmp_path)
    flat = Flat(find_units(model).in_forward_order)
    with pytest.raises(ModelSourceError, match=rf"32 values of tensor {GATE_UP} \(of {GATE_UP}_blocks, "):
        load_weights(plan, flat.units, flat.write)
