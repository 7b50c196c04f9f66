"""What becomes of experts without tokens: as in torch, put off, or left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.families import moe_config
from support.rig import PlainTraining, Rig, Setup, batches, keep_gradients, rig, same_bits, zeros_cross

from tierstream.engine.device.kernels import cpu_adamw
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig, adamw_settings
from tierstream.io.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

#: Of the long run, and of the others.
STEPS, FEWER_STEPS = 200, 45
EARLY = pytest.mark.parametrize("early", [False, True], ids=["deferred", "in-backward"])


def setup(mode: str, family: str = "gpt_oss", **changes: Any) -> Setup:
    """Two layers of eight experts, of which a token chooses two; pages hold tensors of both decay rules."""
    config = moe_config(family, num_hidden_layers=2)
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=10, weight_decay=0.5)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    made = Setup(
        config=config, optimizer=optimizer, attention=attention, page=8192, dtype="bfloat16", rows=1,
        rows_per_chunk=1, seq_len=4, total_updates=STEPS, moe=MoeConfig(idle=mode),  # type: ignore[arg-type]
    )  # fmt: skip
    return made.but(**changes)


def in_backward(made: Setup) -> Setup:
    return made.but(optimizer=replace(made.optimizer, clip_norm=None, check_finite=False))


def steps(count: int) -> list[Batch]:
    """Four tokens each, of which some are trained on."""
    made = batches(count + 10, rows=1, seq_len=4)
    return [batch for batch in made if batch.trained_tokens][:count]


def experts(run: Rig) -> set[str]:
    return {unit.name for own in run.units.experts for unit in own}


def idle(run: Rig) -> set[str]:
    """Experts without tokens in the latest step."""
    return {unit.name for parts in run.runtime._sweep._parts for unit in parts.experts.idle}


class Trained(NamedTuple):
    outcomes: list[tuple[float, float, int]]
    planes: dict[Any, np.ndarray]
    idle: list[set[str]]
    """Step by step."""


def train(run: Rig, batches_: Sequence[Batch], *, flush_after: Collection[int] = ()) -> Trained:
    outcomes, idle_in = [], []
    for index, batch in enumerate(batches_):
        (outcome,) = run.train([batch])
        outcomes.append((outcome.loss, outcome.verdict.grad_norm, outcome.verdict.update))
        idle_in.append(idle(run))
        if index in flush_after:
            run.runtime.flush()
    return Trained(outcomes, run.planes(), idle_in)


def result(made: Setup, count: int, prepare: Callable[[Rig], None] = lambda run: None) -> Trained:
    with rig(made) as run:
        prepare(run)
        return train(run, steps(count))


def resumed(made: Setup, planes: dict[Any, np.ndarray], applied: int) -> Rig:
    """A new runtime over planes of an earlier one."""
    run = Rig(made.but(applied_updates=applied))
    for (unit, plane), values in planes.items():
        run.store.write_range(unit, plane, 0, values)
    return run


@cache
def dense(count: int, early: bool) -> Trained:
    made = setup("dense")
    return result(in_backward(made) if early else made, count)


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.outcomes == expected.outcomes
    assert same_bits(found.planes, expected.planes) == []


def longest_pause(trained: Trained) -> int:
    """Most steps in a row without tokens, between two steps with tokens, of any expert."""
    longest = 0
    for name in set().union(*trained.idle):
        hits = [i for i, idle_now in enumerate(trained.idle) if name not in idle_now]
        longest = max([longest, *(b - a - 1 for a, b in pairwise(hits))])
    return longest


@EARLY
def test_dense_is_an_update_with_zeros(early: bool) -> None:
    expected = dense(FEWER_STEPS, early)
    assert all(expected.idle)
    assert longest_pause(expected) >= 10
    made = in_backward(setup("dense")) if early else setup("dense")
    with rig(made) as run:
        zeros_cross(run)
        found = train(run, steps(FEWER_STEPS))
        assert not run.runtime.updates.queue._order._stored  # each gradient was read
    assert_same(found, expected)


def test_dense_is_adamw_on_stacks_of_experts() -> None:
    """torch moves experts that have no tokens; bits of fp32 sums differ."""
    made = setup("dense", "olmoe", dtype="float32", loss_chunk_tokens=1000)
    made = made.but(optimizer=replace(made.optimizer, lr=1e-3, eps=1e-6))
    plain = PlainTraining(made)
    with rig(made) as run:
        for batch in steps(25):
            (outcome,) = run.train([batch])
            assert idle(run)
            loss, norm = plain.step(batch, outcome.verdict.lr)
            assert outcome.loss == pytest.approx(loss, rel=1e-5)
            assert outcome.verdict.grad_norm == pytest.approx(norm, rel=1e-4)
        run.runtime.flush()
        for name, tensor in run.tensors().items():
            atol = 1e-6 if ".experts." in name else 2e-5  # rows of the embedding that have hardly a gradient
            torch.testing.assert_close(tensor, plain.masters[name].detach(), rtol=1e-5, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("where", "early", "count"),
    [
        ("dram", False, STEPS),
        ("dram", True, FEWER_STEPS),
        ("drive", False, FEWER_STEPS),
        ("drive", True, FEWER_STEPS),
    ],
)
def test_lazy_is_dense(tmp_path: Path, where: str, early: bool, count: int) -> None:
    """Across flushes in the middle and a resume, with warm-up, cosine and clipping."""
    made = in_backward(setup("lazy")) if early else setup("lazy")
    if where == "drive":
        made = made.but(nvme=tmp_path / "drive", dram=30 * made.page)
    all_steps = steps(count)
    with rig(made) as run:
        first = train(run, all_steps[:30], flush_after=(10, 11, 22))
    run = resumed(made, first.planes, 30)
    try:
        second = train(run, all_steps[30:])
    finally:
        run.close()
    assert_same(Trained(first.outcomes + second.outcomes, second.planes, []), dense(count, early))


@pytest.mark.parametrize("mode", ["dense", "lazy"])
@pytest.mark.parametrize(("placement", "grad_dtype"), [("gpu", "float32"), ("both", "bfloat16")])
def test_every_placement_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, mode: str, placement: str, grad_dtype: str
) -> None:
    """The CPU as host and as device; where the device alone updates, it replays as well."""
    base = setup("dense")
    base = base.but(optimizer=replace(base.optimizer, grad_dtype=grad_dtype))
    expected = result(base, 16)
    if placement == "both":
        monkeypatch.setattr(OptimizerConfig, "updates_on_device", lambda config, **_: True)
    made = base.but(
        moe=MoeConfig(idle=mode), optimizer=replace(base.optimizer, placement=placement), faults_seed=1
    )
    assert_same(result(made, 16), expected)


@pytest.mark.parametrize("mode", ["dense", "lazy", "frozen"])
def test_a_step_that_is_skipped_is_none_for_any_expert(tmp_path: Path, mode: str) -> None:
    """Losses and planes are those of a run without it, over a drive on which updates are held back."""
    before, bad, after = steps(3)
    made = setup(mode, "olmoe", config=moe_config("olmoe", num_hidden_layers=2, tie_word_embeddings=True))
    with rig(made) as run:
        expected = train(run, [*steps(12)[3:], before, after, before])
    with rig(made.but(nvme=tmp_path / "drive", dram=30 * made.page, faults_seed=2)) as run:
        found = train(run, [*steps(12)[3:], before])
        gradients = run.runtime._gradients
        sums = gradients.losses_and_sums_of_squares
        gradients.losses_and_sums_of_squares = lambda loss: (sums(loss)[0], [np.inf])  # type: ignore[method-assign]
        assert run.train([bad])[0].verdict.skipped
        gradients.losses_and_sums_of_squares = sums  # type: ignore[method-assign]
        rest = train(run, [after, before])
    assert_same(Trained(found.outcomes + rest.outcomes, rest.planes, []), expected)


@EARLY
def test_frozen_experts_do_not_move(early: bool) -> None:
    """Every other plane is that of AdamW with the gradient that was stored; steps count for all."""
    made = in_backward(setup("frozen")) if early else setup("frozen")
    with rig(made) as run:
        planes = run.planes()
        gradients = keep_gradients(run)
        for batch in steps(12):
            gradients.clear()
            (outcome,) = run.train([batch])
            assert idle(run) == experts(run) - gradients.keys()
            for unit in run.units.in_forward_order:
                if unit.name in gradients:
                    own = {plane: values for (name, plane), values in planes.items() if name == unit.name}
                    own["grad"] = gradients[unit.name]
                    for first, last, group in unit.group_runs():
                        part = {plane: values[first:last] for plane, values in own.items()}
                        own_group = run.units.groups.table[group]
                        cpu_adamw(part, adamw_settings(made.optimizer, outcome.verdict, own_group), 1)
            assert same_bits(run.planes(), planes) == []


def test_an_expert_that_is_behind_is_no_guess() -> None:
    """Its weights are old; those of the others are read ahead, in the order of the guesses."""
    with rig(setup("lazy")) as run:
        run.train(steps(3))
        cache, behind = run.runtime.experts, [n for n in experts(run) if run.runtime._idle.is_behind(n)]
        assert behind
        assert cache is not None
        current = next(iter(experts(run) - set(behind)))
        cache.forget()
        cache.expect([*behind, current])
        deadline = time.monotonic() + 20
        while cache._slots.filled([current]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert all(cache._slots.filled([name]) is None for name in behind)


@pytest.mark.parametrize("mode", ["lazy", "frozen"])
def test_whole_layers_have_no_idle_experts(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"moe\.idle is {mode} and moe\.stream is layers.*use moe\.idle"):
        MoeConfig(idle=mode, stream="layers")  # type: ignore[arg-type]


def leave_without_tokens(run: Rig, *cold: int) -> None:
    """The routers choose these experts no more."""
    for unit in run.units.layers:
        (bias,) = (tensor for tensor in unit.tensors if tensor.name.endswith("router.bias"))
        for index in cold:
            run.store.write_range(unit.name, "weight", bias.offset + index, np.full(1, 0xC2C8, np.uint16))


def watched(run: Rig) -> tuple[set[str], set[str]]:
    """Units of which a page is leased, and units of which one is read from the drive, from now on."""
    leased: set[str] = set()
    read: set[str] = set()
    acquire, directory_read = run.store.acquire, run.directory.read  # type: ignore[union-attr]

    def acquiring(uses: Iterable[Any], **options: Any) -> Any:
        leased.update(page.unit for page, _ in uses)
        return acquire(uses, **options)  # type: ignore[arg-type]

    def reading(page: Any, frame: Any) -> Any:
        read.add(page.unit)
        return directory_read(page, frame)

    run.store.acquire = acquiring  # type: ignore[method-assign]
    run.directory.read = reading  # type: ignore[union-attr, method-assign]
    return leased, read


@pytest.mark.parametrize("mode", ["dense", "lazy", "frozen"])
def test_only_experts_with_tokens_are_read(tmp_path: Path, mode: str) -> None:
    """In their step and, for its update, in the next; what is read ahead lags one behind. Dense reads all."""
    made = setup(mode)
    with rig(made.but(nvme=tmp_path / "drive", dram=30 * made.page)) as run:
        leave_without_tokens(run, 2, 5, 7)
        leased, read = watched(run)
        every, touched, hit_before = experts(run), set[str](), set[str]()
        for index, batch in enumerate(steps(12)):
            leased.clear()
            run.train([batch])
            hit = every - idle(run)
            touched |= hit
            if mode == "dense":
                assert leased & every == (hit if index == 0 else every)
                continue
            assert hit <= leased
            assert leased & every <= hit | hit_before
            assert read & every <= touched
            hit_before = hit
        assert touched < every
        assert (every <= read) == (mode == "dense")
        run.runtime.flush()
        assert (every <= leased) == (mode != "frozen")
