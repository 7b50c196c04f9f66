from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.example_config import Boat
from support.steps import record

from tierstream.engine.config_file import load
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import (
    PlanReport,
    RunSummary,
    StepMetrics,
    TierPlan,
    TierTotals,
    read_metrics,
)
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.run.directory import RunDirectory
from tierstream.io.errors import ConfigError, StorageError


def steps_in(path: Path) -> list[int]:
    return [metrics.step for metrics in read_metrics(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def ten_steps(path: Path) -> Iterator[Path]:
    with RecordWriter(path, StepMetrics, last_step=0) as writer:
        for step in range(1, 11):
            writer.write(record(step))
    return path


def test_a_line_is_in_the_file_when_write_returns(path: Path) -> None:
    with RecordWriter(path, StepMetrics, last_step=0) as writer:
        for step in (1, 2):
            writer.write(record(step))
            assert read_metrics(path) == [record(done) for done in range(1, step + 1)]
    assert json.loads(path.read_text().splitlines()[1])["cache_hits"] == {"dram": 3}


@pytest.mark.parametrize(
    ("value", "token"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_not_a_number_stays_visible(path: Path, value: float, token: str) -> None:
    with RecordWriter(path, StepMetrics, last_step=0) as writer:
        writer.write(record(1, loss=value, grad_norm=value))
    assert f'"loss": {token}, "grad_norm": {token}' in path.read_text()
    (read,) = read_metrics(path)
    assert str(read.loss) == str(value)


@given(st.floats(), st.floats())
def test_floats_survive_to_the_bit(loss: float, norm: float) -> None:
    read = StepMetrics.from_json(record(1, loss=loss, grad_norm=norm).to_json())
    for got, put in ((read.loss, loss), (read.grad_norm, norm)):
        assert got == put or (math.isnan(got) and math.isnan(put))


@pytest.mark.parametrize("last_step", [0, 1, 4, 10, 12])
def test_resuming_cuts_the_steps_that_run_again(ten_steps: Path, last_step: int) -> None:
    with RecordWriter(ten_steps, StepMetrics, last_step=last_step) as writer:
        assert steps_in(ten_steps) == list(range(1, min(last_step, 10) + 1))
        writer.write(record(last_step + 1, loss=99.0))
    assert steps_in(ten_steps) == [*range(1, min(last_step, 10) + 1), last_step + 1]
    assert read_metrics(ten_steps)[-1].loss == 99.0


@pytest.mark.parametrize("torn_bytes", [1, 50, 200])
def test_a_line_torn_by_a_kill_is_dropped(ten_steps: Path, torn_bytes: int) -> None:
    os.truncate(ten_steps, ten_steps.stat().st_size - torn_bytes)
    assert steps_in(ten_steps) == list(range(1, 10))
    with RecordWriter(ten_steps, StepMetrics, last_step=9) as writer:
        writer.write(record(10))
    assert read_metrics(ten_steps) == [record(step) for step in range(1, 11)]


def test_untouched_lines_keep_their_bytes(ten_steps: Path) -> None:
    before = ten_steps.read_bytes().splitlines(keepends=True)
    RecordWriter(ten_steps, StepMetrics, last_step=6).close()
    assert ten_steps.read_bytes() == b"".join(before[:6])


@pytest.mark.parametrize("line", ["hello", "{}", '{"step": 3}', "[]", '{"nonsense": 1}'])
def test_a_foreign_file_is_refused_and_left_alone(ten_steps: Path, line: str) -> None:
    lines = ten_steps.read_text().splitlines()
    lines[2] = line
    ten_steps.write_text("\n".join(lines) + "\n")
    before = ten_steps.read_bytes()
    with pytest.raises(ConfigError) as caught:
        RecordWriter(ten_steps, StepMetrics, last_step=5)
    assert str(caught.value) == f"{ten_steps}:3: is not the record of a step; move the file away"
    assert ten_steps.read_bytes() == before


def test_a_full_disk_is_named(path: Path) -> None:
    with RecordWriter(path, StepMetrics, last_step=0) as writer, open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), writer._file.fileno())
        with pytest.raises(StorageError) as caught:
            writer.write(record(1))
    assert str(caught.value).startswith(f"writing {path} failed: No space left on device (errno 28)")


def test_the_summary_adds_up() -> None:
    summary = RunSummary()
    for step in (3, 4, 5):
        summary.add(
            record(step, skipped=step == 4, stall_s={"weights": 0.125, "gradients": 0.25 * (step == 5)})
        )
    assert summary == RunSummary(
        first_step=3,
        last_step=5,
        loss=2.0,
        tokens=384,
        trained_tokens=300,
        skipped_steps=1,
        step_s=1.5,
        stall_s={"weights": 0.375, "gradients": 0.25},
        tiers={
            "nvme": TierTotals(bytes_read=12288, bytes_written=3),
            "dram": TierTotals(bytes_read=24576, hits=9, misses=3),
        },
        host_peak_bytes=1005,
        gpu_peak_bytes=7,
    )


def test_run_directory_lays_out_a_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "run", resume=False)
    assert directory.path == tmp_path / "a" / "run"
    assert directory.checkpoints.is_dir()
    assert directory.data.is_dir()
    directory.write_config(Boat(name="Ada"))
    assert load(Boat, directory.config_path) == Boat(name="Ada")
    directory.write_result(RunSummary(loss=math.nan, tiers={"dram": TierTotals(hits=3)}))
    result = json.loads(directory.result_path.read_text())
    assert math.isnan(result["loss"])
    assert result["tiers"]["dram"]["hits"] == 3


@pytest.mark.parametrize("found", ["metrics.jsonl", "result.json", "checkpoints/step-00000010"])
def test_another_run_is_not_overwritten(tmp_path: Path, found: str) -> None:
    RunDirectory(tmp_path, resume=False)
    (tmp_path / found).write_text("x")
    with pytest.raises(ConfigError) as caught, RunDirectory(tmp_path, resume=False):
        pass
    assert str(caught.value) == (
        f"run_dir {tmp_path} already holds a run ({found}); choose another run_dir, or set checkpoint.resume "
        "to auto to go on with this one"
    )
    with RunDirectory(tmp_path, resume=True):
        pass
    assert (tmp_path / found).read_text() == "x"


def test_a_run_that_never_began_is_no_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, resume=False)
    directory.write_config(Boat(name="Ada"))
    RecordWriter(directory.metrics_path, StepMetrics, last_step=0).close()
    (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory(tmp_path, resume=False):
        pass


def test_a_run_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError) as caught:
        RunDirectory(file, resume=False)
    assert str(caught.value) == f"run_dir is {file}, but {file} is not a directory"
    with pytest.raises(StorageError, match=f"{file}.* failed: Not a directory"):
        RunDirectory(file / "run", resume=False)


