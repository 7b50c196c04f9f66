"""A machine that stops at a chosen system call, and a drive that then has lost what was not synced.

    for stop in range(1, 100):
        machine = CrashingSyscalls(stop)
        with suppress(Crash), seam.injected(machine):
            write_file(path, data)
        machine.lose_unsynced(seed, root)
        ...  # look at what a restarted program finds

The model: the bytes of a file written since its last fsync are kept, dropped or garbled; a rename, creation
or removal of a name since the last fsync of its directory is kept or undone; both by the seed. fsync makes
lasting what it says and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.faults import Call, FaultySyscalls

from tierstream.io import seam
from tierstream.io.seam import HostBytes

#: Takes back a change of names in a directory, given the path that the directory has now.
Undo = Callable[[Path], object]
SEEDS = range(6)


class Crash(BaseException):
    """The machine stopped: no call works any more. Not an Exception, so that nothing handles it."""


class CrashingSyscalls(FaultySyscalls):
    """Real system calls until the `stop`-th; that one and all later ones raise `Crash`."""

    def __init__(self, stop: int) -> None:
        super().__init__(self._stop_here)
        self._left = stop
        self._guard = threading.Lock()
        self._attic = Path(tempfile.mkdtemp(prefix="crash-"))
        self._synced: dict[int, bytes] = {}  # inode of a file -> what it held at its last fsync
        self._names: dict[int, list[Undo]] = {}  # inode of a directory -> its changes since its last fsync
        self._held: dict[int, int] = {}  # inode -> a descriptor of it

    @property
    def stopped(self) -> bool:
        return self._left <= 0

    def _stop_here(self, call: Call) -> None:
        with self._guard:
            self._left -= 1
            if self._left <= 0:
                raise Crash(f"{call.name} {call.path}")

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        new = bool(flags & os.O_CREAT) and not os.path.exists(path)
        fd = super().open(path, flags, mode)
        if new:
            self._synced[self._inode(path)] = b""
            self._changed(path, lambda directory: (directory / os.path.basename(path)).unlink())
        return fd

    def pwritev(self, fd: int, buffer: HostBytes, offset: int) -> int:
        file = Path(f"/proc/self/fd/{fd}")
        inode = self._inode(str(file))
        before = b"" if inode in self._synced else file.read_bytes()
        count = super().pwritev(fd, buffer, offset)
        self._synced.setdefault(inode, before)
        return count

    def fsync(self, fd: int) -> None:
        self._before_fd("fsync", fd)  # and not of the drive: what lasts is what this object says
        inode = os.fstat(fd).st_ino
        self._synced.pop(inode, None)
        self._names.pop(inode, None)

    def rename(self, source: str, target: str) -> None:
        link = os.readlink(target) if os.path.islink(target) else None
        replaced = self._keep(target) if link is None and os.path.isfile(target) else None
        super().rename(source, target)
        old, new = os.path.basename(source), os.path.basename(target)

        def undo(directory: Path) -> None:
            (directory / new).rename(directory / old)
            if replaced is not None:
                shutil.copy(replaced, directory / new)
            if link is not None:
                (directory / new).symlink_to(link)

        self._changed(target, undo)

    def exchange(self, one: str, other: str) -> None:
        super().exchange(one, other)
        names = os.path.basename(one), os.path.basename(other)

        def undo(directory: Path) -> None:
            seam.Syscalls().exchange(*(str(directory / name) for name in names))

        self._changed(other, undo)

    def unlink(self, path: str) -> None:
        kept = self._keep(path)
        super().unlink(path)
        self._changed(path, lambda directory: shutil.copy(kept, directory / os.path.basename(path)))

    def symlink(self, target: str, path: str) -> None:
        super().symlink(target, path)
        self._changed(path, lambda directory: (directory / os.path.basename(path)).unlink())

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        super().mkdir(path, mode)
        self._changed(path, lambda directory: shutil.rmtree(directory / os.path.basename(path)))

    def _keep(self, path: str) -> Path:
        kept = self._attic / str(len(list(self._attic.iterdir())))
        shutil.copy(path, kept)
        return kept

    def _changed(self, path: str, undo: Undo) -> None:
        inode = self._inode(os.path.dirname(os.path.abspath(path)))
        self._names.setdefault(inode, []).append(undo)

    def _inode(self, path: str) -> int:
        """Its number, which no other file or directory gets: the file system gives it away again once nothing
        has a name or a descriptor of it."""
        descriptor = os.open(path, os.O_PATH)
        inode = os.fstat(descriptor).st_ino
        if self._held.setdefault(inode, descriptor) != descriptor:
            os.close(descriptor)
        return inode

    def lose_unsynced(self, seed: int, root: Path) -> None:
        """Does to the tree `root` what a drive may do when the power goes."""
        rng = random.Random(seed)
        tree = sorted(root.rglob("*"), key=lambda path: len(path.parts), reverse=True)
        for path in [*tree, root]:
            inode = path.lstat().st_ino if path.exists() else 0
            if inode in self._synced:
                _damage(path, self._synced[inode], rng)
            # The changes of one directory reach the drive in order: the first few of them last.
            changes = self._names.get(inode, [])
            for undo in reversed(changes[rng.randint(0, len(changes)) :]):
                undo(path)
        self.forget()

    def forget(self) -> None:
        """Gives back what it kept for `lose_unsynced`."""
        shutil.rmtree(self._attic)
        for descriptor in self._held.values():
            os.close(descriptor)


def _damage(path: Path, synced: bytes, rng: random.Random) -> None:
    written = path.read_bytes()
    outcome = rng.choice(["kept", "dropped", "cut", "garbled"])
    if outcome == "dropped":
        path.write_bytes(synced)
    elif outcome == "cut":
        path.write_bytes(written[: rng.randint(0, len(written))])
    elif outcome == "garbled":
        path.write_bytes(rng.randbytes(len(written)))


def crash_everywhere(
    root: Path, prepare: Callable[[Path], object], act: Callable[[Path], object]
) -> list[Path]:
    """Directories as a restarted program finds them, one for each call at which the power went, times some
    fates of the data that was not synced. `prepare` ran well before."""
    found = []
    for stop in range(1, 200):
        finished = False
        for seed in SEEDS:
            place = root / f"{stop}-{seed}"
            place.mkdir(parents=True)
            prepare(place)
            machine = CrashingSyscalls(stop)
            with seam.injected(machine), suppress(Crash):
                act(place)
                finished = True
            machine.lose_unsynced(seed, place)
            found.append(place)
        if finished:
            return found
    raise AssertionError("it never ended")
