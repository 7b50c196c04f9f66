"""`tierstream bench --profile`: a whole profile, grown drive by drive, never of two machines in one file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.drive_kinds import small_ext4
from support.faults import Call, FaultySyscalls
from support.storage_bench import TINY, StorageBench, rows, unexpected

from tierstream.engine.measure import adam_rates, compute_rates, copy_rates, step_rates
from tierstream.engine.planner.machine import Machine
from tierstream.io import probes, seam
from tierstream.io.drive_rates import Tuning
from tierstream.io.profile import MachineProfile, drive_identity

PROCESSORS = {"update_rate": 12e6, "matmul_rate": 11e6}


@pytest.fixture
def known_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no drive is not measured: that takes seconds."""
    monkeypatch.setattr(adam_rates, "update_rate", lambda threads: PROCESSORS["update_rate"] * threads)
    monkeypatch.setattr(compute_rates, "matmul_rate", lambda device, dtype: PROCESSORS["matmul_rate"])
    monkeypatch.setattr(
        copy_rates, "quick_rates", lambda device: {"upload": 13e9, "download": 13e9, "both": 13e9}
    )
    host = {"bytes": 1 << 33, "cores": 2, "memory": 4e10, "copy": 5e9, "page_s": 5e-5, "wake_s": 2e-5}
    own = {"bytes": 1 << 33, "memory": 1e10, "launch_s": 1e-5}
    monkeypatch.setattr(step_rates, "host_figures", lambda: host)
    monkeypatch.setattr(step_rates, "device_figures", lambda device: own)


def test_a_profile_has_every_section(bench: StorageBench, direct: Path, tmp_path: Path) -> None:
    """Really measured."""
    file = tmp_path / "machine.json"
    status, out, err = bench.run("--profile", file, direct, *TINY, "--json", tmp_path / "storage.json")
    assert (status, unexpected(err)) == (0, [])
    profile = MachineProfile.load(file)
    assert profile.cpu == probes.cpu_model()
    assert profile.measured
    assert bool(profile.gpu) == bool(profile.copy) == torch.cuda.is_available()
    threads = adam_rates.thread_counts(len(os.sched_getaffinity(0)))
    assert list(profile.update) == list(map(str, threads))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert set(profile.compute) == {f"{kind} bfloat16", f"{kind} float32"}
    assert min(*profile.update.values(), *profile.compute.values()) > 1e5
    (drive,) = profile.drives
    assert (drive.directory, drive.backend) == (str(direct), "posix")
    assert (drive.device, drive.filesystem) == drive_identity(direct)
    best = [
        entry
        for entry in rows(json.loads((tmp_path / "storage.json").read_text()), "best")
        if (entry["backend"], entry["path"]) == ("posix", "posix-direct")
    ]
    rates = {entry["access"]: entry["median"] for entry in best}
    assert (drive.read, drive.write, drive.mixed) == (rates["read"], rates["write"], rates["mixed"])
    entry = best[0]
    assert drive.tuning == Tuning(
        threads=entry["threads"], task_bytes=entry["block_bytes"], queue_depth=entry["queue_depth"]
    )
    assert f"machine profile: {file}" in out
    for what in ("AdamW, 1 threads", "matrix product"):
        assert what in out
    assert os.listdir(direct) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.json", "storage.json"]


@pytest.mark.usefixtures("known_processors")
def test_a_second_run_keeps_what_is_known_of_other_drives(
    bench: StorageBench, direct: Path, tmp_path: Path
) -> None:
    file = tmp_path / "machine.json"
    assert bench.run("--profile", file, direct, *TINY)[0] == 0
    (first,) = MachineProfile.load(file).drives
    with small_ext4(tmp_path, 64 << 20) as other:
        assert bench.run("--profile", file, other, *TINY)[0] == 0
        kept, second = MachineProfile.load(file).drives
        assert kept == first
        assert second.directory == str(other)
        assert MachineProfile.load(file).drive_for(other, "posix") == second
    # Measured again: in its place, and nothing else changes.
    assert bench.run("--profile", file, direct, *TINY)[0] == 0
    both = {drive.device: drive for drive in MachineProfile.load(file).drives}
    assert set(both) == {first.device, second.device}
    assert both[second.device] == second


