"""Losses of the routers over a whole step: value and every gradient, as transformers has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from support.families import MOE_FAMILIES, moe_config
from support.rig import ROWS, SEQ_LEN, PlainTraining, Setup, batches, rig, tiny_config

from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.moe.router_loss import find_routers
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import StepOutcome
from tierstream.io.errors import ConfigError, ModelSourceError

#: transformers has no auxiliary loss for these; where their logits are it says since some version after 5.17.
NO_LOSS = ("deepseek_v3", "glm4_moe", "gemma4_moe")
AUX_FAMILIES = tuple(family for family in MOE_FAMILIES if family not in NO_LOSS)
#: Large, so that a gradient that lacks its part of it is far off.
COEF = 0.5


def setup(family: str, **changes: Any) -> Setup:
    attention = "eager" if family == "gpt_oss" else "sdpa"
    config = moe_config(family, router_aux_loss_coef=COEF)
    return Setup(config=config, attention=attention, page=4096, loss_chunk_tokens=10_000, **changes)


def padded(batch: Batch, lengths: list[int], width: int) -> Batch:
    """The first tokens of each row, then padding up to `width`."""
    keep = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)

    def widened(values: torch.Tensor, fill: int) -> torch.Tensor:
        wide = torch.nn.functional.pad(values, (0, max(0, width - values.shape[1])), value=fill)[:, :width]
        return torch.where(keep, wide, fill)

    labels = widened(batch.labels, -100)
    positions = torch.arange(width).repeat(len(lengths), 1)
    return Batch(widened(batch.input_ids, 0), labels, positions, int((labels != -100).sum()), ~keep)


def trained(made: Setup, batch: Batch) -> tuple[StepOutcome, dict[str, torch.Tensor]]:
    with rig(made) as run:
        torch.manual_seed(3)
        return run.train([batch])[0], run.tensors("grad")


def as_transformers(made: Setup, batch: Batch) -> tuple[Any, dict[str, torch.Tensor]]:
    """The output of transformers' own forward with its auxiliary loss, and all gradients."""
    model = PlainTraining(made).model
    mask = None if batch.padding is None else (~batch.padding).long()
    shifted = torch.nn.functional.pad(batch.labels[:, :-1], (1, 0), value=-100)
    torch.manual_seed(3)
    out = model(
        input_ids=batch.input_ids, attention_mask=mask, labels=shifted, output_router_logits=True,
        use_cache=False,
    )  # fmt: skip
    out.loss.backward()
    return out, {name: p.grad.float() for name, p in model.named_parameters()}


