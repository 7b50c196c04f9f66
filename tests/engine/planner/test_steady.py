"""A forecast is of a step in steady state, however long it takes until there is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest
from support import families

from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.measure.machine import DEFAULT_TUNING, KnownDrive
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import ThrottleConfig, TiersConfig
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.drive import DriveRates
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.times import Known
from tierstream.engine.trace.picture import timeline

READ, WRITE = ByteSize("60MiB"), ByteSize("50MiB")
CPU = Machine(
    name="made up", host_bytes=1 << 30, gpu_bytes=None, cores=2,
    drives=(DriveRates(directory="d", read=READ, write=WRITE, read_mixed=READ, write_mixed=WRITE),),
    rates=Rates(
        flop_per_s=2e11, upload=None, update_parameters_per_s=2e9, device_memory=4e10, host_copy=1e10,
        page_s=1e-5, wake_s=1e-5,
    ),
)  # fmt: skip
ROWS, SEQ_LEN = 4, 64


def lru_run(folder: Path) -> RunConfig:
    """On a slow drive; with `lru` it takes four steps until DRAM holds what it will keep."""
    (folder / "drive").mkdir()
    shape = architecture("tiny", 6) | {"hidden_size": 128, "intermediate_size": 512}
    (folder / "config.json").write_text(json.dumps(shape))
    return RunConfig(
        run_dir=str(folder),
        model=ModelConfig(config=str(folder), dtype="float32"),
        data=DataConfig(files=["random tokens"], seq_len=SEQ_LEN),
        tiers=TiersConfig(
            gpu=ByteSize("16MiB"), dram=ByteSize("12MiB"), nvme_dirs=[str(folder / "drive")],
            page=ByteSize("64KiB"), throttle=ThrottleConfig(read=READ, write=WRITE), backend="posix",
            policy="lru", prefetch=ByteSize("640KiB"), writeback=ByteSize("2MiB"), resident=3,
        ),
        train=TrainConfig(rows_per_step=ROWS),
    )  # fmt: skip


def moved_by_the_run(config: RunConfig, steps: int) -> list[tuple[int, int]]:
    """Bytes read from the drive and written to it, of each step."""
    assert config.tiers.nvme_dirs is not None
    setting = Setting(gpu=config.tiers.gpu, clip_norm=1.0)
    known = KnownDrive(config.tiers.nvme_dirs[0], DEFAULT_TUNING, None, None, 1.0)
    found = []
    with TieredBench(config, [setting], [known], random_batch(1000, ROWS, SEQ_LEN, "cpu")) as bench:
        for _ in range(steps):
            before = bench.cases[0].runtime.traffic()
            bench.step(bench.cases[0])
            moved = bench.cases[0].runtime.traffic().since(before)
            found.append((moved.bytes_read["nvme"], moved.bytes_written["nvme"]))
    return found


def test_the_forecast_of_lru_is_of_a_step_like_all_later_ones(tmp_path: Path) -> None:
    """All wait for the drive alone, and the third step for three quarters of what later ones wait."""
    case = case_of(lru_run(tmp_path), CPU)
    found, third, late = (simulate(case, CPU, steps, times=Known({})) for steps in (None, 3, 16))
    assert third.step_s < 0.8 * late.step_s
    assert found.step_s == pytest.approx(mean(late.steps_s[8:]), rel=0.03)
    assert found.nbytes == pytest.approx(late.nbytes, rel=0.03)
    assert found.step_s == found.steps_s[-1]


def test_lru_moves_the_bytes_that_the_run_moves(tmp_path: Path) -> None:
    """The run moves 9 to 11 % more: threads do not come to the pages in quite the same order."""
    config = lru_run(tmp_path)
    found = simulate(case_of(config, CPU), CPU).nbytes
    late = moved_by_the_run(config, 9)[5:]
    for link, moved in zip(("nvme read", "nvme write"), zip(*late, strict=True), strict=True):
        assert found[link] == pytest.approx(mean(moved), rel=0.2), link


def test_steps_that_take_turns_give_the_median(tmp_path: Path) -> None:
    """All wait for the drive alone. Every third is slow, for good, and so is the last that is simulated."""
    families.moe_config("qwen3_moe").save_pretrained(tmp_path)
    config = RunConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(config=str(tmp_path), dtype="float32"),
        data=DataConfig(files=["random tokens"], seq_len=16),
        tiers=TiersConfig(dram=ByteSize(300_000), nvme_dirs=["d"], page=ByteSize(4096)),
        moe=MoeConfig(idle="frozen"),
        train=TrainConfig(rows_per_step=2),
    )
    counts = (2, 8, 4)  # a step updates those of the step before it

    def experts(step: int, layer: int) -> Sequence[int]:
        return range(counts[step % 3])

    found = simulate(case_of(config, CPU), CPU, times=Known({}), experts=experts)
    few, median, many = sorted(found.steps_s[-3:])
    assert few < 0.9 * median < 0.9 * 0.9 * many
    assert found.steps_s[-1] == many
    assert found.step_s == pytest.approx(median, rel=0.1)
    assert timeline(found.spans).length_ms == pytest.approx(1e3 * found.step_s)
