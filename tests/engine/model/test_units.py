"""What becomes a unit, and which matrices AdamW decays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from support.families import MOE_FAMILIES, moe_config
from support.rig import tiny_config

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import build_layout
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Layout


def meta(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_parameter_is_in_exactly_one_unit(family: str, tied: bool) -> None:
    model = meta(tiny_config(family, tied=tied))
    units = find_units(model)
    found = [t for unit in units.in_forward_order for t in unit.tensors]
    assert sorted(t.name for t in found) == sorted(name for name, _ in model.named_parameters())
    assert {t.name: t.shape for t in found} == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert units.numel == sum(p.numel() for p in model.parameters())
    assert units.tied is tied
    assert (units.head is units.embed) is tied


def test_only_matrices_are_decayed() -> None:
    """C15: norms, biases, q_norm and k_norm are left alone; the rule is the number of dimensions, not a
    class.
    """
    for family in ("qwen2", "qwen3"):
        model = meta(tiny_config(family))
        units = find_units(model)
        assert set(units.decayed()) == {name for name, p in model.named_parameters() if p.dim() >= 2}
        left = [name for name, _ in model.named_parameters() if name not in units.decayed()]
        assert any("norm" in name for name in left)
        assert any(("bias" in name) or ("q_norm" in name) for name in left)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_only_matrices_of_a_mixture_are_decayed(family: str, apart: bool) -> None:
    """C15: norm classes of their own, q_norm and k_norm, biases of routers and of experts, sinks."""
    model = meta(moe_config(family))
    units = find_units(model, experts_apart=apart)
    stacks = {
        f"{n}.{leaf}" for n, m in model.named_modules() if hasattr(m, "_apply_gate") for leaf in m._parameters
    }
    matrices = {name for name, p in model.named_parameters() if p.dim() - (name in stacks) >= 2}
    assert set(units.decayed()) == matrices
    assert not [name for name in matrices if "norm" in name or name.endswith(("bias", "sinks"))]


def test_group_runs_cover_every_element_once_with_the_group_of_its_tensor() -> None:
    for unit in find_units(meta(tiny_config("qwen2"))).in_forward_order:
        runs = unit.group_runs()
        assert runs[0][0] == 0
        assert runs[-1][1] == unit.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
        for tensor in unit.tensors:
            assert [g for s, e, g in runs if s <= tensor.offset and tensor.end <= e] == [tensor.group]


def test_bytes_per_parameter_are_those_of_the_design() -> None:
    units = find_units(meta(tiny_config()))
    padded = sum(unit.numel for unit in units.in_forward_order)
    for dtype, master, expected in [("bf16", "split", 12), ("bf16", "fp32", 14), ("fp32", "split", 12)]:
        model = meta(tiny_config(), torch.bfloat16 if dtype == "bf16" else torch.float32)
        layout = build_layout(
            find_units(model), page_bytes=4096, master=master, grad_dtype="float32", boundary_nbytes=None
        )
        assert sum(p.nbytes for p in layout.planes.values() if p.durable) == expected * padded
        assert {p.plane for p in layout.planes.values() if not p.durable} == {"grad"}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_what_is_counted_once_is_what_there_is(family: str) -> None:
    """Kinds of planes, and sums over layers."""
    units = find_units(meta(moe_config(family)))
    names = tuple(unit.name for unit in units.without_experts)
    for resident in ((), names[:2], names):
        for boundary in (None, 4096):
            layout = build_layout(
                units, page_bytes=4096, master="split", grad_dtype="bfloat16", boundary_nbytes=boundary,
                resident=resident,
            )  # fmt: skip
            again = Layout(layout.page_bytes, layout.planes)
            assert layout.counted is not None
            assert again.counted is None
            assert layout.kinds == again.kinds
            assert layout.sizes == again.sizes
    for index, sums in enumerate(units.layers_summed):
        own = [(unit, tensor) for unit in units.of_layer(index) for tensor in unit.tensors]
        assert sums.parameters == sum(unit.parameters for unit in units.of_layer(index))
        assert sums.parameters == sum(tensor.numel for _, tensor in own)
        assert sums.edges == sum(size for _, tensor in own for size in tensor.shape)
        assert sums.tensors == len(own)
        assert sums.matrices == sum(len(tensor.shape) == 2 for _, tensor in own)


def test_matrices_in_a_stack_are_counted_one_by_one() -> None:
    """Experts that are part of their layer, and experts one by one, are as many products."""
    model = moe_config("qwen3_moe")
    streamed, whole = (find_units(meta(model), experts_apart=apart) for apart in (True, False))
    assert whole.layers_summed[0].tensors < streamed.layers_summed[0].tensors
    assert whole.layers_summed[0].matrices == streamed.layers_summed[0].matrices


def test_tensors_of_another_type_are_a_unit_beside_their_layer() -> None:
    model = meta(tiny_config())
    model.model.layers[1].mlp.to(torch.float32)
    units = find_units(model)
    assert [[unit.name for unit in beside] for beside in units.beside] == [[], ["layers.1.bfloat16"], []]
    assert units.layers[1].dtype == "float32"
    assert {t.name for t in units.layers[1].tensors} == {
        name for name, _ in model.named_parameters() if name.startswith("model.layers.1.mlp")
    }
    found = [t.name for unit in units.in_forward_order for t in unit.tensors]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_an_end_of_two_types_is_refused_by_name() -> None:
    model = meta(tiny_config())
    model.model.norm.to(torch.float32)
    with pytest.raises(ModelSourceError, match=r"head have the types bfloat16 and float32"):
        find_units(model)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_expert_is_a_unit(family: str) -> None:
    """Its parts and those of the others make up the stacks; nothing else is in them."""
    model = meta(moe_config(family))
    units = find_units(model)
    parameters = dict(model.named_parameters())
    parts: dict[str, list[int]] = {}
    for experts in units.experts:
        for unit in experts:
            for tensor in unit.tensors:
                assert tensor.shape == tuple(parameters[tensor.name].shape[1:])
                assert tensor.part is not None
                parts.setdefault(tensor.name, []).append(tensor.part)
                assert tensor.group == tensor.name.endswith("_bias")
    for name, found in parts.items():
        assert found == list(range(len(parameters[name])))
    whole = [t.name for unit in units.without_experts for t in unit.tensors]
    assert sorted([*whole, *parts]) == sorted(parameters)
    assert units.numel == sum(p.numel() for p in model.parameters())
    assert all(".experts." in name for name in parts)
    assert not any(".experts." in name for name in whole)
    dense = [i for i, experts in enumerate(units.experts) if not experts]
    assert dense == {"qwen3_moe": [1], "deepseek_v3": [0], "glm4_moe": [0]}.get(family, [])
    fp32 = {t.name for beside in units.beside for unit in beside for t in unit.tensors}
    kept = {name for name, p in parameters.items() if p.dtype == torch.float32}
    assert fp32 == kept


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    model = meta(moe_config("mixtral", num_local_experts=4, num_experts_per_tok=8))
    with pytest.raises(ModelSourceError, match=r"has 4 experts and each token goes to 8 .*config"):
        find_units(model)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (moe_config("mixtral", num_local_experts=0), "experts.gate_up_proj"),
        (tiny_config("qwen3", intermediate_size=0), "mlp.gate_proj.weight"),
    ],
)
def test_parameters_without_elements_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(ModelSourceError, match=rf"{named}.* would have no elements; correct the sizes"):
        find_units(meta(config))
