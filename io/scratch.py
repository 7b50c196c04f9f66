"""Files to measure a drive with: of bytes that nothing can compress, really written, and gone afterwards."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import Future
from types import TracebackType

import numpy as np

from tierstream.io import seam
from tierstream.io.backend import PathLike
from tierstream.io.drives import DirectoryLock
from tierstream.io.durable import remove_tree
from tierstream.io.errors import StorageError, storage_errors
from tierstream.io.extents import check_written
from tierstream.io.host_memory import allocate
from tierstream.io.posix import PosixBackend, create_file
from tierstream.io.seam import HostBytes

_PREFIX = ".tierstream-scratch-"
_FILL_BLOCK_BYTES = 4 << 20
_FILL_BUFFERS = 4
_STAMP_EVERY_BYTES = 4096
#: Larger buffers repeat this many random bytes; `stamp` makes their blocks differ all the same.
_RANDOM_BYTES = 16 << 20


class ScratchFolder:
    """A folder of its own in `directory`, removed with all it holds at the end of the `with` block.

    What a killed process left there is removed when the next folder is made: its lock is free.

    Attributes:
        neighbours: folders of other processes that are at work in the same directory.

    Raises:
        StorageError: the directory cannot be written.
    """

    def __init__(self, directory: PathLike) -> None:
        self.directory = os.path.abspath(directory)
        self.neighbours = _remove_dead(self.directory)
        self.path = os.path.join(self.directory, _PREFIX + secrets.token_hex(6))
        with storage_errors("creating", self.path):
            seam.current().mkdir(self.path)
        try:
            self._lock = DirectoryLock(self.path)
        except BaseException:
            remove_tree(self.path)
            raise

    def new_file(self, name: str, nbytes: int, *, seed: int = 0) -> str:
        """Makes a file of `nbytes` incompressible bytes that lie on the drive; returns its path.

        Raises:
            StorageError: the drive is full or fails, or its file system keeps the file in less space than it
                has bytes.
        """
        path = os.path.join(self.path, name)
        create_file(path, nbytes)
        fill(path, nbytes, seed)
        check_written(path)
        return path

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # While the lock is held nobody else removes the folder.
        try:
            remove_tree(self.path)
        finally:
            self._lock.release()


def incompressible(nbytes: int, seed: int = 0) -> HostBytes:
    """Random bytes in memory like that of training: huge pages make direct I/O cheaper and faster."""
    buffer = allocate(max(4096, nbytes + -nbytes % 4096))[:nbytes]
    source = np.random.default_rng(seed).bytes(min(nbytes, _RANDOM_BYTES))
    for start in range(0, nbytes, _RANDOM_BYTES):
        part = buffer[start : start + _RANDOM_BYTES]
        part[:] = np.frombuffer(source, dtype=np.uint8, count=part.nbytes)
    return buffer


def stamp(buffer: HostBytes, number: int) -> None:
    """Makes a whole number of 4 KiB blocks differ from each other and from those of every other `number`, so
    that nothing is stored once for twice.
    """
    words = buffer.view(np.uint64)[:: _STAMP_EVERY_BYTES // 8]
    words[:] = np.arange(len(words), dtype=np.uint64) + np.uint64(number << 32)


def fill(path: str, nbytes: int, seed: int = 0) -> None:
    """Writes the whole file with direct I/O where possible, and brings it to the drive.

    Raises:
        StorageError: a write failed.
    """
    backend = PosixBackend(threads=_FILL_BUFFERS)
    try:
        file = backend.open(path, writable=True)
        buffers = [incompressible(_FILL_BLOCK_BYTES, seed + index) for index in range(_FILL_BUFFERS)]
        futures: dict[int, Future[int]] = {}
        for number, offset in enumerate(range(0, nbytes, _FILL_BLOCK_BYTES)):
            which = number % _FILL_BUFFERS
            if which in futures:
                futures.pop(which).result()
            stamp(buffers[which], number)
            part = buffers[which][: min(_FILL_BLOCK_BYTES, nbytes - offset)]
            futures[which] = file.write_from(part, offset)
        for future in futures.values():
            future.result()
        file.close()
    finally:
        backend.close()
    sync(path)


def sync(path: str) -> None:
    """fsync(2) of the file.

    Raises:
        StorageError: it failed.
    """
    calls = seam.current()
    with storage_errors("syncing", path):
        fd = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            calls.fsync(fd)
        finally:
            calls.close(fd)


def forget_cached(path: str) -> None:
    """Drops the file's pages from the page cache, so that the next read comes from the drive
    (posix_fadvise(2)).
    """
    sync(path)
    calls = seam.current()
    with storage_errors("opening", path):
        fd = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            calls.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            calls.close(fd)


def _remove_dead(directory: str) -> int:
    """The number of those that are alive."""
    alive = 0
    with storage_errors("looking into", directory):
        paths = [entry.path for entry in seam.current().scandir(directory) if entry.name.startswith(_PREFIX)]
    for path in paths:
        try:
            with DirectoryLock(path):
                remove_tree(path)
        except StorageError:  # its owner holds the lock, or has just removed the folder
            alive += os.path.exists(path)
    return alive
