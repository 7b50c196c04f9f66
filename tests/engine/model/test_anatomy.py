"""What is found of a model by running it on `meta`, and who is refused for it before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support.families import FAMILIES, MOE_FAMILIES, family_config
from support.rig import Setup, batches, rig
from torch import nn
from transformers import initialization

from tierstream.engine.measure.resident import replace_parameters
from tierstream.engine.model.anatomy import find_anatomy
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.decoder import layers_of
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.moe.router_loss import draws_choices
from tierstream.engine.step.layer_call import LayerCall
from tierstream.io.errors import ModelSourceError


def meta(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_its_place(family: str) -> None:
    model = meta(family_config(family))
    units, anatomy = find_units(model), find_anatomy(model)
    assert anatomy.norm == ("model.final_layernorm" if family == "phi" else "model.norm")
    more = family in ("gemma3n", "gemma4")
    assert anatomy.tables == ("model.embed_tokens", *["model.embed_tokens_per_layer"] * more)
    assert anatomy.plain_logits == (family not in ("gemma2", "gemma3n", "gemma4"))
    assert (anatomy.rows_dim, anatomy.boundary_width) == ((1, 80) if family == "gemma3n" else (0, 40))
    assert bool(anatomy.extras_width) == (more or family == "gemma4_moe")
    names = [tensor.name for unit in units.in_forward_order for tensor in unit.tensors]
    assert set(names) == {name for name, _ in model.named_parameters()}
    around = [tensor.name for unit in units.around for tensor in unit.tensors]
    assert all("per_layer" in name or "altup" in name for name in around)
    assert bool(around) == bool(units.tables) == more
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert not [module for module in model.modules() if module._forward_hooks]


def test_who_draws_to_choose_experts() -> None:
    assert [family for family in MOE_FAMILIES if draws_choices(meta(family_config(family)))] == ["phimoe"]


@pytest.mark.parametrize("change", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_are_no_matter_of_rows(change: dict[str, Any]) -> None:
    model = meta(family_config("gemma3"))
    for name, value in change.items():
        setattr(model.model.embed_tokens, name, value)
    with pytest.raises(ModelSourceError, match=rf"embed_tokens is an embedding with {next(iter(change))}"):
        find_units(model)


def test_an_embedding_that_looks_nothing_up() -> None:
    model = meta(family_config("llama"))
    own = type("Own", (nn.Embedding,), {"forward": lambda self, ids: self.weight[ids]})
    model.model.embed_tokens.__class__ = own
    with pytest.raises(ModelSourceError, match=r"embed_tokens does not look rows of its one matrix up"):
        find_units(model)


def test_layers_that_do_not_follow_one_another() -> None:
    model = meta(family_config("llama"))
    model.model.__class__ = type("Backwards", (type(model.model),), {"forward": _backwards})
    with pytest.raises(ModelSourceError, match="does not call its layers once each, one after another"):
        find_units(model)


def _backwards(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    hidden = self.embed_tokens(input_ids)
    for layer in reversed(self.layers):
        hidden = layer(hidden)
    return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def _in_tuples(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    hidden = self.embed_tokens(input_ids)
    for layer in self.layers:
        hidden = layer(hidden)[0]
    return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_layers_that_return_tuples() -> None:
    model = meta(family_config("llama"))
    model.model.__class__ = type("InTuples", (type(model.model),), {"forward": _in_tuples})
    assert find_anatomy(meta(family_config("llama"))).tuple_of is None
    assert find_anatomy(model).tuple_of == 1


def test_layers_under_another_name() -> None:
    model = meta(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64))
    assert layers_of(model) is model.transformer.h
    assert find_anatomy(model).tables == ("transformer.wte", "transformer.wpe")


def test_weights_that_tokens_do_not_need() -> None:
    """Those of another part (for pictures, say): they would have no gradient, and decay all the same."""
    model = meta(family_config("llama"))
    model.model.tower = nn.Linear(4, 4, device="meta")
    with pytest.raises(ModelSourceError, match=r"does nothing with 1 of its modules .*model\.tower"):
        find_units(model)


@pytest.mark.parametrize("family", ["gemma", "gemma3n", "gemma4"])
def test_buffers_beside_a_matrix_leave_it_alone(family: str) -> None:
    """The family's own code, which fills the buffer, draws the matrix of the same module anew."""
    model, config = meta(family_config(family)), family_config(family)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = {name: nn.Parameter(torch.full_like(p, 3.0)) for name, p in reference.named_parameters()}
    replace_parameters(model, parameters)
    materialise_buffers(model, None, "cpu")
    assert all(bool((p == 3.0).all()) for p in model.parameters())
    scale = reference.model.embed_tokens.embed_scale
    assert torch.equal(model.model.embed_tokens.embed_scale, scale)
    assert scale.item() == pytest.approx(40**0.5, rel=1e-2)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "qwen3"])
def test_what_layers_share_is_what_they_are_given(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of their own, keys and values: the width is that of the storages of a step."""
    given: dict[int, int] = {}
    kept = list[Any]()
    init = LayerCall.__init__

    def noted(call: LayerCall, *args: Any) -> None:
        init(call, *args)
        kept.append(call.extras)
        storages = (extra.untyped_storage() for extra in call.extras)
        given.update((storage.data_ptr(), storage.nbytes()) for storage in storages)

    monkeypatch.setattr(LayerCall, "__init__", noted)
    with rig(Setup(config=family_config(family), dtype="bfloat16")) as run:
        run.train(batches(1))
        assert sum(given.values()) == 2 * run.units.anatomy.extras_width * run.plan.tokens_per_step