def without_last_label(batch: Batch) -> Batch:
    """transformers shifts labels itself, and so has none at the end of a row."""
    labels = batch.labels.clone()
    labels[:, -1] = -100
    return replace(batch, labels=labels, trained_tokens=int((labels != -100).sum()))


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Tensors whose gradient is further than 1e-6 from the expected one, in norm.

    A bias of keys moves all scores of a query alike but for the rotary embedding: its gradient is a
    difference of near-equal sums, and is judged by that of its matrix.
    """
    worst = {}
    for name, grad in expected.items():
        scale = expected[name.replace("k_proj.bias", "k_proj.weight")].norm().clamp(min=1e-12)
        worst[name] = ((found[name] - grad).norm() / scale).item()
    return {name: d for name, d in worst.items() if not d <= 1e-6}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("family", AUX_FAMILIES)
def test_balancing_loss_is_that_of_transformers(family: str, padding: bool) -> None:
    made = setup(family, moe=MoeConfig(aux_loss_coef=COEF))
    (batch,) = batches(1)
    batch = without_last_label(padded(batch, [16, 3, 9, 16, 1], 16) if padding else batch)
    out, expected = as_transformers(made, batch)
    outcome, found = trained(made, batch)
    assert outcome.router_losses == {"aux": pytest.approx(out.aux_loss.item(), rel=1e-6)}
    assert outcome.loss + COEF * outcome.router_losses["aux"] == pytest.approx(out.loss.item(), rel=1e-6)
    assert not far(found, expected)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_z_loss(family: str) -> None:
    made = setup(family, moe=MoeConfig(z_loss_coef=COEF))
    (batch,) = batches(1)
    model = PlainTraining(made).model
    logits: list[torch.Tensor] = []
    for layer in model.get_decoder().layers:
        for router, index in find_routers(model, layer):
            router.register_forward_hook(lambda _, args, out, index=index: logits.append(out[index]))
    # What transformers records of gemma4's routers are probabilities.
    found_none = not any(find_routers(model, layer) for layer in model.get_decoder().layers)
    if found_none or family == "gemma4_moe":
        with pytest.raises(
            ConfigError, match=r"moe\.z_loss_coef is 0\.5, but transformers records no router"
        ):
            trained(made, batch)
        return
    torch.manual_seed(3)
    out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    loss = torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), batch.labels.flatten())
    z_loss = torch.cat(logits).float().logsumexp(-1).square().mean()
    (loss + COEF * z_loss).backward()
    outcome, found = trained(made, batch)
    assert outcome.router_losses == {"z": pytest.approx(z_loss.item(), rel=1e-6)}
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-6)
    assert not far(found, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("stream", ["experts", "layers"])
def test_the_losses_are_of_the_whole_step(stream: Any) -> None:
    """Chunks of two rows, where layers are streamed whole, change nothing; padding lies in the last one."""
    made = setup("qwen3_moe", moe=MoeConfig(stream=stream, aux_loss_coef=COEF, z_loss_coef=COEF))
    made = made.but(rows_per_chunk=2 if stream == "layers" else ROWS)
    batch = padded(batches(1)[0], [16, 16, 16, 5, 2], 16)
    out, _ = as_transformers(made, batch)
    kept = ~batch.padding.flatten()
    z_loss = torch.cat([each[kept] for each in out.router_logits]).logsumexp(-1).square().mean()
    outcome, found = trained(made, batch)
    assert outcome.router_losses["aux"] == pytest.approx(out.aux_loss.item(), rel=1e-6)
    assert outcome.router_losses["z"] == pytest.approx(z_loss.item(), rel=1e-6)
    _, expected = trained(made.but(moe=replace(made.moe, stream="experts"), rows_per_chunk=ROWS), batch)
    assert not far(found, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_padding_does_not_count(family: str) -> None:
    """C77: the same samples with none, and with 500 tokens of padding and a row of nothing else."""
    made = setup(family, moe=MoeConfig(aux_loss_coef=COEF, z_loss_coef=COEF))
    (batch,) = batches(1)
    bare, expected = trained(made, batch)
    wide = padded(batch, [SEQ_LEN] * ROWS, SEQ_LEN + 500)
    rows = [torch.cat([values, fill]) for values, fill in zip(
        (wide.input_ids, wide.labels, wide.position_ids, wide.padding),
        (wide.input_ids[:1] * 0, wide.labels[:1] * 0 - 100, wide.position_ids[:1], ~wide.padding[:1] | True),
        strict=True,
    )]  # fmt: skip
    wide = Batch(*rows[:3], wide.trained_tokens, rows[3])
    outcome, found = trained(made.but(rows=ROWS + 1, rows_per_chunk=ROWS + 1, seq_len=SEQ_LEN + 500), wide)
    assert outcome.router_losses == pytest.approx(bare.router_losses, rel=1e-6)
    assert outcome.loss == pytest.approx(bare.loss, rel=1e-6)
    assert not far(found, expected)


def test_the_model_may_turn_the_balancing_loss_on() -> None:
    (batch,) = batches(1)
    of_run = setup("mixtral", moe=MoeConfig(aux_loss_coef=COEF))
    of_model = setup("mixtral")
    of_model.config.output_router_logits = True
    given, taken = trained(of_run, batch), trained(of_model, batch)
    assert given[0] == taken[0]
    assert all(torch.equal(given[1][name], grad) for name, grad in taken[1].items())
    off = trained(of_model.but(moe=MoeConfig(aux_loss_coef=0.0)), batch)
    assert off[0].router_losses == trained(setup("mixtral"), batch)[0].router_losses == {}


@pytest.mark.parametrize("key", ["aux_loss_coef", "z_loss_coef", "bias_update_rate"])
def test_a_model_without_routers_is_refused(key: str) -> None:
    made = Setup(config=tiny_config(), moe=MoeConfig(**{key: 0.1}))
    with pytest.raises(ConfigError, match=rf"moe\.{key} is 0\.1, but .* LlamaForCausalLM.*; set it to 0"):
        trained(made, batches(1)[0])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_coefficients_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"moe\.z_loss_coef is .*; it must be a finite number >= 0"):
        MoeConfig(z_loss_coef=value)


def test_what_is_recorded_must_be_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release of transformers had it for one family: the block in place of its router."""
    family = transformers.models.qwen3_moe.modeling_qwen3_moe
    recorded = {"router_logits": family.Qwen3MoeSparseMoeBlock}
    monkeypatch.setattr(family.Qwen3MoePreTrainedModel, "_can_record_outputs", recorded)
    made = setup("qwen3_moe", moe=MoeConfig(aux_loss_coef=COEF))
    with pytest.raises(ModelSourceError, match=r"has the shape \(5, 16, 40\) and is none, with 8 experts"):
        trained(made, batches(1)[0])
