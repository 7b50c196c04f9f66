"""A model directory in planes, to be exported, and what the export holds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from support.models import Flat

from tierstream.engine.export.export import ExportInfo, export_model
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model, is_kept_in_fp32, materialise_buffers
from tierstream.engine.weights.source import load_weights, plan_source
from tierstream.tiered.layout import Unit


class Loaded:
    """A model directory in planes: fp32 masters, with low bits that no bf16 has."""

    def __init__(
        self,
        path: Path,
        dtype: str = "bfloat16",
        *,
        low_bits: bool = True,
        experts_apart: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        config = ModelConfig(
            path=str(path), dtype=dtype, attention="eager", vocab_size=vocab_size  # type: ignore[arg-type]
        )  # fmt: skip
        self.model, _ = build_meta_model(config)
        self.plan = plan_source(self.model, config)
        self.flat = Flat(find_units(self.model, experts_apart=experts_apart).in_forward_order)
        self.units = self.flat.units
        load_weights(self.plan, self.units, self.flat.write)
        materialise_buffers(self.model, self.plan, "cpu")
        self.largest = 0
        if low_bits:
            for number, values in enumerate(self.flat.values.values()):
                values *= 1 + np.random.default_rng(number).uniform(-1e-3, 1e-3, values.size).astype(
                    np.float32
                )

    def read(self, unit: str, start: int, out: np.ndarray) -> None:
        self.largest = max(self.largest, out.size)
        values = self.flat.values[unit][start : start + out.size]
        if out.dtype == np.uint16:
            assert next(u.dtype for u in self.units if u.name == unit) == "bfloat16"
            out[:] = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        else:
            out[:] = values

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parameters in this type, or in fp32 where the family keeps it."""
        return {
            name: value if is_kept_in_fp32(self.model, name, dtype) else value.to(dtype)
            for name, value in self.flat.tensors().items()
        }

    def export(self, path: Path, **options: Any) -> Any:
        return export_model(self.read, self.model, self.units, path, **options)


def export_one_by_one(source: Path, target: Path) -> None:
    """Every tensor of a model directory into a shard of its own."""
    Loaded(source).export(target, max_shard_bytes=1)


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {
        key: value for file in sorted(path.glob("*.safetensors")) for key, value in load_file(file).items()
    }


def pretrained(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options)
    return dict(model.named_parameters())


def export_zeros(model: Any, units: Sequence[Unit], out: Path) -> tuple[ExportInfo, int]:
    """Exports a model of zeros, with 128 KiB for buffers; what was written, and the most host memory that it
    took.
    """

    def zeros(unit: str, start: int, values: np.ndarray) -> None:
        values[:] = 0

    tracemalloc.start()
    try:
        info = export_model(zeros, model, units, out, buffer_bytes=128 << 10)
        return info, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
