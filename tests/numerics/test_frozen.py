"""Frozen parameters: what is trained is what torch trains with `requires_grad_(False)` on the rest, in every
place, and nothing is done that no trained parameter needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import family_config, moe_config
from support.rig import PlainTraining, Rig, Setup, batches, rig, same_bits, tiny_config

from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Intent

STEPS = 2
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=0.05, warmup_steps=1, weight_decay=0.5)

#: What users do: keys of `Setup`.
CASES: dict[str, dict[str, Any]] = {
    "ends": {"freeze": ["*embed_tokens*", "lm_head*"]},
    "first layers": {"freeze": ["*embed_tokens*", "*.layers.[01].*"]},
    "embedding": {"freeze": ["*embed_tokens*"]},
    "only norms": {"train_only": ["*norm*"]},
    "only attention": {"train_only": ["*.self_attn.*"], "freeze": ["*.layers.1.*"]},
    "only the head": {"train_only": ["lm_head*"]},
    "only the embedding": {"train_only": ["*embed_tokens*"]},
}
TIED: dict[str, dict[str, Any]] = {
    "tied": {"freeze": ["lm_head*"]},  # one tensor: the embedding as well
    "tied, only norms": {"train_only": ["*norm.weight"]},
}


def setup(case: str, **changes: Any) -> Setup:
    config = tiny_config("qwen3", tied=case in TIED)
    return Setup(config=config, optimizer=OPTIMIZER, **(CASES | TIED)[case], **changes)


def check_against_torch(made: Setup, steps: int = STEPS) -> None:
    """Losses and norms, and the weights at the end; frozen ones to the bit."""
    plain = PlainTraining(made)
    begin = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    with rig(made) as run:
        for batch in batches(steps):
            (outcome,) = run.train([batch])
            loss, norm = plain.step(batch, outcome.verdict.lr)
            assert outcome.loss == pytest.approx(loss, rel=1e-5)
            assert outcome.verdict.grad_norm == pytest.approx(norm, rel=1e-4)
        run.runtime.flush()
        found, moments = run.tensors(), run.tensors("exp_avg")
    assert moments.keys() == plain.masters.keys()
    for name, tensor in found.items():
        if name in plain.masters:
            torch.testing.assert_close(tensor, plain.masters[name].detach(), rtol=1e-4, atol=5e-5, msg=name)
            assert not torch.equal(tensor, begin[name])
        else:
            assert torch.equal(tensor, begin[name])


@pytest.mark.parametrize("case", CASES | TIED)
def test_training_is_that_of_torch(case: str) -> None:
    check_against_torch(setup(case))


def result(made: Setup, steps: Sequence[Batch] = ()) -> tuple[list[tuple[float, float]], dict[Any, Any]]:
    torch.manual_seed(3)
    with rig(made) as run:
        outcomes, planes = run.train(list(steps) or batches(STEPS)), run.planes()
        assert not run.runtime.updates.queue._order.waiting
        return [(o.loss, o.verdict.grad_norm) for o in outcomes], planes


@pytest.mark.parametrize("case", ["first layers", "only attention", "only the head", *TIED])
def test_every_place_gives_the_same_bits(tmp_path: Path, case: str) -> None:
    """On the device, on a drive with delays and poison, updated through the device; the last in backward."""
    made = setup(case, dtype="bfloat16", rows_per_chunk=2)
    device, drive = made.but(gpu_all=True, activations="gpu"), made.but(nvme=tmp_path, dram=24 * made.page)
    passing = replace(OPTIMIZER, placement="gpu")
    early = replace(OPTIMIZER, clip_norm=None, check_finite=False)
    late = replace(OPTIMIZER, clip_norm=None)
    for expected, *others in (
        (device, drive.but(faults_seed=1), made.but(optimizer=passing)),
        (device.but(optimizer=late), drive.but(optimizer=early)),
    ):
        losses, planes = result(expected)
        for other in others:
            found = result(other)
            assert found[0] == losses
            assert same_bits(found[1], planes) == []


@pytest.mark.parametrize("case", ["only norms", "tied, only norms"])
def test_a_pass_forward_sees_all_weights(case: str) -> None:
    """Those of the head lie in two units."""
    (batch,) = batches(1)
    with rig(setup(case, loss_chunk_tokens=10_000)) as run:
        loss, tokens = run.runtime.evaluate([batch])
        (outcome,) = run.train([batch])
        assert (loss, tokens) == (pytest.approx(outcome.loss, rel=1e-6), batch.trained_tokens)
        assert run.runtime.evaluate([batch])[0] < loss


class Watched:
    """What a run asks of its store and computes, by unit."""

    def __init__(self, run: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uses = Counter[tuple[str, str, Intent]]()
        self.recomputed = list[int]()
        acquire = run.store.acquire

        def watched(uses: Sequence[tuple[Page, Intent]], **options: Any) -> Any:
            self.uses.update((page.unit, page.plane, intent) for page, intent in uses)
            return acquire(uses, **options)

        monkeypatch.setattr(run.store, "acquire", watched)
        for index, parts in enumerate(run.runtime._sweep._parts):
            monkeypatch.setattr(parts, "recompute", partial(self._recompute, index, parts.recompute))

    def _recompute(self, index: int, recompute: Any, call: Any) -> Any:
        self.recomputed.append(index)
        return recompute(call)


def test_what_comes_before_the_first_trained_parameter_has_no_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No recompute, no kept input, no second read; that of the rest stays as it is."""
    made = setup("first layers").but(config=tiny_config("qwen3", layers=5))
    with rig(made) as run:
        watched = Watched(run, monkeypatch)
        run.train(batches(1))
        run.runtime.flush()
        pages = {unit.name: run.layout.page_count(unit.name, "weight") for unit in run.units.in_forward_order}
        assert "boundary.2" in {unit for unit, *_ in watched.uses}
        names = {unit for unit, *_ in watched.uses}
    assert watched.recomputed == [4, 3, 2]
    assert not names & {"boundary.0", "boundary.1"}
    reads = {unit: watched.uses[unit, "weight", Intent.READ] / pages[unit] for unit in pages}
    assert reads == {"embed": 1, "head": 1} | {f"layers.{i}": 1 + (i == 2) for i in range(5)}
    assert not any(run.layout.planes.keys() & {("boundary.1", "activation"), ("layers.0", "grad")})