def test_two_processes_cannot_share_a_run_directory(tmp_path: Path) -> None:
    """Whoever begins a new run in it is told that, too, and not to go on with what is there."""
    taken = f"process {os.getpid()} is using this directory"
    with RunDirectory(tmp_path, resume=True) as held:
        held.metrics_path.write_text("x")
        for resume in (True, False):
            with pytest.raises(StorageError, match=taken):
                RunDirectory(tmp_path, resume=resume).__enter__()
    with RunDirectory(tmp_path, resume=True):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_without_rights_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StorageError, match="Permission denied"):
        RunDirectory(tmp_path / "run", resume=False)
    tmp_path.chmod(stat.S_IRWXU)


def test_the_bound_is_the_slowest_resource() -> None:
    plan = PlanReport(
        parameters=1,
        tokens_per_step=1,
        first_step=1,
        last_step=2,
        dtypes={},
        tiers=(TierPlan(tier="dram", holds="", used_bytes=1),),
        bound_s={"compute": 1.0, "nvme": 3.0, "update": 2.0},
    )
    assert plan.bound == ("nvme", 3.0)


def test_the_observer_that_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    Callback().on_step(record(1))
    Callback().on_event("x")
    Callback().on_end(RunSummary())
    assert capsys.readouterr() == ("", "")
