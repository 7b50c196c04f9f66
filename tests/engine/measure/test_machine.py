"""Rates of a run: the profile where it holds, measured where it does not; drives side by side."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive_kinds import small_ext4

from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.device.device import Device
from tierstream.engine.measure import adam_rates, compute_rates, copy_rates, machine
from tierstream.engine.measure.machine import (
    DEFAULT_TUNING,
    KnownDrive,
    drives_now,
    known_drives,
    machine_rates,
    mean_drives,
    with_drives,
)
from tierstream.engine.plan import ThrottleConfig, TiersConfig
from tierstream.engine.planner.machine import Machine, drive_rates
from tierstream.io import probes, profile
from tierstream.io.drive_rates import DriveTarget, Setting, Tuning
from tierstream.io.measure import Sample
from tierstream.io.profile import (
    DriveProfile,
    MachineProfile,
    drive_identity,
    measure_drive,
    measure_long,
)

TUNING = Tuning(threads=3, task_bytes=1 << 20, queue_depth=5)


def drive(directory: str, device: str, **rates: float) -> DriveProfile:
    return DriveProfile(
        directory=directory, device=device, filesystem="ext4", backend="posix", tuning=TUNING,
        **({"read": 4.0, "write": 3.0, "mixed": 2.0} | rates),
    )  # fmt: skip


def known(device: str, weight: float, measured: DriveProfile | None, users: int = 1) -> KnownDrive:
    rates = None if measured is None else measured.within(None, users)
    return KnownDrive(f"/{device}", TUNING, measured, rates, weight)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Tuning]]:
    """Directories that were measured, in order; nothing is really measured."""
    calls: list[tuple[str, str, Tuning]] = []

    def fake(directory: str, backend: str, tuning: Tuning) -> DriveProfile:
        calls.append((directory, backend, tuning))
        device, filesystem = drive_identity(directory)
        return replace(drive(directory, device), filesystem=filesystem, tuning=tuning)

    monkeypatch.setattr(machine, "measure_drive", fake)
    return calls


def test_a_drive_is_measured_once_and_its_rate_shared(tmp_path: Path, measured: list[Any]) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    found = known_drives(TiersConfig(nvme_dirs=paths, backend="posix"), MachineProfile())
    assert measured == [(paths[0], "posix", DEFAULT_TUNING)]
    assert [entry.weight for entry in found] == [1.0, 1.0]
    assert [entry.directory for entry in found] == paths


def test_the_profile_spares_measuring_and_tunes(tmp_path: Path, measured: list[Any]) -> None:
    device, filesystem = drive_identity(tmp_path)
    known_drive = replace(drive("/x", device), filesystem=filesystem)
    mine = MachineProfile(cpu=probes.cpu_model(), drives=(known_drive,))
    tiers = TiersConfig(nvme_dirs=[str(tmp_path)], backend="posix")
    (found,) = known_drives(tiers, mine)
    assert measured == []
    assert found.tuning == TUNING
    assert found.measured == mine.drives[0]
    (found,) = known_drives(replace(tiers, io_threads=7), mine)
    assert found.tuning == replace(TUNING, threads=7)


def test_throttled_directories_are_drives_of_their_own(tmp_path: Path, measured: list[Any]) -> None:
    """Of a drive that reads 4, writes 3 and does 2 of both, two directories get half each, or their limit."""
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    throttle = ThrottleConfig(write=ByteSize(1))
    found = known_drives(TiersConfig(nvme_dirs=paths, backend="posix", throttle=throttle), MachineProfile())
    assert len(measured) == 1
    for entry in found:
        assert entry.rates is not None
        assert (entry.rates.read, entry.rates.write, entry.rates.mixed, entry.weight) == (2.0, 1.0, 1.0, 1.0)
    rates = machine_rates(MachineProfile(), found, Device(), torch.float32, 2)
    assert (rates.nvme_read, rates.nvme_write, rates.nvme_read_mixed) == (4.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "throttle",
    [
        {},
        {"read": "500MB"},
        {"total": "1GB"},
        {"read": "1GB", "write": "3GB", "total": "2GB"},
        {"latency_s": 1e-3},
    ],
    ids=str,
)
def test_a_run_and_a_plan_foresee_the_same_drive(tmp_path: Path, throttle: dict[str, Any]) -> None:
    """A run on a drive of its profile, and a plan for the machine of that profile."""
    device, filesystem = drive_identity(tmp_path)
    measured = replace(drive(str(tmp_path), device, read=4e9, write=3e9, mixed=2e9), filesystem=filesystem)
    mine = MachineProfile(cpu=probes.cpu_model(), drives=(measured,), update={"2": 1e9})
    given = {key: value if key == "latency_s" else ByteSize(value) for key, value in throttle.items()}
    tiers = TiersConfig(nvme_dirs=[str(tmp_path)], backend="posix", throttle=ThrottleConfig(**given))
    found = known_drives(tiers, mine)
    (foreseen,) = drive_rates(found, tiers.throttle.limits)
    whole = replace(
        mine, compute={"cpu bfloat16": 1e11}, device={"bytes": 1 << 30, "memory": 1e10, "launch_s": 1e-5},
        host={"bytes": 1 << 30, "cores": 2, "memory": 4e10, "copy": 1e10, "page_s": 1e-5, "wake_s": 1e-5},
    )  # fmt: skip
    whole.save(tmp_path / "machine.json")
    (planned,) = Machine.from_profile(tmp_path / "machine.json", limits=tiers.throttle.limits).drives
    assert foreseen == planned
    # The bound of the run is that of the same drive.
    rates = with_drives(Rates(flop_per_s=1.0, upload=None, update_parameters_per_s=1.0), found)
    bound = (rates.nvme_read, rates.nvme_write, rates.nvme_read_mixed, rates.nvme_write_mixed)
    assert bound == (planned.read, planned.write, planned.read_mixed, planned.write_mixed)


def test_directories_of_one_drive_share_it_in_a_forecast(tmp_path: Path, measured: list[Any]) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    found = drive_rates(known_drives(TiersConfig(nvme_dirs=paths, backend="posix"), MachineProfile()), None)
    assert [(each.read, each.write, each.read_mixed) for each in found] == [(2.0, 1.5, 0.5)] * 2


def test_two_drives_are_weighed_by_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(path: str) -> tuple[str, str]:
        return path.strip("/"), "ext4"

    def measure(path: str, backend: str, tuning: Tuning) -> DriveProfile:
        return drive(path, path.strip("/"), mixed={"/a": 6.0, "/b": 2.0}[path])

    monkeypatch.setattr(machine, "drive_identity", identity)
    monkeypatch.setattr(profile, "drive_identity", identity)
    monkeypatch.setattr(machine, "measure_drive", measure)
    found = known_drives(TiersConfig(nvme_dirs=["/a", "/b"]), MachineProfile())
    assert [entry.weight for entry in found] == [6.0, 2.0]
    # A drive that cannot be measured leaves all equal: nothing is known of it.
    monkeypatch.setattr(machine, "measure_drive", lambda path, backend, tuning: None)
    found = known_drives(TiersConfig(nvme_dirs=["/a", "/b"]), MachineProfile())
    assert [entry.weight for entry in found] == [1.0, 1.0]
    assert [entry.rates for entry in found] == [None, None]


def test_state_in_dram_has_no_drives() -> None:
    assert known_drives(TiersConfig(), MachineProfile()) == []
    assert drives_now(TiersConfig(), []) == []


def test_drives_are_measured_again_for_longer(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, with the tuning that it has, and shared and limited as before."""
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    tiers = TiersConfig(nvme_dirs=paths, backend="posix", throttle=ThrottleConfig(write=ByteSize("1MB")))
    known = known_drives(tiers, MachineProfile())
    asked: list[tuple[Tuning, str, float]] = []

    def measure_long(rates: DriveProfile, directory: str, seconds: float) -> DriveProfile:
        asked.append((rates.tuning, directory, seconds))
        device, _ = drive_identity(directory)
        return replace(drive(directory, device), read=8e6, write=6e6, mixed=4e6, tuning=rates.tuning)

    monkeypatch.setattr(machine, "measure_long", measure_long)
    found = drives_now(tiers, known)
    assert asked == [(known[0].tuning, paths[0], machine._LONG_S)]
    for entry in found:
        assert entry.rates is not None
        assert (entry.rates.read, entry.rates.write, entry.rates.mixed) == (4e6, 1e6, 2e6)
    # What could not be measured before is not tried again.
    unknown = [replace(entry, measured=None, rates=None) for entry in known]
    assert [entry.rates for entry in drives_now(tiers, unknown)] == [None, None]
    assert len(asked) == 1


