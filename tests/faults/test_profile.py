"""Runs with a machine profile: its tuning and rates are taken, nothing is measured; a bad one is told before
the corpus is read. And what the plan says of the bytes that a run will write.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command import Command, nothing_is_half_made, nothing_is_locked, use_drive
from support.faults import FaultySyscalls
from support.runs import make_run, records, train

from tierstream.engine import plan_report
from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.measure import adam_rates, compute_rates, machine
from tierstream.engine.metrics import PlanReport, StepMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io import drive_rates, probes, seam
from tierstream.io.drive_rates import Tuning
from tierstream.io.errors import ConfigError
from tierstream.io.profile import DriveProfile, MachineProfile, drive_identity

TUNING = Tuning(threads=3, task_bytes=1 << 20, queue_depth=5)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = make_run(tmp_path, steps=2)
    made.checkpoint.at_end = False
    made.tiers.backend = "posix"
    use_drive(made, tmp_path / "drive")
    return made


def profile_of(drive: Path) -> MachineProfile:
    """Of this machine, as if measured."""
    device, filesystem = drive_identity(drive)
    return MachineProfile(
        cpu=probes.cpu_model(),
        measured="2026-01-02T03:04:05+00:00",
        drives=(
            DriveProfile(
                directory=str(drive), device=device, filesystem=filesystem, backend="posix", tuning=TUNING,
                read=1.25e9, write=0.75e9, mixed=1.5e9,
            ),
        ),
        update={str(torch.get_num_threads()): 2.5e8},
        compute={"cpu bfloat16": 4e10, "cpu float32": 8e10},
    )  # fmt: skip


def use_profile(config: RunConfig, folder: Path) -> Path:
    file = folder / "machine.json"
    profile_of(folder / "drive").save(file)
    config.tiers.profile = str(file)
    return file


class Measured:
    """Counts what is measured of the processor, and the scratch folders that are made on drives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processor: list[str] = []
        self.calls = FaultySyscalls()
        for module, name in ((adam_rates, "update_rate"), (compute_rates, "matmul_rate")):
            monkeypatch.setattr(module, name, lambda *_, name=name: self.processor.append(name) or 1e9)

    @property
    def folders(self) -> list[str]:
        return [call.path for call in self.calls.calls if call.name == "mkdir" and "-scratch-" in call.path]


