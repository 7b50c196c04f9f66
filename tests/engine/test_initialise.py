"""Random weights: the family's own rules; the same values whatever the order, the units and the dtype."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import DENSE, Flat, different, tiny_hf_config, two_units

from tierstream.engine.initialise import init_weights
from tierstream.engine.meta_model import build_meta_model
from tierstream.engine.model_config import ModelConfig
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Unit, pack_unit


def meta_model(path: Path, config: Any, dtype: str = "bfloat16") -> Any:
    config.save_pretrained(path)
    return build_meta_model(ModelConfig(config=str(path), dtype=dtype))[0]  # type: ignore[arg-type]


def drawn(model: Any, units: list[Unit], seed: int = 1) -> dict[str, torch.Tensor]:
    flat = Flat(units)
    init_weights(model, flat.units, seed, flat.write)
    return flat.tensors()


def one_tensor_units(model: Any) -> list[Unit]:
    return [
        pack_unit(name, "float32", [(name, tuple(p.shape), True)]) for name, p in model.named_parameters()
    ]


@pytest.mark.parametrize("family", DENSE)
def test_values_follow_the_rules_of_the_family(tmp_path: Path, family: str) -> None:
    """Constant tensors equal those of transformers; drawn ones have its mean and standard deviation."""
    config = tiny_hf_config(family, initializer_range=0.05)
    model = meta_model(tmp_path, config)
    torch.manual_seed(0)
    reference = dict(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters()
    )
    values = drawn(model, two_units(model))
    assert values.keys() == reference.keys()
    for name, tensor in values.items():
        expected = reference[name].detach()
        if torch.all(expected == expected.flatten()[0]):
            assert torch.equal(tensor, expected), name
        else:
            assert abs(float(tensor.mean())) < 4 * 0.05 / tensor.numel() ** 0.5
            assert float(tensor.std()) == pytest.approx(0.05, rel=4 / tensor.numel() ** 0.5)
    assert not torch.equal(
        values["model.layers.0.mlp.up_proj.weight"], values["model.layers.1.mlp.up_proj.weight"]
    )


def test_values_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    model = meta_model(tmp_path / "bf16", tiny_hf_config())
    expected = drawn(model, two_units(model))
    shuffled = one_tensor_units(model)
    random.Random(4).shuffle(shuffled)
    torch.manual_seed(123)
    assert different(drawn(model, shuffled), expected) == []
    assert (
        different(drawn(meta_model(tmp_path / "fp32", tiny_hf_config(), "float32"), shuffled), expected) == []
    )
    again = drawn(model, two_units(model), seed=2)
    assert "model.layers.0.mlp.up_proj.weight" in different(again, expected)
    assert "model.norm.weight" not in different(again, expected)


def test_tied_matrix_is_drawn_once_and_as_untied(tmp_path: Path) -> None:
    tied = meta_model(tmp_path / "tied", tiny_hf_config(tie_word_embeddings=True))
    untied = meta_model(tmp_path / "untied", tiny_hf_config())
    values, others = drawn(tied, two_units(tied)), drawn(untied, two_units(untied))
    assert different(values, others) == ["lm_head.weight"]
    assert not torch.equal(others["lm_head.weight"], others["model.embed_tokens.weight"])


def test_padding_row_of_the_embedding_is_zero(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config(pad_token_id=5))
    embedding = drawn(model, two_units(model))["model.embed_tokens.weight"]
    assert (embedding == 0).all(dim=1).nonzero().flatten().tolist() == [5]


def test_rules_at_a_parent_module_apply(tmp_path: Path) -> None:
    """GPT-2 scales output projections by depth, in a rule that looks at the children of a block."""
    config = transformers.GPT2Config(n_embd=64, n_layer=8, n_head=2, n_positions=32, vocab_size=259)
    model = meta_model(tmp_path, config)
    values = drawn(model, two_units(model))
    scaled = config.initializer_range / (2 * config.n_layer) ** 0.5
    for name in ("transformer.h.3.attn.c_proj.weight", "transformer.h.7.mlp.c_proj.weight"):
        assert float(values[name].std()) == pytest.approx(scaled, rel=0.1)
    assert float(values["transformer.h.3.mlp.c_fc.weight"].std()) == pytest.approx(
        config.initializer_range, rel=0.1
    )


def test_models_flags_and_generators_are_left_as_they_were(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    torch.manual_seed(9)
    state = torch.get_rng_state()
    drawn(model, two_units(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(hasattr(parameter, "_is_hf_initialized") for parameter in model.parameters())


def test_parameter_without_a_rule_is_refused(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    model.model.layers[1].register_parameter("extra", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ModelSourceError, match=r"give model\.layers\.1\.extra no finite value"):
        drawn(model, one_tensor_units(model))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a rule draws, nothing holds what was drawn before."""
    model = meta_model(tmp_path, tiny_hf_config())
    written: list[weakref.ref] = []
    rule, calls = transformers.PreTrainedModel._init_weights, []

    def checked(self: Any, module: torch.nn.Module) -> None:
        assert not any(reference() is not None for reference in written)
        assert sum(not parameter.is_meta for parameter in model.parameters()) == 1
        calls.append(module)
        rule(self, module)

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", checked)
    init_weights(model, two_units(model), 0, lambda unit, start, values: written.append(weakref.ref(values)))
    assert len(written) == len(list(model.parameters()))
    assert len(calls) > len(written)
