"""The numerics contract: resident, DRAM-tier, NVMe-tier and mixed runs agree bit for bit, whatever moves the
bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rig import Rig, Setup, batches, plan_of, rig, same_bits, tiny_config

from tierstream.engine.update.optimizer import OptimizerConfig

STEPS = 4
Result = tuple[list[tuple[float, float]], dict[tuple[str, str], np.ndarray]]


def result(setup: Setup, steps: int = STEPS) -> Result:
    """((loss, grad norm) of every step, every durable plane at the end)."""
    with rig(setup) as run:
        outcomes = run.train(batches(steps, rows=setup.rows, seq_len=setup.seq_len))
        return [(o.loss, o.verdict.grad_norm) for o in outcomes], run.planes()


def base(*, clip: bool, chunks: int, tied: bool, dtype: str = "bfloat16") -> Setup:
    rows = {1: 5, 2: 3, 5: 1}[chunks]
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.05 if clip else None, warmup_steps=1)
    return Setup(
        config=tiny_config("qwen3", tied=tied), dtype=dtype, optimizer=optimizer, rows_per_chunk=rows
    )


@functools.cache
def resident(clip: bool, chunks: int, tied: bool) -> Result:
    """All weights and activations stay on the device, all state in memory."""
    return result(base(clip=clip, chunks=chunks, tied=tied).but(gpu_all=True, activations="gpu"))


def least_dram(setup: Setup) -> int:
    return 24 * setup.page


@functools.cache
def durable_bytes(tied: bool) -> int:
    with rig(base(clip=False, chunks=1, tied=tied)) as run:
        return run.plan.durable_bytes


#: Where the state is kept, policy, prefetch; clipping, chunks, tied embeddings.
GRID = (("nvme", "mixed"), ("lru", "lookahead"), (0, None), (False, True), (1, 2, 5), (False, True))


def part_of_grid() -> Iterator[tuple[Any, ...]]:
    """Every eighth point: each combination of any two of the settings is among them."""
    for point in itertools.product(*GRID):
        a, b, c, d, e, f = (values.index(value) for values, value in zip(GRID, point, strict=True))
        if (a + b + c + d) % 2 == 0 and (c + d + e + f) % 2 == 0 and (a + c + e) % 2 == 0:
            yield point


def test_any_two_settings_are_combined() -> None:
    for two in itertools.combinations(range(len(GRID)), 2):
        found = {tuple(point[i] for i in two) for point in part_of_grid()}
        assert found == set(itertools.product(*(GRID[i] for i in two)))


@pytest.mark.parametrize(
    ("tiers", "policy", "prefetch", "clip", "chunks", "tied"),
    [*(("dram", "lookahead", None, *rest) for rest in itertools.product(*GRID[3:])), *part_of_grid()],
)
def test_every_way_of_keeping_the_state_gives_the_same_bits(
    tmp_path: Path, tiers: str, policy: str, prefetch: int | None, clip: bool, chunks: int, tied: bool
) -> None:
    setup = base(clip=clip, chunks=chunks, tied=tied).but(policy=policy, prefetch=prefetch)
    if tiers != "dram":
        dram = least_dram(setup) if tiers == "nvme" else durable_bytes(tied) // 2
        setup = setup.but(nvme=tmp_path / "drive", dram=dram)
    expected_losses, expected_planes = resident(clip, chunks, tied)
    losses, planes = result(setup)
    assert losses == expected_losses
    assert same_bits(planes, expected_planes) == []


def test_nvme_runs_really_use_the_drive(tmp_path: Path) -> None:
    setup = base(clip=True, chunks=1, tied=False)
    with rig(setup.but(nvme=tmp_path / "drive", dram=least_dram(setup))) as run:
        run.train(batches(4))
        assert run.plan.durable_bytes > 2 * run.plan.dram_bytes
        assert run.store.stats.nvme_bytes_read > run.plan.durable_bytes
        assert run.store.stats.nvme_bytes_written > run.plan.durable_bytes


@pytest.mark.parametrize("seed", range(5))
def test_delays_and_poison_change_nothing(tmp_path: Path, seed: int) -> None:
    """C09: random delays around every I/O and copy, NaN in every buffer given back: an ordering held by luck
    would show.
    """
    setup = base(clip=True, chunks=2, tied=bool(seed % 2))
    expected_losses, expected_planes = resident(True, 2, bool(seed % 2))
    delayed = setup.but(
        nvme=tmp_path / "drive",
        dram=least_dram(setup),
        faults_seed=seed,
        policy=["lru", "lookahead"][seed % 2],
    )
    losses, planes = result(delayed)
    assert losses == expected_losses
    assert same_bits(planes, expected_planes) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_and_plain_masters_and_fp32_mode_agree_between_tiers(tmp_path: Path, dtype: str) -> None:
    for master in ("split", "fp32"):
        optimizer = OptimizerConfig(lr=1e-2, master=master)  # type: ignore[arg-type]
        setup = Setup(dtype=dtype, optimizer=optimizer)
        one = result(setup.but(gpu_all=True, activations="gpu"))
        other = result(setup.but(nvme=tmp_path / master, dram=least_dram(setup)))
        assert one[0] == other[0]
        assert same_bits(one[1], other[1]) == []


def test_page_size_threads_and_gradient_buffers_change_nothing(tmp_path: Path) -> None:
    setup = base(clip=True, chunks=1, tied=False)
    expected_losses, expected_planes = resident(True, 1, False)
    for page, threads in [(4096, 1), (65536, 2)]:
        losses, planes = result(
            setup.but(page=page, threads=threads, nvme=tmp_path / str(page), dram=24 * page)
        )
        assert losses == expected_losses
        assert same_bits(planes, expected_planes) == []


@pytest.mark.parametrize("tiers", ["dram", "nvme"])
def test_a_trace_changes_nothing(tmp_path: Path, tiers: str) -> None:
    setup = base(clip=True, chunks=2, tied=False).but(trace=True)
    if tiers == "nvme":
        setup = setup.but(nvme=tmp_path / "drive", dram=least_dram(setup), faults_seed=3)
    expected_losses, expected_planes = resident(True, 2, False)
    losses, planes = result(setup)
    assert losses == expected_losses
    assert same_bits(planes, expected_planes) == []


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
@pytest.mark.parametrize("early", [False, True], ids=["deferred", "in-backward"])
@pytest.mark.parametrize("tiers", ["dram", "nvme"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_who_updates_and_when_changes_nothing(
    tmp_path: Path, tiers: str, placement: str, early: bool, tied: bool
) -> None:
    """On the CPU, or through the buffers of the device; in the next forward, or during backward. Every second
    one in chunks, with delays.
    """
    plain = ((tiers == "nvme") + (placement == "gpu") + early + tied) % 2
    chunks, seed = (1, None) if plain else (2, 7)
    setup = base(clip=False, chunks=chunks, tied=tied)
    optimizer = replace(setup.optimizer, placement=placement, check_finite=not early)  # type: ignore[arg-type]
    setup = setup.but(optimizer=optimizer, faults_seed=seed)
    if tiers == "nvme":
        setup = setup.but(nvme=tmp_path / "drive", dram=least_dram(setup))
    expected_losses, expected_planes = resident(False, chunks, tied)
    losses, planes = result(setup)
    assert losses == expected_losses
    assert same_bits(planes, expected_planes) == []


def budgets(setup: Setup) -> dict[tuple[str, ...], int]:
    """The least device budget for each number of units that stay on the device."""
    with rig(setup) as run:
        units, budget = run.units, run.plan.gpu_bytes
    found: dict[tuple[str, ...], int] = {}
    while len(found) <= len(units.in_forward_order):
        resident = plan_of(setup.but(gpu=budget), units)[0].device.resident
        found.setdefault(resident, budget)
        if len(resident) == len(units.in_forward_order):
            break
        budget += 8192
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_units_that_stay_on_the_device_change_nothing(tmp_path: Path, tied: bool) -> None:
    """From none to all of them; the ends, layers, and the state of the rest on a drive; updated later or in
    backward.
    """
    setup = base(clip=False, chunks=2, tied=tied)
    expected_losses, expected_planes = resident(False, 2, tied)
    by_units = budgets(setup)
    assert list(by_units) == [tuple(list(by_units)[-1][:count]) for count in range(len(by_units))]
    assert len(by_units) == (4 if tied else 5) + 1
    for count, budget in enumerate(by_units.values()):
        deferred = count // 2 % 2 == tied
        made = setup.but(gpu=budget, faults_seed=count)
        made = made.but(optimizer=replace(setup.optimizer, check_finite=deferred))
        if count % 2:
            made = made.but(nvme=tmp_path / str(count), dram=least_dram(setup))
        losses, planes = result(made)
        assert losses == expected_losses
        assert same_bits(planes, expected_planes) == []


def test_what_stays_on_the_device_moves_neither_up_nor_down() -> None:
    setup = base(clip=True, chunks=1, tied=True)
    everything = setup.but(gpu_all=True, activations="gpu")
    with rig(everything) as run:
        run.train(batches(3))
        traffic = run.runtime.traffic()
        assert traffic.bytes_written["gpu"] == traffic.bytes_read["gpu"] == 0
        assert not any(plane == "grad" for _, plane in run.layout.planes)


def test_planes_written_by_others_are_loaded_anew() -> None:
    """Two trainings in turn over one store, as in a benchmark."""
    setup = base(clip=True, chunks=1, tied=False)
    expected_losses, expected_planes = resident(True, 1, False)
    with rig(setup.but(gpu_all=True)) as run:
        losses = []
        for batch in batches(STEPS):
            (outcome,) = run.train([batch])
            losses.append((outcome.loss, outcome.verdict.grad_norm))
            run.runtime.flush()
            for buffer in run.runtime._state._planes.values():
                buffer.fill_(0xFF)
            run.runtime.planes_changed()
        assert losses == expected_losses
        assert same_bits(run.planes(), expected_planes) == []


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_gradients_kept_in_bfloat16_agree_between_tiers(tmp_path: Path, grad_dtype: str) -> None:
    """Rounded page by page on the device, for whoever updates."""
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.05, grad_dtype=grad_dtype)  # type: ignore[arg-type]
    setup = base(clip=True, chunks=2, tied=True).but(optimizer=optimizer)
    expected = result(setup.but(gpu_all=True, activations="gpu"))
    through_device = setup.but(optimizer=replace(optimizer, placement="gpu"), page=4096)
    for other in (
        through_device,
        through_device.but(nvme=tmp_path / "drive", dram=24 * 4096, faults_seed=2),
    ):
        losses, planes = result(other)
        assert losses == expected[0]
        assert same_bits(planes, expected[1]) == []


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_gradients_of_fp32_weights_wait_in_fp32(placement: str) -> None:
    """A page of bfloat16 gradients would lie over two pages of such weights."""
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.05, placement=placement)  # type: ignore[arg-type]
    wide = base(clip=True, chunks=1, tied=True, dtype="float32").but(optimizer=optimizer, page=4096)
    narrow = wide.but(optimizer=replace(optimizer, grad_dtype="bfloat16"))
    losses, planes = result(wide, steps=2)
    for other in (narrow, narrow.but(gpu_all=True)):
        found = result(other, steps=2)
        assert found[0] == losses
        assert same_bits(found[1], planes) == []


def test_flush_between_steps_changes_nothing() -> None:
    """The deferred update gives the bits of an update at the end of the step."""
    setup = base(clip=True, chunks=1, tied=True)
    expected_losses, expected_planes = resident(True, 1, True)
    with rig(setup) as run:
        losses = []
        for batch in batches(STEPS):
            (outcome,) = run.train([batch])
            losses.append((outcome.loss, outcome.verdict.grad_norm))
            run.runtime.flush()
        assert losses == expected_losses
        assert same_bits(run.planes(), expected_planes) == []


def poison_last_gradient(run: Rig, unit: str, at_step: int) -> None:
    """Make one element of a unit's gradient inf, in step `at_step`, after all of backward but before it is
    sent away.
    """
    gradients = run.runtime._gradients
    close, calls = gradients.close, [0]

    def closing(closed) -> None:  # type: ignore[no-untyped-def]
        if closed.name == unit:
            if calls[0] == at_step:
                gradients._open[unit][1][closed.tensors[0].offset] = float("inf")
            calls[0] += 1
        close(closed)

    gradients.close = closing  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["dram", "nvme"])
@pytest.mark.parametrize("unit", ["embed", "layers.0"])
def test_an_inf_in_the_gradient_reached_last_changes_nothing(tmp_path: Path, where: str, unit: str) -> None:
    """Everything is as if the step had not been: planes, counter, schedule, and the steps that follow."""
    setup = base(clip=True, chunks=1, tied=False)
    if where == "nvme":
        setup = setup.but(nvme=tmp_path / "drive", dram=least_dram(setup))
    first, bad, last = batches(3)
    with rig(setup.but(nvme=None, dram=None)) as run:
        expected = [(o.loss, o.verdict) for o in run.train([first, last])]
        expected_planes = run.planes()
    with rig(setup) as run:
        poison_last_gradient(run, unit, at_step=1)
        outcomes = run.train([first])
        before = run.planes()
        outcomes += run.train([bad])
        assert outcomes[1].verdict.skipped
        assert run.runtime.applied_updates == 1
        assert same_bits(run.planes(), before) == []
        outcomes += run.train([last])
        assert [(o.loss, o.verdict) for o in (outcomes[0], outcomes[2])] == expected
        assert same_bits(run.planes(), expected_planes) == []


def test_weights_written_by_others_after_a_skipped_step_are_uploaded_anew() -> None:
    """After a skip the slots are right, until somebody else changes the store."""
    setup = base(clip=True, chunks=1, tied=False, dtype="float32")
    bad, after = batches(2)

    def loss_with_other_weights(*, skip: bool) -> float:
        with rig(setup) as run:
            if skip:
                poison_last_gradient(run, "embed", at_step=0)
                assert run.train([bad])[0].verdict.skipped
            run.runtime.flush()
            for unit in run.units.in_forward_order:
                run.store.write_range(unit.name, "weight", 0, run.plane(unit.name, "weight") / 2)
            run.runtime.planes_changed()
            return run.train([after])[0].loss

    assert loss_with_other_weights(skip=True) == loss_with_other_weights(skip=False)
