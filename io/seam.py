"""The one place where tierstream makes system calls on files.

Code that touches a file asks `current()` for the `Syscalls` in force and calls its method, each time anew.
Tests replace the object with `injected()` and so make any call fail, fall short or take its time, without a
full disk or a broken drive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: Bytes in host memory: a one-dimensional, C-contiguous uint8 array.
HostBytes: TypeAlias = npt.NDArray[np.uint8]

# statx(2): the extended form is not in Python's os module before 3.15. Numbers from linux/stat.h and
# linux/fcntl.h.
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_NBYTES = 256
_STATX_MASK_OFFSET = 0
_STATX_DIO_OFFSET = 0x98
# renameat2(2): from linux/fs.h.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Syscalls:
    """The system calls themselves, one method per call; arguments and errors (`OSError`) as in `os`."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffer: HostBytes, offset: int) -> int:
        return os.preadv(fd, [buffer.data], offset)

    def pwritev(self, fd: int, buffer: HostBytes, offset: int) -> int:
        return os.pwritev(fd, [buffer.data], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def fadvise(self, fd: int, offset: int, nbytes: int, advice: int) -> None:
        os.posix_fadvise(fd, offset, nbytes, advice)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(fd, request, argument)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)

    def statx_dioalign(self, fd: int) -> tuple[int, int] | None:
        """Alignment that direct I/O on this file wants, in bytes: (of memory, of offset and length).

        (0, 0) where the file system says that direct I/O is not supported; None where the kernel (before 6.1)
        or the file system does not say.
        """
        if not hasattr(_libc, "statx"):
            return None
        result = ctypes.create_string_buffer(_STATX_NBYTES)
        if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result) != 0:
            return None
        (mask,) = struct.unpack_from("I", result, _STATX_MASK_OFFSET)
        if not mask & _STATX_DIOALIGN:
            return None
        memory, offset = struct.unpack_from("II", result, _STATX_DIO_OFFSET)
        return memory, offset

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def exchange(self, one: str, other: str) -> None:
        """Swaps two names (renameat2, RENAME_EXCHANGE); ENOSYS or EINVAL where that is not possible."""
        if not hasattr(_libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one)
        names = os.fsencode(one), os.fsencode(other)
        if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)


_current = Syscalls()


def current() -> Syscalls:
    """The system calls in force in this process."""
    return _current


@contextmanager
def injected(replacement: Syscalls) -> Iterator[None]:
    """Puts `replacement` in force, for all threads of the process, until the end of the `with` block."""
    global _current
    previous, _current = _current, replacement
    try:
        yield
    finally:
        _current = previous
