"""Which learning rate and weight decay each parameter gets, and which patterns are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from support.families import moe_config
from support.rig import tiny_config

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.update.groups import Groups
from tierstream.engine.update.optimizer import Group, OptimizerConfig
from tierstream.io.errors import ConfigError


def units_of(config: Any, **optimizer: Any) -> ModelUnits:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return find_units(model, optimizer=OptimizerConfig(**optimizer))


def groups_of(config: Any, **optimizer: Any) -> Groups:
    return units_of(config, **optimizer).groups


def group(groups: Groups, name: str) -> Group:
    return groups.table[groups.of[name]]


def test_without_patterns_there_are_matrices_and_vectors() -> None:
    groups = groups_of(tiny_config("qwen3"), weight_decay=0.2)
    assert groups.table == (Group(1.0, 0.2), Group(1.0, 0.0))
    assert group(groups, "lm_head.weight") == groups.table[0]
    assert group(groups, "model.layers.0.self_attn.q_norm.weight") == groups.table[1]


def test_the_first_pattern_that_fits_counts_and_the_two_keys_are_apart() -> None:
    groups = groups_of(
        tiny_config("qwen3"),
        lr_scale_by_name=["model.layers.1.*=0.5", "model.layers.*=0.25", "*norm*=3"],
        weight_decay_by_name=["*.down_proj.*=0.01", "model.layers.1.mlp.*=0"],
    )
    expected = {
        "model.layers.1.mlp.down_proj.weight": Group(0.5, 0.01),
        "model.layers.1.mlp.up_proj.weight": Group(0.5, 0.0),
        "model.layers.1.self_attn.q_proj.weight": Group(0.5, 0.1),
        "model.layers.0.self_attn.q_proj.weight": Group(0.25, 0.1),
        "model.layers.1.input_layernorm.weight": Group(0.5, 0.0),
        "model.layers.2.mlp.down_proj.weight": Group(0.25, 0.01),
        "model.norm.weight": Group(3.0, 0.0),
        "model.embed_tokens.weight": Group(1.0, 0.1),
    }
    assert {name: group(groups, name) for name in expected} == expected


def test_norms_do_not_decay_whatever_fits_them() -> None:
    groups = groups_of(tiny_config("qwen2"), weight_decay_by_name=["model.layers.*=0.3"])
    assert group(groups, "model.layers.0.self_attn.q_proj.weight").weight_decay == 0.3
    assert group(groups, "model.layers.0.self_attn.q_proj.bias").weight_decay == 0
    assert group(groups, "model.layers.0.input_layernorm.weight").weight_decay == 0
    groups_of(tiny_config("qwen2"), weight_decay_by_name=["*norm*=0"])


def test_every_part_of_a_stack_has_the_group_of_the_stack() -> None:
    units = units_of(moe_config("qwen3_moe"), lr_scale_by_name=["*.experts.down_proj=0.5"])
    parts = [t for own in units.experts for unit in own for t in unit.tensors]
    assert {(t.name.endswith("down_proj"), units.groups.table[t.group].lr_scale) for t in parts} == {
        (True, 0.5), (False, 1.0),
    }  # fmt: skip


def test_other_values_leave_tensors_where_they_are() -> None:
    """So values may change on resume; also to those of another group."""
    keys = ("lr_scale_by_name", "weight_decay_by_name")
    one, other = (
        units_of(tiny_config(), weight_decay=decay, **{key: [f"*.mlp.*={value}"] for key in keys})
        for decay, value in ((0.1, 0.5), (0.0, 0.0))
    )
    assert one.in_forward_order == other.in_forward_order


def test_a_line_for_each_group() -> None:
    lines = list(groups_of(tiny_config("llama"), lr_scale_by_name=["model.embed_tokens.*=0.1"]).describe())
    assert lines[1:] == [
        "optimizer: 7 tensors, lr x 1, weight decay 0: model.layers.{0-2}.input_layernorm.weight, "
        "model.layers.{0-2}.post_attention_layernorm.weight, model.norm.weight",
        "optimizer: 1 tensor, lr x 0.1, weight decay 0.1: model.embed_tokens.weight",
    ]
    assert lines[0].startswith("optimizer: 22 tensors, lr x 1, weight decay 0.1: model.layers.{0-2}.self_att")


@pytest.mark.parametrize(
    "text", ["*norm*", "=0.1", "*norm*=", "*=-0.1", "*=nan", "*=inf", "*=0.1x", "model.* 0.1"]
)
@pytest.mark.parametrize("key", ["lr_scale_by_name", "weight_decay_by_name"])
def test_what_is_no_pattern_with_a_value_is_refused(key: str, text: str) -> None:
    said = rf"optimizer\.{key} has {re.escape(repr(text))}; it must be PATTERN=VALUE with a finite value >= 0"
    with pytest.raises(ConfigError, match=said):
        OptimizerConfig(**{key: ["*=1", text]})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["lr_scale_by_name", "weight_decay_by_name"])
def test_patterns_without_effect_are_refused(key: str) -> None:
    said = rf"{key} has 'embed_tokens\.\*', and no parameter of LlamaForCausalLM .* like model\.embed_tokens"
    with pytest.raises(ConfigError, match=said):
        groups_of(tiny_config(), **{key: ["*.mlp.*=0", "embed_tokens.*=0"]})
    said = rf"{key} has 'model\.layers\.1\.mlp\.\*', but the first .*'\*\.mlp\.\*' fits model\.layers\.1\.mlp"
    with pytest.raises(ConfigError, match=said):
        groups_of(tiny_config(), **{key: ["*.mlp.*=0", "model.layers.1.mlp.*=0"]})


def test_a_decay_for_norms_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'\*norm\*=0\.1', which fits norms and biases alone, like model"):
        groups_of(tiny_config(), weight_decay_by_name=["*norm*=0.1"])