def test_drives_at_several_times_have_the_mean_rates() -> None:
    first, second = (
        known("a", 1.0, replace(drive("/a", "1:1"), read=r, write=w, mixed=m))
        for r, w, m in ((4.0, 8.0, 5.0), (6.0, 2.0, 2.0))
    )
    (mean,) = mean_drives([[first], [second]])
    assert mean.rates is not None
    assert (mean.rates.read, mean.rates.write, mean.rates.mixed) == (5.0, 5.0, 3.5)
    assert with_drives(Rates(flop_per_s=1.0, upload=None, update_parameters_per_s=1.0), [mean]) == Rates(
        flop_per_s=1.0, upload=None, update_parameters_per_s=1.0,
        nvme_read=5.0, nvme_write=5.0, nvme_read_mixed=1.75, nvme_write_mixed=1.75,
    )  # fmt: skip
    (mean,) = mean_drives([[first], [replace(second, rates=None)]])
    assert mean.rates is None


def rates_of(drives: list[KnownDrive], given: MachineProfile | None = None, threads: int = 2) -> Any:
    return machine_rates(given or MachineProfile(), drives, Device("cpu"), torch.float32, threads)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of the processor was measured; nothing is really measured."""
    calls: list[str] = []
    monkeypatch.setattr(compute_rates, "matmul_rate", lambda device, dtype: calls.append("compute") or 11.0)
    monkeypatch.setattr(adam_rates, "update_rate", lambda threads: calls.append("update") or 12.0)
    monkeypatch.setattr(copy_rates, "upload_rate", lambda device: calls.append("upload") or 13.0)
    return calls


def test_drives_by_their_share_go_at_the_pace_of_the_slowest(counted: list[str]) -> None:
    fast, slow = drive("/a", "a", mixed=6.0, read=9.0), drive("/b", "b", mixed=2.0, read=2.0)
    rates = rates_of([known("a", 6.0, fast), known("b", 2.0, slow)])
    # 3/4 and 1/4 of the bytes. Reads: min(9 / 0.75, 2 / 0.25); writes: min(3 / 0.75, 3 / 0.25).
    assert (rates.nvme_read, rates.nvme_write) == (8.0, 4.0)
    assert rates.nvme_read_mixed == rates.nvme_write_mixed == 4.0


def test_directories_on_one_drive_do_not_add_up(counted: list[str]) -> None:
    one = drive("/a", "a")
    rates = rates_of([known("a", 1.0, one, users=2), known("a", 1.0, one, users=2)])
    assert (rates.nvme_read, rates.nvme_write, rates.nvme_read_mixed) == (4.0, 3.0, 1.0)


def test_a_drive_without_rates_leaves_the_bound_without_drives(counted: list[str]) -> None:
    rates = rates_of([known("a", 1.0, drive("/a", "a")), known("b", 1.0, None)])
    assert (rates.nvme_read, rates.nvme_write, rates.nvme_read_mixed) == (None, None, None)
    assert rates_of([]).nvme_read is None


def test_figures_of_this_processor_are_taken_from_the_profile(counted: list[str]) -> None:
    mine = MachineProfile(cpu=probes.cpu_model(), update={"2": 5.0}, compute={"cpu float32": 6.0})
    rates = rates_of([], mine)
    assert (rates.update_parameters_per_s, rates.flop_per_s, rates.upload) == (5.0, 6.0, None)
    assert counted == []
    # Another number of threads, another processor: measured.
    assert rates_of([], mine, threads=3).update_parameters_per_s == 12.0
    rates = rates_of([], replace(mine, cpu="another"))
    assert (rates.update_parameters_per_s, rates.flop_per_s) == (12.0, 11.0)


def test_a_real_drive_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    found = measure_drive(tmp_path, "posix", TUNING)
    assert found is not None
    assert min(found.read, found.write, found.mixed) > 1e6
    assert (found.device, found.filesystem) == drive_identity(tmp_path)
    assert found.tuning == TUNING
    assert os.listdir(tmp_path) == []


def test_a_drive_is_measured_for_a_while_with_its_queue_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as it moves in that time, each way once; nothing stays."""
    ran: list[tuple[str, int, int]] = []
    run = DriveTarget.run

    def spy(self: DriveTarget, setting: Setting, amount_bytes: int) -> Sample:
        ran.append((setting.access, setting.tuning.queue_depth, amount_bytes))
        return run(self, setting, amount_bytes)

    monkeypatch.setattr(DriveTarget, "run", spy)
    before = drive(str(tmp_path), "9:9", mixed=100e6)
    found = measure_long(before, tmp_path, 1.5)
    assert found is not None
    depth = min(TUNING.queue_depth, 2 * TUNING.threads)
    assert sorted(ran) == [(access, depth, 128 << 20) for access in ("mixed", "read", "write")]
    assert min(found.read, found.write, found.mixed) > 1e6
    assert (found.device, found.tuning) == (drive_identity(tmp_path)[0], TUNING)
    assert os.listdir(tmp_path) == []


def test_a_drive_with_little_space_is_left_alone(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 64 << 20) as mounted:
        before = os.listdir(mounted)
        assert measure_drive(mounted, "posix", TUNING) is None
        assert measure_long(drive(str(mounted), "9:9"), mounted, 1.0) is None
        assert os.listdir(mounted) == before
