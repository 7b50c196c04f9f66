"""The directories that hold the state: checked before a run, and locked during it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from tierstream.io import mounts, seam
from tierstream.io.backend import Backend, PathLike, TransferPath
from tierstream.io.errors import StorageError, storage_errors
from tierstream.io.posix import probe
from tierstream.io.sizes import format_bytes
from tierstream.io.transfer import Direction, transfer_all, transfer_some

_LOCK_NAME = ".tierstream.lock"
_PID_NBYTES_MAX = 32


@dataclass(frozen=True, slots=True)
class Drive:
    """A directory that holds part of the state, and how it is worked on.

    Attributes:
        directory: its path, made if missing.
        backend: moves its bytes; several drives may share one.
        weight: share of the traffic that it should carry, relative to the other drives: its bandwidth in any
            unit, > 0.
    """

    directory: str
    backend: Backend
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DirectoryInfo:
    """What is known of a directory after `check_directory`.

    Attributes:
        path: absolute path.
        filesystem: type, e.g. "ext4"; "unknown" where the mount table does not tell.
        device: number of the file system; directories of one number share its space.
        free_bytes: free for this user; reserved blocks are not counted.
        transfer_path: the way between its files and host memory.
    """

    path: str
    filesystem: str
    device: int
    free_bytes: int
    transfer_path: TransferPath

    @property
    def in_memory(self) -> bool:
        """Whether files here take DRAM and not a drive."""
        return self.filesystem in mounts.MEMORY_FILESYSTEMS


def check_directory(path: PathLike, need_bytes: int = 0) -> DirectoryInfo:
    """Looks whether `path` can hold `need_bytes` more, by writing a scratch file and reading it back.

    Raises:
        StorageError: it is missing, no directory, a circle of links, not writable, or has too little free
    space.
    """
    return check_directories([(path, need_bytes)])[0]


def check_directories(needs: Iterable[tuple[PathLike, int]]) -> list[DirectoryInfo]:
    """`check_directory` for several directories and the bytes each needs; those on one drive share it."""
    infos: list[DirectoryInfo] = []
    need_of_drive: dict[int, int] = {}
    for path, need_bytes in needs:
        name = os.path.abspath(path)
        device = _check_is_directory(name)
        need_of_drive[device] = need_of_drive.get(device, 0) + need_bytes
        free_bytes = check_free(name, need_of_drive[device])
        infos.append(
            DirectoryInfo(name, mounts.filesystem_of(name), device, free_bytes, _check_writable(name))
        )
    return infos


def _check_is_directory(path: str) -> int:
    """Its device number."""
    try:
        status = seam.current().stat(path)
    except FileNotFoundError as cause:
        raise StorageError("using directory", path, cause, detail="create it or name another") from cause
    except OSError as cause:
        raise StorageError("using directory", path, cause) from cause
    if not stat.S_ISDIR(status.st_mode):
        no_directory = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise StorageError("using directory", path, no_directory, detail="name a directory, not a file")
    return status.st_dev


def check_free(path: str, need_bytes: int) -> int:
    """The free bytes of the drive of `path`, those for root not counted.

    Raises:
        StorageError: fewer than `need_bytes`.
    """
    with storage_errors("looking at the free space of", path):
        usage = seam.current().statvfs(path)
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < need_bytes:
        cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        detail = (
            f"{format_bytes(need_bytes)} ({need_bytes} bytes) are needed there, {format_bytes(free_bytes)} "
            f"({free_bytes} bytes) are free: free space or name a directory on another drive"
        )
        raise StorageError("using directory", path, cause, detail=detail)
    return free_bytes


def held_bytes(path: PathLike) -> int:
    """Space that the files under a directory take; 0 if it is not there. Raises StorageError."""
    name, total = os.fspath(path), 0
    with storage_errors("looking at", name):
        if not os.path.isdir(name):
            return 0
        for entry in seam.current().scandir(name):
            if entry.is_dir(follow_symlinks=False):
                total += held_bytes(entry.path)
            else:
                total += 512 * entry.stat(follow_symlinks=False).st_blocks
    return total


def _check_writable(path: str) -> TransferPath:
    try:
        return probe(path)
    except StorageError as error:
        if error.errno is None:
            raise
        cause, detail = OSError(error.errno, os.strerror(error.errno)), ""
        if error.errno in (errno.EACCES, errno.EPERM):
            detail = "files must be created there: change its owner or mode, or name another directory"
        elif error.errno == errno.EROFS:
            detail = "the file system is mounted read-only: name another directory"
        raise StorageError("writing to directory", path, cause, detail=detail) from error


class DirectoryLock:
    """Holds a directory for one run, by flock(2) on a file in it; the kernel lets go of it when the process
    ends.

    Usable as a context manager.

    Raises:
        StorageError: another run holds it; the text names its process.
    """

    def __init__(self, directory: PathLike) -> None:
        self.path = os.path.join(os.path.abspath(directory), _LOCK_NAME)
        calls = seam.current()
        with storage_errors("locking", self.path):
            self._fd = calls.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            self._acquire()
        except BaseException:
            with suppress(OSError):
                calls.close(self._fd)
            raise

    def _acquire(self) -> None:
        calls = seam.current()
        try:
            calls.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            detail = (
                f"process {self._read_pid()} is using this directory: wait for it, stop it, or name another"
            )
            raise StorageError("locking", self.path, cause, detail=detail) from cause
        except OSError as cause:
            raise StorageError("locking", self.path, cause) from cause
        with storage_errors("locking", self.path):
            calls.ftruncate(self._fd, 0)
        pid = np.frombuffer(f"{os.getpid()}\n".encode(), dtype=np.uint8)
        transfer_all(Direction.WRITE, self._fd, self.path, pid, 0)

    def _read_pid(self) -> str:
        text = np.zeros(_PID_NBYTES_MAX, dtype=np.uint8)
        count = transfer_some(Direction.READ, self._fd, self.path, text, 0)
        return text[:count].tobytes().decode(errors="replace").strip() or "unknown"

    def fileno(self) -> int:
        """For a child process that is to hold the directory as well: it is free when all have ended."""
        return self._fd

    def release(self) -> None:
        """Lets go. The file stays: removing it would let two runs lock two files of that name."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with storage_errors("unlocking", self.path):
                seam.current().close(fd)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
