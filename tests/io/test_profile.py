"""The machine profile: whole round trips, damage named, figures used on what they were measured on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierstream.io.drive_rates import Tuning
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.profile import DriveProfile, MachineProfile, Throughput, drive_identity
from tierstream.io.throttle import Limits, Pace
from tierstream.io.transfer import Direction

DRIVE = DriveProfile(
    directory="/mnt/a",
    device="259:1",
    filesystem="xfs",
    backend="posix",
    tuning=Tuning(threads=4, task_bytes=1 << 22, queue_depth=8),
    read=2.5e9,
    write=1.5e9,
    mixed=1.75e9,
)
PROFILE = MachineProfile(
    cpu="a", gpu="b", measured="2026-01-02T03:04:05+00:00", drives=(DRIVE,),
    copy={"upload": 5e10, "download": 4e10, "both": 6e10}, update={"8": 1e9},
    compute={"cpu bfloat16": 8e11},
    host={"bytes": 1 << 35, "cores": 8, "memory": 4e10, "copy": 1e10, "page_s": 1e-5, "wake_s": 7e-6},
    device={"bytes": 1 << 34, "memory": 8e11, "launch_s": 8e-6},
)  # fmt: skip


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    for number, profile in enumerate((PROFILE, MachineProfile())):
        path = tmp_path / f"{number}.json"
        profile.save(path)
        assert MachineProfile.load(path) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(format=0), "its format is 0, this version reads 3"),
        (lambda plain: plain.pop("copy"), "keys copy are missing or unknown"),
        (lambda plain: plain.update(colour=1), "keys colour are missing or unknown"),
        (
            lambda plain: plain["drives"][0].update(read=-1),
            "drives[0].read is -1; plausible are 1000 to 1e+14 bytes per second",
        ),
        (
            lambda plain: plain["drives"][0].update(read=1e-300),
            "drives[0].read is 1e-300; plausible are 1000 to 1e+14 bytes per second",
        ),
        (lambda plain: plain["drives"][0].update(write=math.inf), "drives[0].write is inf; plausible are"),
        (lambda plain: plain["drives"][0].update(mixed="fast"), "drives[0].mixed is 'fast', not a number"),
        (lambda plain: plain["drives"][0].update(mixed=10**400), "0; plausible are 1000 to 1e+14 bytes"),
        (lambda plain: plain["drives"][0].update(device=3), "drives[0].device is 3, not a text"),
        (lambda plain: plain["drives"][0].update(colour=1), "keys drives[0].colour are missing or unknown"),
        (
            lambda plain: plain["drives"][0]["tuning"].update(threads=0),
            "drives[0].tuning.threads is 0; plausible are 1 to 1024",
        ),
        (
            lambda plain: plain["drives"][0]["tuning"].update(threads=1025),
            "threads is 1025; plausible are 1 to",
        ),
        (
            lambda plain: plain["drives"][0]["tuning"].update(queue_depth=1.5),
            "queue_depth is 1.5, not a whole",
        ),
        (lambda plain: plain["drives"][0].pop("tuning"), "drives[0].tuning is no object"),
        (lambda plain: plain.update(drives=[3]), "drives[0] is no object"),
        (lambda plain: plain.update(drives=3), "drives is no list"),
        (lambda plain: plain.update(host=[]), "host is no object"),
        (lambda plain: plain["host"].update(bytes="lots"), "host.bytes is 'lots', not a whole number"),
        (lambda plain: plain["host"].update(cores=0), "host.cores is 0; plausible are 1 to 65536"),
        (lambda plain: plain["host"].update(cores=2.5), "host.cores is 2.5, not a whole number"),
        (lambda plain: plain["host"].update(cores=True), "host.cores is True, not a whole number"),
        (
            lambda plain: plain["host"].update(page_s=math.nan),
            "host.page_s is nan; plausible are 1e-09 to 1 s",
        ),
        (lambda plain: plain["host"].pop("page_s"), "host lacks page_s"),
        (lambda plain: plain["device"].update(bytes=None), "device.bytes is None, not a whole number"),
        (lambda plain: plain["device"].update(memory=0.5), "device.memory is 0.5; plausible are"),
        (
            lambda plain: plain["device"].update(launch_s=1e308),
            "launch_s is 1e+308; plausible are 1e-09 to 1 s",
        ),
        (lambda plain: plain["host"].update(wake_s=1e-300), "host.wake_s is 1e-300; plausible are"),
        (lambda plain: plain["host"].update(bytes=10**30), "; plausible are 1048576 to 1.12589990684e+15"),
        (
            lambda plain: plain["host"].update(cores=10**9),
            "host.cores is 1000000000; plausible are 1 to 65536",
        ),
        (lambda plain: plain["drives"][0].update(mixed=1e300), "drives[0].mixed is 1e+300; plausible are"),
        (
            lambda plain: plain["compute"].update({"cpu bfloat16": 1.0}),
            "compute.cpu bfloat16 is 1.0; plausible are 1000000 to 1e+18 FLOP per second",
        ),
        (lambda plain: plain["copy"].update(upload=-5), "copy.upload is -5; plausible are 1000 to"),
        (lambda plain: plain["compute"].update({"cpu bfloat16": math.nan}), "compute.cpu bfloat16 is nan; "),
        (
            lambda plain: plain["update"].update({"8": 0}),
            "update.8 is 0; plausible are 1000 to 1e+14 parameters",
        ),
        (
            lambda plain: plain["update"].update(many=1e9),
            "update has the key 'many', not a number of threads",
        ),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "machine.json"
    PROFILE.save(path)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigError) as caught:
        MachineProfile.load(path)
    assert message in str(caught.value)
    assert f"{path} is not a machine profile" in str(caught.value)
    assert "tierstream bench --profile" in str(caught.value)


def test_a_file_of_something_else_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"is not a machine profile \(its content is no object\)"):
        MachineProfile.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"drives": 3}', b"\xff\xfe\x00", b"\xc3("])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a machine profile"):
        MachineProfile.load(path)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"reading machine profile .*none\.json"):
        MachineProfile.load(tmp_path / "none.json")


def moved(limits: Limits, seconds: float, *ways: Direction) -> list[float]:
    """Bytes per second of each direction, through a drive that only the limits hold up."""
    pace: Pace[Direction] = Pace(limits)
    requests, nbytes = 4000, 1 << 20
    for way in ways:
        for _ in range(requests):
            pace.submit(0.0, way, nbytes, way)
    ended = pace.ended(seconds)
    assert len(ended) < len(ways) * requests
    return [ended.count(way) * nbytes / seconds for way in ways]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(read=2e8, write=1e8),
        Limits(read=2e8, write=2e8, total=3e8),
        Limits(read=2e7, write=9e8, total=3e8),
        Limits(read=9e8, write=2e7, total=3e8),
        Limits(total=3e8),
    ],
    ids=str,
)
def test_a_throttled_drive_gives_what_the_throttle_lets_through(limits: Limits) -> None:
    """Measured: to 7 %, since a direction that is held up waits for whole requests of the other."""
    found = DRIVE.within(limits)
    reads, writes = moved(limits, 5.0, Direction.READ, Direction.WRITE)
    (read,), (write,) = (moved(limits, 4.0, way) for way in Direction)
    assert (found.read, found.write) == pytest.approx((read, write), rel=0.01)
    assert (found.read_mixed, found.write_mixed) == pytest.approx((reads, writes), rel=0.08)


def test_a_drive_gives_no_more_within_limits_than_without() -> None:
    plain = DRIVE.within(None)
    assert plain == Throughput(read=2.5e9, write=1.5e9, read_mixed=0.875e9, write_mixed=0.875e9)
    assert plain.mixed == DRIVE.mixed
    assert DRIVE.within(Limits(read=1e12, total=1e12, latency_s=1.0)) == plain
    # A direction that is held up leaves the other what the drive has for both.
    found = DRIVE.within(Limits(read=0.25e9))
    assert (found.read, found.read_mixed, found.write_mixed) == (0.25e9, 0.25e9, 1.5e9)
    assert found.mixed == 0.5e9
    found = DRIVE.within(Limits(total=1e9), users=2)
    assert found == Throughput(read=1e9, write=0.75e9, read_mixed=0.4375e9, write_mixed=0.4375e9)


def test_drives_are_known_by_device_file_system_and_backend(tmp_path: Path) -> None:
    device, filesystem = drive_identity(tmp_path)
    here = replace(DRIVE, device=device, filesystem=filesystem)
    profile = PROFILE.with_drive(here)
    assert profile.drive_for(tmp_path, "posix") == here
    assert profile.drive_for(tmp_path, "kvikio") is None
    assert PROFILE.drive_for(tmp_path, "posix") is None
    moved = replace(here, filesystem="other")
    assert PROFILE.with_drive(moved).drive_for(tmp_path, "posix") is None


def test_a_drive_replaces_what_was_known_of_it() -> None:
    faster = replace(DRIVE, read=9e9)
    other = replace(DRIVE, backend="kvikio")
    assert PROFILE.with_drive(faster).drives == (faster,)
    assert PROFILE.with_drive(other).drives == (DRIVE, other)
