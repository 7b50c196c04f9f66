"""The simulated step: by hand where that can be done, and by what must hold for any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support import families
from support.rig import tiny_config

from tierstream.engine.bound import Rates, least_traffic
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.device.memory import IN_FLIGHT_PAGES
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.planner.case import Case, case_of
from tierstream.engine.planner.drive import DriveRates
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.outlook import step_bound
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.times import Known
from tierstream.engine.trace.picture import timeline
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import BudgetError

PAGE = 4096
GPU = Machine(
    name="toy", host_bytes=1 << 30, gpu_bytes=1 << 30, cores=16,
    drives=(DriveRates(directory="d", read=2e6, write=1e6, read_mixed=8e5, write_mixed=6e5, latency_s=1e-4),),
    rates=Rates(flop_per_s=1e12, upload=1e6, update_parameters_per_s=float("inf")),
)  # fmt: skip


def config_of(folder: Path, model: Any, **tiers: Any) -> RunConfig:
    model.save_pretrained(folder / "model")
    return RunConfig(
        run_dir=str(folder / "run"),
        model=ModelConfig(config=str(folder / "model"), dtype="float32"),
        data=DataConfig(files=["none"], seq_len=16),
        tiers=TiersConfig(page=ByteSize(PAGE), **tiers),
        train=TrainConfig(rows_per_step=2, device="cuda"),
    )


def drives(dram: int) -> dict[str, Any]:
    return {"dram": ByteSize(dram), "nvme_dirs": ["d"]}


def weights(case: Case, *names: str) -> int:
    return sum(case.layout.spec(name, "weight").nbytes for name in names)


def test_one_layer_and_one_link_by_hand(tmp_path: Path) -> None:
    """Nothing but one link and the layers takes time. The layer begins when embedding and layer are there,
    the head when its weights are, backward when the boundary is; the layer's weights are still in their slot.
    """
    machine = replace(GPU, rates=replace(GPU.rates, download=float("inf")))
    case = case_of(config_of(tmp_path, tiny_config(layers=1)), machine)
    seconds = {("forward", "layers.0"): 0.01, ("head", "head"): 0.02, ("backward", "layers.0"): 0.04}
    found = simulate(case, machine, times=Known(seconds))
    begin = weights(case, "embed", "layers.0") / 1e6
    head_there = begin + weights(case, "head") / 1e6
    boundary_there = head_there + case.layout.spec("boundary.0", "activation").nbytes / 1e6
    expected = max(max(begin + 0.01, head_there) + 0.02, boundary_there) + 0.04
    assert found.step_s == pytest.approx(expected)
    assert found.nbytes["upload"] == pytest.approx(boundary_there * 1e6)
    assert found.busy_s["compute"] == pytest.approx(0.07)
    assert sum(found.idle_s.values()) == pytest.approx(expected - 0.07)
    assert found.resource == "upload"


def test_links_move_what_the_script_says(tmp_path: Path) -> None:
    case = case_of(config_of(tmp_path, tiny_config(layers=3), **drives(400_000)), GPU)
    found, layout, script = simulate(case, GPU), case.layout, case.script
    pairs = zip(script.uploads, script.steady_plan.assignments, strict=True)
    up = sum(layout.spec(*upload.content).nbytes for upload, planned in pairs if planned.fetch)
    down = sum(spec.nbytes for spec in layout.planes.values() if not spec.durable)
    assert found.nbytes["upload"] == up
    # The last gradients of a step go down while the next begins.
    assert found.nbytes["download"] == pytest.approx(down, abs=IN_FLIGHT_PAGES * PAGE)
    assert timeline(found.spans).length_ms == pytest.approx(1e3 * found.step_s)


@pytest.mark.parametrize("early", [False, True])
def test_drives_move_no_less_than_the_bound(tmp_path: Path, early: bool) -> None:
    """Nor much more; and more DRAM is never worse."""
    reads = []
    for dram in (400_000, 600_000, 800_000):
        config = config_of(tmp_path, tiny_config(layers=3), **drives(dram))
        if early:
            config.optimizer = OptimizerConfig(clip_norm=None, check_finite=False)
        case = case_of(config, GPU)
        found = simulate(case, GPU, 4)
        least = least_traffic(case.script.steady_uses(), case.plan, case.layout)
        moved = found.nbytes["nvme read"], found.nbytes["nvme write"]
        spare = case.plan.device.nbytes + 24 * PAGE  # buffers and leases
        assert all(few <= nbytes < few + spare for few, nbytes in zip(least, moved, strict=True))
        reads.append(moved[0])
    assert reads == sorted(reads, reverse=True)


@pytest.mark.parametrize("early", [False, True])
def test_nothing_faster_makes_a_step_slower(tmp_path: Path, early: bool) -> None:
    """In the mean of eight steps. Single ones differ by up to 15 % until it has settled which pages stay in
    these hundred frames, and some take turns for good. Layers take no time: ones that wait for a slow Python
    come later, and leave reads alone with the drive (docs/log.md).
    """

    def step_s(machine: Machine) -> float:
        return mean(simulate(case, machine, 12, times=Known({})).steps_s[4:])

    config = config_of(tmp_path, tiny_config(layers=2), **drives(400_000))
    if early:
        config.optimizer = OptimizerConfig(clip_norm=None, check_finite=False)
    slow = replace(GPU, rates=replace(GPU.rates, update_parameters_per_s=1e6, page_s=1e-4))
    case = case_of(config, slow)
    slow_s = step_s(slow)
    (drive,) = slow.drives
    for fast in (
        replace(slow, drives=(replace(drive, read=4e6, write=2e6, read_mixed=2e6, write_mixed=1e6),)),
        replace(slow, rates=replace(slow.rates, upload=4e6)),
        replace(slow, rates=replace(slow.rates, update_parameters_per_s=1e7)),
        replace(slow, rates=replace(slow.rates, page_s=0.0)),
    ):
        assert step_s(fast) <= 1.02 * slow_s


@pytest.mark.parametrize(("room", "gain"), [(1.0, 1.0), (2.0, 1.5)])
def test_cpu_and_device_update_no_faster_than_host_memory_gives(
    tmp_path: Path, room: float, gain: float
) -> None:
    """The update sets the pace. Alone the CPU moves 28 bytes for each of 1e6 parameters in a second; the link
    has time for three times as many.
    """
    rates = Rates(flop_per_s=1e15, upload=1e8, update_parameters_per_s=1e6, host_memory=room * 28e6)
    machine = replace(GPU, drives=(), rates=rates)

    def step_s(placement: Any) -> float:
        config = config_of(tmp_path, tiny_config(layers=3))
        config.optimizer = OptimizerConfig(placement=placement)
        return simulate(case_of(config, machine), machine).step_s

    alone_s, both_s = step_s("cpu"), step_s("both")
    if room == 1.0:
        assert both_s >= 0.97 * alone_s  # less only by what the CPU waits for
    else:
        assert alone_s / both_s >= gain


@pytest.mark.parametrize("mode", ["dense", "lazy", "frozen"])
def test_idle_experts_cost_what_their_mode_says(tmp_path: Path, mode: str) -> None:
    """Two of eight experts have tokens, the same in each step."""
    config = config_of(tmp_path, families.moe_config("qwen3_moe"), **drives(300_000))
    config.moe = MoeConfig(idle=mode)  # type: ignore[arg-type]
    case = case_of(config, GPU)
    found = simulate(case, GPU, 4, experts=lambda step, layer: [0, 1])
    hit = [own[i].name for own in case.units.experts if own for i in (0, 1)]
    idle = [unit.name for own in case.units.experts for unit in own if unit.name not in hit]
    uploads = {span.unit for span in found.spans if span.track == "expert upload" and not span.waiting}
    updated = {span.unit for span in found.spans if span.what == "adamw"}
    assert uploads == set(hit)
    assert updated & set(idle) == (set(idle) if mode == "dense" else set())


def test_the_bound_leaves_out_what_idle_experts_do_not_need(tmp_path: Path) -> None:
    """Two tokens with two of eight experts each: no step of the mean of some is faster than its bound."""
    config = config_of(tmp_path, families.moe_config("qwen3_moe"), **drives(300_000))
    config.train.rows_per_step, config.data.seq_len = 1, 2
    bounds = {}
    for mode in ("dense", "lazy", "frozen"):
        config.moe = MoeConfig(idle=mode)  # type: ignore[arg-type]
        case = case_of(config, GPU)
        bounds[mode] = step_bound(case, GPU)
        assert bounds[mode].step_s <= mean(simulate(case, GPU, 8).steps_s[2:])
    dense, lazy = bounds["dense"], bounds["lazy"]
    assert lazy == bounds["frozen"]
    assert lazy.nvme_written_bytes < 0.7 * dense.nvme_written_bytes
    idle, layout = case.script.expected_idle, case.layout
    busy = [unit.name for unit in case.script.streamed if unit.name not in idle]
    assert 0 < len(idle) < sum(map(len, case.units.experts))
    for bound in (dense, lazy):
        uploaded = sum(layout.spec(name, "weight").nbytes for name in busy)
        assert bound.seconds["upload"] == pytest.approx(uploaded / GPU.rates.upload)


def test_the_cpu_as_device_and_a_budget_that_is_too_small(tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_config(layers=2))
    config.train.device = "cpu"
    cpu = replace(GPU, gpu_bytes=None, rates=replace(GPU.rates, host_copy=1e9, device_memory=1e9))
    case = case_of(config, cpu)
    first, second = simulate(case, cpu), simulate(case, cpu)
    assert first.step_s == second.step_s > first.busy_s["compute"] * 0.99
    with pytest.raises(BudgetError, match="the state needs"):
        case_of(config, replace(cpu, host_bytes=100_000))
