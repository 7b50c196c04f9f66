"""What the gate says of every family, and that it sees what would go wrong silently."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from support.families import FAMILIES, MOE_FAMILIES, family_config

from tierstream.engine.device.device import Device
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.parity.gate import compare_twin
from tierstream.engine.parity.twin import tiny_config
from tierstream.engine.parity.verdict import NAMES, Verdict
from tierstream.engine.step.layer_call import LayerCall


def verdict_of(config: Any, **settings: Any) -> Verdict:
    return compare_twin(config, ModelConfig(config="-", **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    """Loss and gradients of a step over rows of several documents, loading and export, in fp32 and bf16: to
    the bit, but for sums in another order, of rows of tables, and of experts that are computed one by one.
    """
    before = torch.random.get_rng_state()
    verdict = verdict_of(family_config(family))
    assert verdict.why_not is None
    assert [check.name for check in verdict.checks] == list(NAMES)
    assert verdict.packs == (family != "qwen3_next")  # linear attention
    assert ("experts one by one" in verdict.found("gradients")) == (family in MOE_FAMILIES)
    assert verdict.found("load") == verdict.found("export") == "equal to the bit"
    assert verdict.found("loss") == "equal to the bit" or family in MOE_FAMILIES
    assert torch.equal(torch.random.get_rng_state(), before)


def test_parameters_that_the_family_never_trains() -> None:
    """Correction biases of routers."""
    config = transformers.Ernie4_5_MoeConfig()
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(config))
    assert any(not parameter.requires_grad for parameter in model.parameters())
    assert verdict_of(config).why_not is None


def test_tokens_that_are_moved_to_the_device_of_a_matrix() -> None:
    assert verdict_of(transformers.Llama4TextConfig()).why_not is None


def test_gradients_that_layers_exchange_beside_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the same without them."""

    class Forgetful(LayerCall):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.extras, self._extras_at = [], []

    monkeypatch.setattr("tierstream.engine.step.streamed_layers.LayerCall", Forgetful)
    verdict = verdict_of(family_config("gemma4"))
    assert verdict.found("loss") == "equal to the bit"
    assert "differ" in str(verdict.why_not)


def test_random_numbers_of_forward_are_those_of_the_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout; the loss is the same without them."""
    config = family_config("llama", attention_dropout=0.3)
    assert verdict_of(config).why_not is None
    monkeypatch.setattr(Device, "replayed_rng", lambda *_: nullcontext())
    verdict = verdict_of(config)
    assert verdict.found("loss") == "equal to the bit"
    assert "differ" in str(verdict.why_not)


def test_products_that_add_up_in_an_order_by_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MKL does on AMD's processors: whatever the address decides, both sides have the same of it."""
    linear = torch.nn.functional.linear

    def by_address(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, *bias) * (1 + weight.data_ptr() % 64 / 4096)

    monkeypatch.setattr("torch.nn.functional.linear", by_address)
    verdict = verdict_of(family_config("llama"))
    assert (verdict.why_not, verdict.found("loss")) == (None, "equal to the bit")
    monkeypatch.setattr("tierstream.engine.parity.compare._align", lambda model: None)
    assert str(verdict_of(family_config("llama")).why_not).startswith("loss: ")


def test_attention_that_does_not_know_of_documents() -> None:
    """gpt-oss in transformers' own attention: its masks leave positions out."""
    verdict = verdict_of(family_config("gpt_oss"), attention="eager")
    assert (verdict.why_not, verdict.packs) == (None, False)