@pytest.mark.usefixtures("known_processors")
def test_processors_alone_leave_the_drives_as_they_were(
    bench: StorageBench, direct: Path, tmp_path: Path
) -> None:
    file = tmp_path / "machine.json"
    assert bench.run("storage", direct, *TINY, "--profile", file)[0] == 0
    before = MachineProfile.load(file)
    assert len(before.drives) == 1
    assert before.update == before.compute == before.copy == {}
    status, out, _ = bench.run("--profile", file)
    assert status == 0
    after = MachineProfile.load(file)
    assert after.drives == before.drives
    assert set(after.update.values()) == {12e6 * int(threads) for threads in after.update}
    assert set(after.compute.values()) == {11e6}
    assert "AdamW, 1 threads" in out
    assert "Python for a page" in out
    machine = Machine.from_profile(file)
    assert (machine.gpu_bytes, machine.cores, machine.rates.page_s) == (None, 2, 5e-5)
    assert [drive.directory for drive in machine.drives] == [str(direct)]
    # And a run of `bench storage` leaves the processors.
    assert bench.run("storage", direct, *TINY, "--profile", file)[0] == 0
    assert MachineProfile.load(file).update == after.update


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    file = tmp_path / "machine.json"
    MachineProfile(cpu=probes.cpu_model(), measured="2026-01-01T00:00:00+00:00").save(file)
    return file


def nothing_is_written(call: Call) -> None:
    assert call.name != "mkdir", call


@pytest.mark.parametrize(
    "command", [["--profile", "{file}", "{drive}"], ["storage", "{drive}", "--profile", "{file}"]]
)
@pytest.mark.parametrize("trouble", ["another machine", "damaged", "a directory", "nowhere"])
def test_a_profile_that_cannot_be_used_is_told_first(
    bench: StorageBench, tmp_path: Path, profile_file: Path, command: list[str], trouble: str
) -> None:
    drive, said = tmp_path / "drive", [str(profile_file)]
    drive.mkdir()
    if trouble == "another machine":
        replace(MachineProfile.load(profile_file), cpu="Abacus 3000").save(profile_file)
        said += ["is of another machine (Abacus 3000, here ", "name a new file or remove it"]
    elif trouble == "damaged":
        profile_file.write_text(profile_file.read_text()[:-20])
        said += ["is not a machine profile", "write it anew with `tierstream bench --profile"]
    elif trouble == "a directory":
        profile_file.unlink()
        profile_file.mkdir()
        said += ["is a directory; name a file in it"]
    else:
        profile_file = tmp_path / "absent" / "machine.json"
        said = [f"--profile {profile_file}: there is no directory {tmp_path}/absent; make it first"]
    before = profile_file.read_bytes() if profile_file.is_file() else b""
    words = [word.format(file=profile_file, drive=drive) for word in command]
    with seam.injected(FaultySyscalls(nothing_is_written)):
        bench.refused(*words, *TINY, said=said)
    assert (profile_file.read_bytes() if profile_file.is_file() else b"") == before
    assert os.listdir(drive) == []


def test_what_a_profile_needs(bench: StorageBench, tmp_path: Path) -> None:
    bench.refused(
        "--profile", said=["FILE is missing; usage: tierstream bench --profile FILE DIR... [options]"]
    )
    bench.refused("--profile", "--rounds", "2", said=["FILE is missing"])
    file = tmp_path / "machine.json"
    said = ["a profile needs read, write and mixed; leave --access out"]
    bench.refused("--profile", file, tmp_path, *TINY, "--access", "read", said=said)
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    said = [f"{tmp_path / 'file'} is a file; a profile needs writes too: name a directory on that drive"]
    bench.refused("--profile", file, tmp_path / "file", *TINY, said=said)
    bench.refused("--profile", file, tmp_path, *TINY, "--profile", "b", said=["--profile is named twice"])
    bench.refused("--profile", file, tmp_path / "no", *TINY, said=[str(tmp_path / "no"), "create it or name"])
    assert not file.exists()


def test_directories_of_one_drive_are_measured_once(bench: StorageBench, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    file = tmp_path / "machine.json"
    status, _, err = bench.run("--profile", file, tmp_path / "a", tmp_path / "b", *TINY)
    assert status == 0
    assert unexpected(err) == [f"{tmp_path}/b lies on the drive of {tmp_path}/a: measured once"]
    assert [drive.directory for drive in MachineProfile.load(file).drives] == [f"{tmp_path}/a"]
