"""Weights in FP8 load as their format says, and as transformers dequantises them; what does not fit is
refused.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exports import Loaded, stored
from support.families import save_family
from support.models import dequantised_by_transformers, different, edit_json, rewrite

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.source import load_weights, plan_load
from tierstream.io.errors import ModelSourceError

Tensors = dict[str, torch.Tensor]
BLOCK = 16
DOWN = "model.layers.1.mlp.down_proj.weight"


def quantised(path: Path, family: str = "llama", *, scale: torch.dtype = torch.float32, **sizes: int) -> Path:
    """A model whose projections are random bytes; most sizes are no multiples of a block."""
    save_family(path, family, **sizes)
    random = np.random.default_rng(0)

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            rows, columns = tensors[key].shape
            codes = random.integers(0, 255, (rows, columns), np.uint8)
            codes[codes & 0x7F == 0x7F] = 0  # no NaN
            tensors[key] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            grid = random.uniform(1e-3, 2e-3, (-(-rows // BLOCK), -(-columns // BLOCK)))
            tensors[f"{key}_scale_inv"] = torch.from_numpy(grid).to(scale)

    rewrite(path / "model.safetensors", change)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    edit_json(path / "config.json", lambda config: config.update(quantization_config=settings))
    return path


def expected(tensors: Tensors, key: str) -> torch.Tensor:
    """Element by element."""
    weight, grid = tensors[key].float(), tensors[f"{key}_scale_inv"].float()
    rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
    return weight * grid[rows][:, columns]


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_cut_off_at_the_edges(tmp_path: Path, dtype: str, scale: torch.dtype) -> None:
    """The masters hold the products in fp32, whatever the weights are computed in."""
    loaded = Loaded(quantised(tmp_path, scale=scale), dtype, low_bits=False)
    tensors, values = load_file(tmp_path / "model.safetensors"), loaded.flat.tensors()
    assert any(size % BLOCK for size in tensors[DOWN].shape)
    for name, value in values.items():
        assert torch.equal(value, expected(tensors, name) if "_proj" in name else tensors[name].float()), name
    assert not loaded.plan.unused


@pytest.mark.parametrize("shape", [(96, 64), (3, 32, 48)])
def test_products_are_those_of_transformers(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Where transformers can: with blocks of one size. A stack of matrices as well."""
    weight = (torch.randn(shape) * 30).to(torch.float8_e4m3fn)
    grid = torch.rand(*shape[:-2], shape[-2] // BLOCK, shape[-1] // BLOCK) / 100
    save_file({"w": weight, "w_scale_inv": grid}, tmp_path / "model.safetensors")
    theirs = dequantised_by_transformers(weight, grid)
    checkpoint = open_checkpoint(tmp_path)
    for elements in (1, 100, 1000, 10**6):
        parts = [values.copy() for _, values in checkpoint.slices("w", elements)]
        assert max(part.size for part in parts) <= max(elements, shape[-1])
        assert np.concatenate(parts).tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_load_one_by_one(tmp_path: Path, family: str) -> None:
    loaded = Loaded(quantised(tmp_path, family), low_bits=False)
    tensors, values = load_file(tmp_path / "model.safetensors"), loaded.flat.tensors()
    stacks = {name: value for name, value in values.items() if name.endswith("experts.gate_up_proj")}
    assert stacks
    for name, stack in stacks.items():
        for expert, value in enumerate(stack):
            parts = [
                f"{name.removesuffix('gate_up_proj')}{expert}.{part}_proj.weight" for part in ("gate", "up")
            ]
            assert torch.equal(value, torch.cat([expected(tensors, part) for part in parts]))


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([[0.5]]), torch.tensor([0.5])])
def test_one_scale_for_all(tmp_path: Path, scale: torch.Tensor) -> None:
    weight = (torch.randn(2, 8, 6) * 30).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale, "x.activation_scale": torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["x.weight"]
    ((_, values),) = checkpoint.slices("x.weight", 10**6)
    assert values.tobytes() == (weight.float() * 0.5).numpy().tobytes()


def test_scales_may_be_bare_exponents(tmp_path: Path) -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    grid = torch.tensor([[127, 128], [126, 0]], dtype=torch.uint8)
    save_file({"w": weight, "w_scale_inv": grid}, tmp_path / "model.safetensors")
    ((_, values),) = open_checkpoint(tmp_path).slices("w", 100)
    assert values.reshape(4, 4)[::2, ::2].tolist() == [[1.0, 2.0], [0.5, 2.0**-127]]


def test_loading_takes_only_its_buffers(tmp_path: Path) -> None:
    quantised(tmp_path, hidden_size=256, intermediate_size=8192, num_hidden_layers=1)
    model, _ = build_meta_model(ModelConfig(path=str(tmp_path)))
    plan, units = plan_load(model, open_checkpoint(tmp_path)), find_units(model).in_forward_order
    tracemalloc.start()
    load_weights(plan, units, lambda unit, start, values: None, buffer_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(unit.numel for unit in units) > 6 << 20
    assert peak < 1.2 * (1 << 20)


def test_export_is_not_quantised(tmp_path: Path) -> None:
    loaded = Loaded(quantised(tmp_path / "source"))
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    tensors = stored(tmp_path / "out")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert different(tensors, loaded.tensors(torch.bfloat16)) == []


MISFITS: dict[str, tuple[Callable[[Tensors], Any], list[str]]] = {
    "no scales": (lambda t: t.pop(f"{DOWN}_scale_inv"), [f"{DOWN} is F8_E4M3", "not of a float type"]),
    "too few scales": (
        lambda t: t.update({f"{DOWN}_scale_inv": t[f"{DOWN}_scale_inv"][:, 1:].contiguous()}),
        [f"{DOWN} is [40, 44] in FP8, and {DOWN}_scale_inv, F32 [3, 2], is not a scale", "of 16 x 16"],
    ),
    "scales without a weight": (
        lambda t: t.update({DOWN: torch.zeros(40, 44)}),
        [f"1 not of this model: {DOWN}_scale_inv"],
    ),
    "scales of another kind": (
        lambda t: t.update({f"{DOWN}_scale_inv": t[f"{DOWN}_scale_inv"].long()}),
        ["is not a scale for each block"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, words = MISFITS[case]
    rewrite(quantised(tmp_path) / "model.safetensors", change)
    with pytest.raises(ModelSourceError) as caught:
        Loaded(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[DOWN].view(torch.uint8)[3, 5] = 0xFF

    rewrite(quantised(tmp_path) / "model.safetensors", spoil)
    with pytest.raises(ModelSourceError, match=rf"1 values of tensor {DOWN} in "):
        Loaded(tmp_path)