def test_nothing_ever_writes_what_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit holds both: the frozen part has pages of its own, with weights alone."""
    for kept in ({"gpu": 1 << 40}, {"nvme": tmp_path, "dram": 24 * 8192}):
        with rig(setup("only attention", dtype="bfloat16", **kept)) as run:
            units = {unit.name: unit for unit in run.units.in_forward_order}
            frozen = {name for name, unit in units.items() if not unit.trained}
            watched = Watched(run, monkeypatch)
            run.train(batches(STEPS))
            run.runtime.flush()
        assert units.keys() - frozen == {"layers.0.trained", "layers.2.trained"}
        assert {plane for unit, plane in run.layout.planes if unit in frozen} == {"weight"}
        assert {intent for unit, _, intent in watched.uses if unit in frozen} == {Intent.READ}
        assert run.plan.frozen_parameters == sum(units[name].parameters for name in frozen)


#: Of two layers with experts, one shared expert beside them, and a router each.
MOE: dict[str, dict[str, Any]] = {
    "routers": {"freeze": ["*.mlp.gate.*"]},
    "experts": {"freeze": ["*.mlp.experts.*"]},
    "only experts": {"train_only": ["*.mlp.experts.*"]},
    "only routers": {"train_only": ["*.mlp.gate.*"]},
    "only what runs beside experts": {"train_only": ["*.shared_expert.*", "*.mlp.experts.*"]},
    "the second layer": {"train_only": ["*.layers.1.*"]},
}
COEF = 0.5


def moe_setup(case: str, **changes: Any) -> Setup:
    config = moe_config("qwen2_moe", num_hidden_layers=2, router_aux_loss_coef=COEF)
    made = Setup(config=config, optimizer=OPTIMIZER, page=4096, loss_chunk_tokens=10_000, **MOE[case])
    return made.but(moe=MoeConfig(aux_loss_coef=COEF)).but(**changes)


@pytest.mark.parametrize("stream", ["experts", "layers"])
@pytest.mark.parametrize("case", MOE)
def test_gradients_of_a_mixture_are_those_of_transformers(case: str, stream: Any) -> None:
    """The router's loss among them, whose gradient goes through a frozen router to what comes before."""
    made = moe_setup(case, moe=MoeConfig(aux_loss_coef=COEF, stream=stream))
    (batch,) = batches(1)
    labels = batch.labels.clone()
    labels[:, -1] = -100  # transformers shifts labels itself, and so has none at the end of a row
    batch = replace(batch, labels=labels, trained_tokens=int((labels != -100).sum()))
    model = PlainTraining(made).model
    shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=-100)
    out = model(input_ids=batch.input_ids, labels=shifted, output_router_logits=True, use_cache=False)
    out.loss.backward()
    expected = {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}
    with rig(made) as run:
        (outcome,) = run.train([batch])
        found = run.tensors("grad")
    assert outcome.router_losses == {"aux": pytest.approx(out.aux_loss.item(), rel=1e-6)}
    assert found.keys() == expected.keys()
    far = {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}
    assert not {name: d for name, d in far.items() if not d <= 2e-6}


