"""The machine profile: whole round trips, damage named, figures used on what they were measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierstream.io.drive_rates import Tuning
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.profile import DriveProfile, MachineProfile, drive_identity

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
    cpu="a", gpu="b", measured="2026-01-02T03:04:05+00:00", drives=(DRIVE,), copy={"upload": 5e10},
    update={"8": 1e9}, compute={"bfloat16": 8e14},
)  # fmt: skip


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    for number, profile in enumerate((PROFILE, MachineProfile())):
        path = tmp_path / f"{number}.json"
        profile.save(path)
        assert MachineProfile.load(path) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(format=0), "its format is 0, this version reads 2"),
        (lambda plain: plain.pop("copy"), "keys copy are missing or unknown"),
        (lambda plain: plain.update(colour=1), "keys colour are missing or unknown"),
        (lambda plain: plain["drives"][0].update(read=-1), "read is -1, not a positive number"),
        (lambda plain: plain["drives"][0].update(mixed="fast"), "mixed is 'fast', not a positive number"),
        (lambda plain: plain["drives"][0]["tuning"].update(threads=0), "threads is 0, not a positive number"),
        (lambda plain: plain["drives"][0].pop("tuning"), "'tuning'"),
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


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b'{"drives": 3}', b"\xff\xfe\x00", b"\xc3("])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a machine profile"):
        MachineProfile.load(path)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"reading machine profile .*none\.json"):
        MachineProfile.load(tmp_path / "none.json")


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
