"""System calls that fail, fall short or take their time, for `tierstream.io.seam.injected`.

    with seam.injected(FaultySyscalls(fail(errno.EIO, on="pwritev", at=3))):
        ...

Every call is recorded in `FaultySyscalls.calls`, before the faults see it.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tierstream.io.seam import HostBytes, Syscalls

BLOCK_BYTES = 4096
TRANSFERS = ("preadv", "pwritev")


@dataclass(frozen=True)
class Call:
    """One system call: its name, the path it is about, and its number among calls of this name, from 1."""

    name: str
    path: str
    number: int
    direct: bool = False
    offset: int = 0
    nbytes: int = 0


#: Looks at a call before it is made; raises to make it fail.
Fault = Callable[[Call], None]


class FaultySyscalls(Syscalls):
    """Real system calls behind faults.

    Args:
        faults: asked in turn before each call.
        short_bytes: one transfer moves at most this many bytes; on a direct descriptor one block of 4096.
    """

    def __init__(self, *faults: Fault, short_bytes: int | None = None) -> None:
        self.calls: list[Call] = []
        self._faults = faults
        self._short_bytes = short_bytes
        self._numbers: Counter[str] = Counter()
        self._files: dict[int, tuple[str, bool]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def open_descriptors(self) -> dict[int, str]:
        """Descriptors opened and not closed through these calls, with their paths."""
        return {fd: path for fd, (path, _) in self._files.items()}

    def _before(
        self, name: str, path: str, *, direct: bool = False, offset: int = 0, nbytes: int = 0
    ) -> None:
        with self._lock:
            self._numbers[name] += 1
            call = Call(name, path, self._numbers[name], direct, offset, nbytes)
            self.calls.append(call)
        for fault in self._faults:
            fault(call)

    def _before_fd(self, name: str, fd: int, *, offset: int = 0, nbytes: int = 0) -> bool:
        path, direct = self._files.get(fd, ("?", False))
        self._before(name, path, direct=direct, offset=offset, nbytes=nbytes)
        return direct

    def _shortened(self, buffer: HostBytes, *, direct: bool) -> HostBytes:
        if self._short_bytes is None:
            return buffer
        return buffer[: BLOCK_BYTES if direct else self._short_bytes]

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        direct = bool(flags & os.O_DIRECT)
        self._before("open", path, direct=direct)
        fd = super().open(path, flags, mode)
        self._files[fd] = (path, direct)
        return fd

    def close(self, fd: int) -> None:
        try:
            self._before_fd("close", fd)
        finally:
            # A failing close(2) gives the descriptor back all the same.
            self._files.pop(fd, None)
            super().close(fd)

    def preadv(self, fd: int, buffer: HostBytes, offset: int) -> int:
        direct = self._before_fd("preadv", fd, offset=offset, nbytes=buffer.nbytes)
        return super().preadv(fd, self._shortened(buffer, direct=direct), offset)

    def pwritev(self, fd: int, buffer: HostBytes, offset: int) -> int:
        direct = self._before_fd("pwritev", fd, offset=offset, nbytes=buffer.nbytes)
        return super().pwritev(fd, self._shortened(buffer, direct=direct), offset)

    def fsync(self, fd: int) -> None:
        self._before_fd("fsync", fd)
        super().fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self._before_fd("ftruncate", fd, nbytes=nbytes)
        super().ftruncate(fd, nbytes)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._before_fd("posix_fallocate", fd, offset=offset, nbytes=nbytes)
        super().posix_fallocate(fd, offset, nbytes)

    def flock(self, fd: int, operation: int) -> None:
        self._before_fd("flock", fd)
        super().flock(fd, operation)

    def fstat(self, fd: int) -> os.stat_result:
        self._before_fd("fstat", fd)
        return super().fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        self._before("stat", path)
        return super().stat(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        self._before("statvfs", path)
        return super().statvfs(path)

    def rename(self, source: str, target: str) -> None:
        self._before("rename", target)
        super().rename(source, target)

    def exchange(self, one: str, other: str) -> None:
        self._before("exchange", other)
        super().exchange(one, other)

    def symlink(self, target: str, path: str) -> None:
        self._before("symlink", path)
        super().symlink(target, path)

    def unlink(self, path: str) -> None:
        self._before("unlink", path)
        super().unlink(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._before("mkdir", path)
        super().mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        self._before("rmdir", path)
        super().rmdir(path)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        self._before("scandir", path)
        return super().scandir(path)


class _Matches:
    """Which calls a fault is about."""

    def __init__(self, on: str | Collection[str], path: str, direct: bool | None) -> None:
        self._names = {on} if isinstance(on, str) else set(on)
        self._path = path
        self._direct = direct

    def __call__(self, call: Call) -> bool:
        return (
            call.name in self._names
            and fnmatch.fnmatch(call.path, self._path)
            and self._direct in (None, call.direct)
        )


def fail(
    number: int,
    *,
    on: str | Collection[str] = TRANSFERS,
    path: str = "*",
    direct: bool | None = None,
    at: int = 1,
    times: int | None = None,
) -> Fault:
    """Raises `OSError(number)` at matching calls, from the `at`-th on, `times` of them (None: all).

    Args:
        number: an errno.
        on: names of calls.
        path: pattern of paths (fnmatch).
        direct: on direct (True), buffered (False) or all (None) descriptors.
    """
    matches, lock = _Matches(on, path, direct), threading.Lock()
    seen = 0

    def fault(call: Call) -> None:
        nonlocal seen
        if not matches(call):
            return
        with lock:
            seen += 1
            hit = seen >= at and (times is None or seen < at + times)
        if hit:
            raise OSError(number, os.strerror(number), call.path)

    return fault


def interrupt_every(period: int) -> Fault:
    """EINTR at each `period`-th transfer."""

    def fault(call: Call) -> None:
        if call.name in TRANSFERS and call.number % period == 0:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    return fault


def refuse_direct_open() -> Fault:
    """A file system that refuses O_DIRECT when a file is opened."""
    return fail(errno.EINVAL, on="open", direct=True)


def refuse_direct_transfer() -> Fault:
    """A file system that opens files with O_DIRECT and refuses the first transfer."""
    return fail(errno.EINVAL, direct=True)


def delay(seed: int, *, max_s: float = 0.002) -> Fault:
    """Lets transfers take a random time, so that they end in another order than they began."""
    rng, lock = random.Random(seed), threading.Lock()

    def fault(call: Call) -> None:
        if call.name in TRANSFERS:
            with lock:
                duration_s = rng.uniform(0, max_s)
            time.sleep(duration_s)

    return fault