@pytest.mark.parametrize("case", ["experts", "only experts", "the second layer"])
def test_idle_experts_of_a_mixture(tmp_path: Path, case: str) -> None:
    """Those of frozen layers are never behind, and have no update to wait for."""
    base = moe_setup(case, dtype="bfloat16", rows=1, rows_per_chunk=1, seq_len=4)
    steps = [batch for batch in batches(12, rows=1, seq_len=4) if batch.trained_tokens][:4]

    def with_idle(mode: Any, **changes: Any) -> tuple[list[tuple[float, float]], dict[Any, Any]]:
        made = base.but(moe=MoeConfig(idle=mode, aux_loss_coef=COEF), **changes)
        return result(made, steps)

    drive: dict[str, Any] = {"nvme": tmp_path, "dram": 40 * base.page, "faults_seed": 1}
    late = replace(OPTIMIZER, clip_norm=None)
    early = replace(late, check_finite=False)
    device: dict[str, Any] = {"gpu_all": True, "activations": "gpu"}
    for expected, found in (
        (with_idle("dense", **device), with_idle("lazy", **drive)),
        (with_idle("frozen", **device), with_idle("frozen", **drive)),
        (with_idle("dense", optimizer=late), with_idle("dense", optimizer=early)),
    ):
        assert found[0] == expected[0]
        assert same_bits(found[1], expected[1]) == []


#: gemma3n has a second table, projections around the layers, and layers that share keys and values.
GEMMA: dict[str, dict[str, Any]] = {
    "tables": {"freeze": ["*embed_tokens*"]},
    "what is around": {"train_only": ["*.layers.*"]},
    "layers that share": {"train_only": ["*.layers.[34].*"]},
    "only what is around": {"train_only": ["*altup_projections*", "*per_layer_projection_norm*"]},
}


@pytest.mark.parametrize("case", GEMMA)
def test_what_is_around_the_layers(tmp_path: Path, case: str) -> None:
    made = Setup(config=family_config("gemma3n"), optimizer=OPTIMIZER, **GEMMA[case])
    check_against_torch(made, steps=1)
    expected = result(made.but(gpu_all=True, activations="gpu"))
    found = result(made.but(nvme=tmp_path, dram=24 * made.page, faults_seed=2))
    assert found[0] == expected[0]
    assert same_bits(found[1], expected[1]) == []
