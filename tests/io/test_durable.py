"""Complete or not there: the order of calls, a failure at each call, a power cut at each call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.crash import SEEDS, Crash, CrashingSyscalls, crash_everywhere
from support.faults import Call, FaultySyscalls, fail

from tierstream.io import seam
from tierstream.io.durable import (
    REMOVING_SUFFIX,
    make_directories,
    publish_directory,
    remove_tree,
    write_file,
)
from tierstream.io.errors import StorageError

OLD, NEW = b"old content\n" * 500, b"new content\n" * 700
MUTATING = ("open", "pwritev", "fsync", "close", "rename", "unlink", "rmdir", "mkdir")


def steps(syscalls: FaultySyscalls, root: Path) -> list[tuple[str, str]]:
    """The calls that change something, with the random part of names taken out."""
    return [
        (
            call.name,
            "tmp" if Path(call.path).name.startswith(".") else str(Path(call.path).relative_to(root.parent)),
        )
        for call in syscalls.calls
        if call.name in MUTATING
    ]


def failing_call(number: int) -> Callable[[Call], None]:
    """EIO at the `number`-th system call of any kind."""
    left = number

    def fault(call: Call) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, "injected")

    return fault


def succeeds(act: Callable[[], None]) -> bool:
    """False where the injected EIO came out, as the error that it should be."""
    try:
        act()
    except StorageError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return True


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def build_tree(root: Path) -> dict[str, bytes]:
    """A directory as a checkpoint writer makes it, through the seam and without any sync."""
    calls = seam.current()
    for directory in (root, root / "a", root / "a" / "c"):
        calls.mkdir(str(directory))
    files = {
        "manifest.json": b"{}" * 300,
        "a/zarr.json": b"meta",
        "a/c/0": b"\1" * 5000,
        "a/c/1": b"\2" * 9000,
    }
    for name, data in files.items():
        fd = calls.open(str(root / name), 0o102)  # O_RDWR | O_CREAT
        try:
            calls.pwritev(fd, np.frombuffer(data, dtype=np.uint8), 0)
        finally:
            calls.close(fd)
    return files


# Order of calls


def test_order_of_a_file_write(tmp_path: Path) -> None:
    syscalls, target = FaultySyscalls(), tmp_path / "state.json"
    with seam.injected(syscalls):
        write_file(target, NEW)
    here = tmp_path.name
    assert steps(syscalls, tmp_path) == [
        ("open", "tmp"),
        ("pwritev", "tmp"),
        ("fsync", "tmp"),
        ("close", "tmp"),
        ("rename", f"{here}/state.json"),
        ("open", here),
        ("fsync", here),
        ("close", here),
    ]
    assert content(tmp_path) == {"state.json": NEW}
    assert not syscalls.open_descriptors


def test_order_of_publishing(tmp_path: Path) -> None:
    files = build_tree(tmp_path / "step-3.tmp")
    syscalls = FaultySyscalls()
    with seam.injected(syscalls):
        publish_directory(tmp_path / "step-3.tmp", tmp_path / "step-3")
    synced = [path for name, path in steps(syscalls, tmp_path) if name == "fsync"]
    source = f"{tmp_path.name}/step-3.tmp"
    assert set(synced[:-1]) == {
        source,
        f"{source}/a",
        f"{source}/a/c",
        *(f"{source}/{name}" for name in files),
    }
    for name in files:
        assert synced.index(f"{source}/{name}") < synced.index(str(Path(source, name).parent))
    assert synced.index(f"{source}/a/c") < synced.index(f"{source}/a") < synced.index(source)
    assert synced[-1] == tmp_path.name
    last_steps = [name for name, _ in steps(syscalls, tmp_path)]
    assert last_steps[-4:] == ["rename", "open", "fsync", "close"]
    assert content(tmp_path / "step-3") == files
    assert not (tmp_path / "step-3.tmp").exists()


def test_order_of_removal(tmp_path: Path) -> None:
    build_tree(tmp_path / "step-1")
    outside = tmp_path / "outside"
    outside.write_bytes(OLD)
    (tmp_path / "step-1" / "link").symlink_to(outside)
    (tmp_path / "step-1" / "up").symlink_to(tmp_path)
    syscalls = FaultySyscalls()
    with seam.injected(syscalls):
        remove_tree(tmp_path / "step-1")
        remove_tree(tmp_path / "never-there")
    names = [name for name, _ in steps(syscalls, tmp_path)]
    assert names[:4] == ["rename", "open", "fsync", "close"]
    assert set(names[4:]) == {"unlink", "rmdir"}
    assert content(tmp_path) == {"outside": OLD}


# A failure at each call


@pytest.mark.parametrize("before", [None, OLD], ids=["new", "replace"])
def test_a_file_write_that_fails_leaves_old_or_new(tmp_path: Path, before: bytes | None) -> None:
    for number in range(1, 100):
        target = tmp_path / str(number) / "state.json"
        target.parent.mkdir()
        if before is not None:
            target.write_bytes(before)
        syscalls = FaultySyscalls(failing_call(number), short_bytes=1000)
        with seam.injected(syscalls):
            if succeeds(partial(write_file, target, NEW)):
                break
        expected = [{}] if before is None else [{"state.json": before}]
        assert content(target.parent) in [*expected, {"state.json": NEW}], (
            f"call {number}: {syscalls.calls[-1]}"
        )
        assert not syscalls.open_descriptors
    assert 10 < number < 99, "every call has failed once"


def test_publishing_that_fails_leaves_one_complete_directory(tmp_path: Path) -> None:
    for number in range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        files = build_tree(root / "new.tmp")
        syscalls = FaultySyscalls(failing_call(number))
        with seam.injected(syscalls):
            if succeeds(partial(publish_directory, root / "new.tmp", root / "new")):
                break
        (only,) = root.iterdir()
        assert only.name in ("new", "new.tmp")
        assert content(only) == files
        assert not syscalls.open_descriptors
    assert 20 < number < 99


def test_a_removal_that_fails_can_be_done_again(tmp_path: Path) -> None:
    for number in range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        files = build_tree(root / "old")
        syscalls = FaultySyscalls(failing_call(number))
        with seam.injected(syscalls):
            failed = not succeeds(partial(remove_tree, root / "old"))
        if failed and (root / "old").exists():
            assert content(root / "old") == files, "under its name it is complete"
        remove_tree(root / "old")
        assert list(root.iterdir()) == []
        if not failed:
            break
    assert 15 < number < 99


def test_a_removal_left_by_a_dead_process_is_finished(tmp_path: Path) -> None:
    build_tree(tmp_path / f"old{REMOVING_SUFFIX}")
    remove_tree(tmp_path / f"old{REMOVING_SUFFIX}")
    assert list(tmp_path.iterdir()) == []
    build_tree(tmp_path / f"old{REMOVING_SUFFIX}")
    build_tree(tmp_path / "old")
    remove_tree(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []


def test_errors_name_file_and_remedy(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    with (
        seam.injected(FaultySyscalls(fail(errno.ENOSPC, on="pwritev"))),
        pytest.raises(StorageError, match=r"writing .*state\.json.* No space left .* free space there"),
    ):
        write_file(target, NEW)
    with pytest.raises(StorageError, match=r"creating .*No such file"):
        write_file(tmp_path / "missing" / "state.json", NEW)
    build_tree(tmp_path / "new.tmp")
    (tmp_path / "new").mkdir()
    with pytest.raises(StorageError, match=r"publishing .*new failed: File exists .*choose another name"):
        publish_directory(tmp_path / "new.tmp", tmp_path / "new")
    assert (tmp_path / "new.tmp" / "manifest.json").exists()


def test_make_directories(tmp_path: Path) -> None:
    syscalls = FaultySyscalls()
    with seam.injected(syscalls):
        make_directories(tmp_path / "a" / "b")
        make_directories(tmp_path / "a" / "b")
    here = tmp_path.name
    names = [step for step in steps(syscalls, tmp_path) if step[0] in ("mkdir", "fsync")]
    assert names == [
        ("mkdir", f"{here}/a"),
        ("fsync", here),
        ("mkdir", f"{here}/a/b"),
        ("fsync", f"{here}/a"),
    ]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        make_directories(tmp_path / "file" / "c")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_file("plain", NEW)
    build_tree(Path("t.tmp"))
    publish_directory("t.tmp", "t")
    remove_tree("t")
    assert content(tmp_path) == {"plain": NEW}


# A power cut at each call


def check_old_or_new(place: Path) -> None:
    assert (place / "state.json").read_bytes() in (OLD, NEW)


def test_a_power_cut_during_a_file_write(tmp_path: Path) -> None:
    def prepare(place: Path) -> None:
        (place / "state.json").write_bytes(OLD)

    places = crash_everywhere(tmp_path, prepare, lambda place: write_file(place / "state.json", NEW))
    seen = set()
    for place in places:
        check_old_or_new(place)
        seen.add((place / "state.json").read_bytes())
    assert seen == {OLD, NEW}
    assert (places[-1] / "state.json").read_bytes() == NEW, "what has returned is durable"


def test_a_power_cut_while_publishing(tmp_path: Path) -> None:
    files = {
        "manifest.json": b"{}" * 300,
        "a/zarr.json": b"meta",
        "a/c/0": b"\1" * 5000,
        "a/c/1": b"\2" * 9000,
    }

    def act(place: Path) -> None:
        build_tree(place / "new.tmp")
        publish_directory(place / "new.tmp", place / "new")

    places = crash_everywhere(tmp_path, lambda place: None, act)
    there = [place for place in places if (place / "new").exists()]
    assert there
    for place in there:
        assert content(place / "new") == files
    assert (places[-1] / "new").exists()


def test_a_power_cut_during_a_removal(tmp_path: Path) -> None:
    files = {}

    def prepare(place: Path) -> None:
        files.update(build_tree(place / "old"))

    for place in crash_everywhere(tmp_path, prepare, lambda place: remove_tree(place / "old")):
        if (place / "old").exists():
            assert content(place / "old") == files


@pytest.mark.parametrize("forgotten", ["data", "directory"])
def test_the_power_cut_shows_a_forgotten_sync(tmp_path: Path, forgotten: str) -> None:
    """The check itself can fail: a write without one of its two syncs is caught."""

    class Forgetful(CrashingSyscalls):
        def fsync(self, fd: int) -> None:
            directory = Path(self._files[fd][0]).is_dir()
            if directory != (forgotten == "directory"):
                super().fsync(fd)

    bad = 0
    for stop in range(1, 20):
        for seed in SEEDS:
            place = tmp_path / f"{stop}-{seed}"
            place.mkdir()
            (place / "state.json").write_bytes(OLD)
            machine, finished = Forgetful(stop), False
            with seam.injected(machine), suppress(Crash):
                write_file(place / "state.json", NEW)
                finished = True
            machine.lose_unsynced(seed, place)
            after = (place / "state.json").read_bytes()
            bad += after not in (OLD, NEW) or (finished and after != NEW)
    assert bad > 0


def test_what_was_removed_before_the_power_cut_is_forgotten(tmp_path: Path) -> None:
    """Its inode number may be given to another at once, here to a directory."""
    for seed in SEEDS:
        machine, place = CrashingSyscalls(1000), tmp_path / str(seed)
        place.mkdir()
        for path in (place / "0", place / "1"):
            machine.close(machine.open(str(path), os.O_CREAT | os.O_WRONLY))
            machine.unlink(str(path))
        for path in (place / "2", place / "3"):
            path.mkdir()
            (path / "lasting").write_bytes(NEW)
        machine.lose_unsynced(seed, place)
        assert {(place / name / "lasting").read_bytes() for name in "23"} == {NEW}


def test_a_link_is_followed_and_what_is_no_file_is_let_alone(tmp_path: Path) -> None:
    """Renaming onto a device would take it away from the whole system."""
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(OLD)
    link.symlink_to(target)
    write_file(link, NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="it is not a regular file: name another"):
        write_file(pipe, NEW)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]
