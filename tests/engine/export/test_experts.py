"""Experts are exported as transformers saves them, whatever the cut into units, and one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.exports import Loaded, export_zeros, stored
from support.families import MOE_FAMILIES, moe_config, save_family
from support.models import different

from tierstream.engine.export.plan import _single_names
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model, materialise_buffers


@pytest.mark.parametrize(("run_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_are_exported_as_save_pretrained_does(
    tmp_path: Path, family: str, run_dtype: str, dtype: str
) -> None:
    """Names, shapes and types, whatever the cut into units; and transformers loads the same bits."""
    save_family(tmp_path / "run", family)
    expected = getattr(torch, dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=expected)
    reference.save_pretrained(tmp_path / "theirs")
    theirs = {key: (value.shape, value.dtype) for key, value in stored(tmp_path / "theirs").items()}
    for apart in (True, False):
        loaded = Loaded(tmp_path / "run", run_dtype, experts_apart=apart)
        out = tmp_path / f"out-{apart}"
        loaded.export(out, dtype=dtype, max_shard_bytes=40_000, buffer_bytes=1000)
        assert loaded.largest <= 1000 // 8
        assert {key: (value.shape, value.dtype) for key, value in stored(out).items()} == theirs
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=expected)
        assert different(dict(model.named_parameters()), loaded.tensors(expected)) == []
        assert different(dict(model.named_buffers()), dict(reference.named_buffers())) == []


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_one_expert_is_in_memory(tmp_path: Path, family: str, apart: bool) -> None:
    """A stack of 12 MiB in bf16 becomes one tensor, or one per expert."""
    sizes = {"num_local_experts": 64, "intermediate_size": 192}
    moe_config(family, hidden_size=256, num_hidden_layers=1, **sizes).save_pretrained(tmp_path / "source")
    model, _ = build_meta_model(ModelConfig(config=str(tmp_path / "source"), attention="eager"))
    units = find_units(model, experts_apart=apart).in_forward_order
    materialise_buffers(model, None, "cpu")
    info, peak = export_zeros(model, units, tmp_path / "out")
    assert info.nbytes > 18 << 20
    assert peak < 2 << 20


def test_parts_that_are_named_alike_go_together() -> None:
    """Layer and expert may both be 0; a stack that is not taken apart by expert has no such names."""
    value = torch.empty(2, 3)
    layer = {f"layers.0.experts.{part}.{name}": value for part in range(3) for name in ("up", "down")}
    one = {f"layers.0.experts.0.{name}": value for name in ("up", "down")}
    assert _single_names(layer, one, 3) == {
        f"layers.0.experts.{part}.{name}": (part, f"layers.0.experts.0.{name}")
        for part in range(3)
        for name in ("up", "down")
    }
    assert _single_names({"layers.0.experts.up": value}, {"layers.0.experts.up": value[:1]}, 2) == {}
