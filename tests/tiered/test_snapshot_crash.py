"""Snapshots survive: a killed process, a machine that stops, a drive that fails."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support import snapshot_writer
from support.crash import Crash, CrashingSyscalls
from support.faults import FaultySyscalls, fail
from support.snapshot_writer import check, make_store, set_values

from tierstream.io import seam
from tierstream.io.errors import CheckpointError, StorageError
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot

KILLS = 10


def test_kill_at_random_instants_leaves_whole_snapshots(tmp_path: Path) -> None:
    """`kill -9` while one snapshot after another is written; leftovers stay for the next writer to meet."""
    instant = random.Random(0)
    interrupted, step = 0, 0
    for _ in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, snapshot_writer.__file__, str(tmp_path), str(step)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(instant.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        reported = [int(line) for line in writer.stdout.read().split()]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        found = sorted(
            int(path.name.removeprefix("step-")) for path in tmp_path.iterdir() if path.suffix == ""
        )
        # What was reported is there; beyond it at most the one that was just renamed.
        assert set(range(step)) | set(reported) <= set(found)
        assert len(found) - step - len(reported) in (0, 1)
        for number in found[-2:]:
            check(tmp_path / f"step-{number}", number)
        interrupted += any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
        step = len(found)
    assert interrupted > KILLS // 4, "the kills missed the writing"


def test_power_cut_between_system_calls(tmp_path: Path) -> None:
    """Unsynced bytes and names are kept, lost or garbled: old ones are whole, the new one whole or gone."""
    whole = stops = 0
    with make_store() as store:
        set_values(store, 0)
        write_snapshot(store, tmp_path / "before" / "step-0", {"step": 0})
        set_values(store, 1)
        for stop in range(1, 10_000, 9):
            root = shutil.copytree(tmp_path / "before", tmp_path / str(stop))
            machine = CrashingSyscalls(stop)
            with suppress(Crash), seam.injected(machine):
                write_snapshot(store, root / "step-1", {"step": 1})
            finished = not machine.stopped
            machine.lose_unsynced(stop, root)
            check(root / "step-0", 0)
            if (root / "step-1").exists():
                check(root / "step-1", 1)
                whole += 1
            else:
                assert not finished
            stops += 1
            if finished:
                break
            if stop % 4 == 1:  # A restarted writer is not hindered by what is left.
                if not (root / "step-1").exists():
                    write_snapshot(store, root / "step-1", {"step": 1})
                check(root / "step-1", 1)
    assert stops > 20
    assert whole >= 1


@pytest.mark.parametrize(
    ("call", "number", "at"),
    [
        ("mkdir", errno.EACCES, 2),
        ("posix_fallocate", errno.ENOSPC, 7),
        ("pwritev", errno.ENOSPC, 9),
        ("pwritev", errno.EIO, 1),
        ("fsync", errno.EIO, 3),
        ("rename", errno.EIO, 1),
    ],
)
def test_a_failing_drive_leaves_nothing_and_the_next_try_works(
    tmp_path: Path, call: str, number: int, at: int
) -> None:
    with make_store() as store:
        set_values(store, 0)
        write_snapshot(store, tmp_path / "step-0", {"step": 0})
        set_values(store, 1)
        with (
            seam.injected(FaultySyscalls(fail(number, on=call, at=at, times=1, path="*step-1*"))),
            pytest.raises(StorageError) as raised,
        ):
            write_snapshot(store, tmp_path / "step-1", {"step": 1})
        assert raised.value.errno == number
        assert "step-1" in raised.value.path
        assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
        check(tmp_path / "step-0", 0)
        write_snapshot(store, tmp_path / "step-1", {"step": 1})
        check(tmp_path / "step-1", 1)


def test_a_failed_fsync_of_the_parent_is_told(tmp_path: Path) -> None:
    """The rename may not last, so it is an error, although the snapshot stands at its place."""
    with make_store() as store:
        set_values(store, 0)
        with (
            seam.injected(FaultySyscalls(fail(errno.EIO, on="fsync", path=str(tmp_path)))),
            pytest.raises(StorageError, match="syncing"),
        ):
            write_snapshot(store, tmp_path / "step-0", {"step": 0})


def test_a_drive_that_fails_in_verify_is_a_storage_error(tmp_path: Path) -> None:
    with make_store() as store:
        set_values(store, 0)
        write_snapshot(store, tmp_path / "step-0", {"step": 0})
        snapshot = Snapshot.open(tmp_path / "step-0")
        for action in (snapshot.verify, lambda: snapshot.restore(store)):
            with (
                seam.injected(FaultySyscalls(fail(errno.EIO, on="preadv", at=5))),
                pytest.raises(StorageError, match=r"reading .*layers\.\d/\w+/c/\d"),
            ):
                action()
        snapshot.restore(store)


def test_what_is_left_of_a_crash_is_not_a_snapshot(tmp_path: Path) -> None:
    machine = CrashingSyscalls(60)
    with make_store() as store, suppress(Crash), seam.injected(machine):
        set_values(store, 0)
        write_snapshot(store, tmp_path / "step-0", {"step": 0})
    machine.forget()
    with pytest.raises(CheckpointError, match="there is no such directory"):
        Snapshot.open(tmp_path / "step-0")
    with pytest.raises(CheckpointError, match=r"incomplete.*manifest.json is missing.*interrupted"):
        Snapshot.open(tmp_path / "step-0.tmp")
