"""Patterns of names to parameters that are trained or not, and units of both."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from support.families import moe_config
from support.models import tiny_hf_config

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.frozen import freeze
from tierstream.engine.plan import spared_flop
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError


def meta(config: Any, **patterns: list[str]) -> Any:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    freeze(model, ModelConfig(config="of the test", **patterns))
    return model


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_patterns_name_parameters() -> None:
    everything = trained(meta(tiny_hf_config()))
    attention = {name for name in everything if ".self_attn." in name}
    assert trained(meta(tiny_hf_config(), freeze=["*.self_attn.*"])) == everything - attention
    assert trained(meta(tiny_hf_config(), train_only=["*.self_attn.*"])) == attention
    model = meta(tiny_hf_config(), train_only=["*.self_attn.*"], freeze=["*.layers.[01].*", "*q_proj*"])
    assert trained(model) == {f"model.layers.2.self_attn.{key}_proj.weight" for key in "kvo"}
    line, trained_too, *_ = find_units(meta(tiny_hf_config(), freeze=["*norm*", "*.layers.1.*"])).describe()
    assert line.startswith("frozen: 14 tensors: ")
    assert "model.layers.{0-2}.input_layernorm.weight" in line
    assert "model.layers.1.mlp.up_proj.weight" in line
    assert "model.layers.{0,2}.mlp.up_proj.weight" in trained_too


def test_a_tied_matrix_is_frozen_through_either_name() -> None:
    for name in ("lm_head.*", "*embed_tokens*"):
        model = meta(tiny_hf_config(tie_word_embeddings=True), freeze=[name])
        assert not model.lm_head.weight.requires_grad
        units = find_units(model)
        assert (units.embed.trained, [unit.name for unit in units.beside_head]) == (False, ["head"])
    assert trained(meta(tiny_hf_config(tie_word_embeddings=True), train_only=["lm_head*"])) == {
        "model.embed_tokens.weight"
    }


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"freeze": ["lm_head*", "model.layer.0.*"]}, "model.freeze has 'model.layer.0.*', and no parameter "
         "of LlamaForCausalLM has such a name; they are like model.embed_tokens.weight"),
        ({"train_only": ["*lora*"]}, "model.train_only has '*lora*', and no parameter"),
        ({"freeze": ["*"]}, "no parameter of LlamaForCausalLM is left to train by model.freeze; "),
        ({"train_only": ["*norm*"], "freeze": ["*.weight"]}, "by model.freeze and model.train_only"),
        ({"train_only": ["*embed_tokens*"], "freeze": ["lm_head*"]}, "lm_head.weight and "
         "model.embed_tokens.weight of LlamaForCausalLM are one tensor"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_meant_are_refused(patterns: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        meta(tiny_hf_config(tie_word_embeddings="embed" in said), **patterns)


def test_patterns_of_the_optimizer_are_for_what_is_trained() -> None:
    model = meta(tiny_hf_config(), freeze=["lm_head*"])
    with pytest.raises(ConfigError, match=r"lr_scale_by_name has 'lm_head\*', .* that is trained"):
        find_units(model, optimizer=OptimizerConfig(lr_scale_by_name=["lm_head*=0.1"]))


def test_a_unit_is_trained_or_frozen() -> None:
    """What is left of a layer beside its largest part is named by what sets it apart."""
    model = meta(tiny_hf_config(), train_only=["*norm*", "*.layers.2.*"])
    model.model.layers[1].input_layernorm.float()
    units = find_units(model)
    assert [unit.name for unit in units.layers] == ["layers.0", "layers.1", "layers.2"]
    assert [unit.trained for unit in units.layers] == [False, False, True]
    beside = [[(unit.name, unit.trained) for unit in own] for own in units.beside]
    assert beside[0] == [("layers.0.trained", True)]
    assert {name for name, _ in beside[1]} <= {"layers.1.trained", "layers.1.trained.float32"}
    assert beside[2] == []
    assert units.frozen + sum(p.numel() for p in model.parameters() if p.requires_grad) == units.numel
    assert units.backward_from == 0


def test_an_expert_is_frozen_as_a_whole() -> None:
    config = moe_config("olmoe")
    with pytest.raises(ConfigError, match=r"down_proj is frozen and .*gate_up_proj is trained"):
        find_units(meta(config, freeze=["*.experts.down_proj"]))
    units = find_units(meta(config, freeze=["*.experts.down_proj"]), experts_apart=False)
    assert units.frozen > 0


def test_layers_without_a_backward_cost_a_quarter() -> None:
    """FLOP per parameter and token: 2 of those, 6 of frozen ones after them, 8 of trained ones."""
    units = find_units(meta(tiny_hf_config(), freeze=["*embed_tokens*", "*.layers.0.*", "*.layers.2.*"]))
    first, second, third = (unit.parameters for unit in units.layers)
    assert units.backward_from == 1
    assert units.flop_per_token == 2 * first + 8 * second + 6 * third + 8 * units.head.parameters
    assert units.forward_flop_per_token == 2 * (first + second + third + units.head.parameters)
    largest = max(tensor.numel for tensor in units.layers[0].tensors)
    assert spared_flop(units, 10) == 10 * 2 * (2 * largest + units.head.parameters)