def test_a_run_with_a_profile_uses_it_and_measures_nothing(
    command: Command, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_profile(config, tmp_path)
    measured = Measured(monkeypatch)
    with seam.injected(measured.calls):
        status, out, err = command.train(config)
    assert (status, err) == (0, "")
    assert (measured.folders, measured.processor) == ([], [])
    (line,) = re.findall(rf"^{re.escape(str(tmp_path / 'drive'))}: .* blocks of .*$", out, re.MULTILINE)
    assert ", 3 threads, blocks of 1.00 MiB; " in line
    assert line.endswith("1.25 GB/s read; 0.75 GB/s written; 1.50 GB/s both at once")
    assert [record["step"] for record in records(config)] == [1, 2]


def test_a_run_without_a_profile_measures(
    command: Command, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above watches for is there to be seen."""
    measured, config.tiers.profile = Measured(monkeypatch), None
    with seam.injected(measured.calls):
        assert command.train(config)[::2] == (0, "")
    assert [Path(path).parent for path in measured.folders] == [tmp_path / "drive"]
    assert sorted(measured.processor) == ["matmul_rate", "update_rate"]


def test_the_backend_really_works_as_the_profile_says(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = use_profile(config, tmp_path), []
    open_backend = drive_rates.open_backend

    def opening(name: str, **options: int):  # type: ignore[no-untyped-def]
        seen.append(options)
        return open_backend(name, **options)

    monkeypatch.setattr(drive_rates, "open_backend", opening)
    Measured(monkeypatch)
    train(config)
    assert seen[-1] == {"threads": 3, "task_bytes": 1 << 20, "queue_depth": 5}
    config.tiers.io_threads, config.run_dir = 2, str(tmp_path / "again")
    train(config)
    assert seen[-1] == {"threads": 2, "task_bytes": 1 << 20, "queue_depth": 5}
    assert MachineProfile.load(file) == profile_of(tmp_path / "drive")


def test_a_profile_of_another_machine_is_not_believed(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its processor nor a drive with another number."""
    file = use_profile(config, tmp_path)
    known = MachineProfile.load(file)
    other = replace(known.drives[0], device="999:999")
    replace(known, cpu="Abacus 3000", drives=(other,)).save(file)
    measured = Measured(monkeypatch)
    with seam.injected(measured.calls):
        train(config)
    assert len(measured.folders) == 1
    assert sorted(measured.processor) == ["matmul_rate", "update_rate"]


@pytest.mark.parametrize("trouble", ["missing", "damaged", "no profile", "a directory"])
def test_a_bad_profile_is_told_before_the_corpus_is_read(
    command: Command, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    file = use_profile(config, tmp_path)
    said = [str(file)]
    if trouble == "missing":
        file.unlink()
        said += ["No such file or directory"]
    elif trouble == "damaged":
        file.write_bytes(file.read_bytes()[:-20])
        said += ["is not a machine profile", "write it anew with `tierstream bench --profile"]
    elif trouble == "no profile":
        file.write_bytes(b"\xff\xfe\x00")
        said += ["is not a machine profile"]
    else:
        file.unlink()
        file.mkdir()
        said += ["Is a directory"]
    measured = Measured(monkeypatch)
    with seam.injected(measured.calls):
        command.refused_train(config, said)
    assert (measured.folders, measured.processor) == ([], [])
    nothing_is_half_made(config)
    nothing_is_locked(config)
    assert not (Path(config.run_dir) / "data" / "tokens").exists()
    assert list((tmp_path / "drive").iterdir()) == []


class Written(Callback):
    """The plan, and what the steps really wrote to the drives."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def on_plan(self, plan: PlanReport) -> None:
        self.plan = plan

    def on_step(self, metrics: StepMetrics) -> None:
        self.nbytes.append(metrics.bytes_written["nvme"])


def test_the_plan_tells_what_the_drives_will_be_written(
    command: Command, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31: what a steady state cannot do without, and not half of it; and terabytes on the screen."""
    rates = Rates(flop_per_s=1e9, upload=None, update_parameters_per_s=1e9)
    monkeypatch.setattr(plan_report, "machine_rates", lambda *_: rates)
    monkeypatch.setattr(machine, "measure_drive", lambda *_: None)
    config.train.steps = 10
    config.tiers.page, config.tiers.dram = ByteSize(4096), ByteSize(40 * 4096)
    observer = Written()
    Trainer(config, [observer]).run()
    planned = observer.plan.written_bytes_per_step
    assert planned > 0
    # The first two steps fill the cache, and the last leaves an update to be done.
    steady = observer.nbytes[2:-1]
    assert planned <= sum(steady) / len(steady) < 2 * planned, (planned, observer.nbytes)
    config.run_dir = str(tmp_path / "again")
    out = command.train(config)[1]
    told = re.search(
        r"^drives are written at least (\S+) GB per step, (\S+) TB by step 10, up to \S+ TB a day$", out, re.M
    )
    assert told is not None, out
    assert float(told[1]) == pytest.approx(planned / 1e9, rel=0.01)
    assert float(told[2]) == pytest.approx(10 * planned / 1e12, rel=0.01)


def test_the_plan_of_a_run_in_dram_wears_no_drive(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measured(monkeypatch)
    config = make_run(tmp_path, steps=1)
    config.checkpoint.at_end = False
    assert "GB per step" not in command.train(config)[1]


class Events(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_says_what_it_takes_from_the_profile(config: RunConfig, tmp_path: Path) -> None:
    (drive,) = config.tiers.nvme_dirs or []
    file = tmp_path / "machine.json"
    config.tiers.profile = str(file)
    said = []
    mine = profile_of(Path(drive))
    for profile in (mine, replace(mine, drives=()), replace(mine, cpu="Another CPU")):
        profile.save(file)
        observer = Events()
        shutil.rmtree(config.run_dir, ignore_errors=True)
        Trainer(config, [observer]).run()
        said.append([line for line in observer.lines if line.startswith(str(file))])
    assert said == [
        [f"{file}: {drive} as of 2026-01-02T03:04:05+00:00"],
        [f"{file}: {drive} not in it by way of posix: measured now"],
        [f"{file} is of another machine (Another CPU; this is {probes.cpu_model()}): measured now"],
    ]


def test_a_drive_inside_another_is_refused(command: Command, config: RunConfig) -> None:
    (drive,) = config.tiers.nvme_dirs or []
    inner = Path(drive) / "inner"
    inner.mkdir()
    config.tiers.nvme_dirs = [drive, str(inner)]
    refused_before_anything_is_made(command, config, f"{inner} lies in {drive}; name one of them")


def test_a_drive_that_a_link_names_again_is_refused(command: Command, config: RunConfig) -> None:
    (drive,) = config.tiers.nvme_dirs or []
    link = f"{drive}-too"
    Path(link).symlink_to(drive)
    config.tiers.nvme_dirs = [link, drive]
    said = f"tiers.nvme_dirs: {link} and {drive} are the same directory ({os.path.realpath(drive)}); name it"
    refused_before_anything_is_made(command, config, f"{said} once")


def refused_before_anything_is_made(command: Command, config: RunConfig, said: str) -> None:
    """By the command, and by a trainer of one's own."""
    before = sorted(command.folder.rglob("*"))
    command.refused_train(config, said=[said])
    with pytest.raises(ConfigError, match=re.escape(said)):
        train(config)
    assert sorted(command.folder.rglob("*")) == sorted([*before, command.folder / "run.yaml"])
