"""Files through preadv/pwritev and O_DIRECT in a thread pool; works on every Linux machine.

A request is served block by block through the direct descriptor, straight from or into the caller's buffer
where that is aligned, else through a bounce buffer. Its unaligned ends go through a second, buffered
descriptor: the kernel changes single bytes there without touching their neighbours. A file that refuses
direct I/O (at open, by statx, or at its first transfer) is served buffered, and says so in `path_taken`.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from tierstream.io import seam
from tierstream.io.backend import (
    DEFAULT_QUEUE_DEPTH,
    DEFAULT_TASK_BYTES,
    DEFAULT_THREADS,
    Buffer,
    Counter,
    PathLike,
    TransferCounts,
    TransferPath,
)
from tierstream.io.direct import BounceBuffers, DirectIO, address_of, aligned_buffer, examine
from tierstream.io.errors import InvariantError, StorageError, storage_errors
from tierstream.io.handles import HandleCache, handle_limit
from tierstream.io.seam import HostBytes
from tierstream.io.sizes import format_bytes
from tierstream.io.tasks import TaskPool, ThreadedFile, host_view
from tierstream.io.transfer import Direction, transfer_all, transfer_some

_LOG = logging.getLogger(__name__)
#: What a file system answers to O_DIRECT, at open or at a transfer, when it does not do it.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class PosixBackend:
    """The backend "posix".

    Args:
        threads: worker threads.
        task_bytes: longer requests are cut into tasks of this size.
        queue_depth: requests begun and not ended at most.
        direct: False keeps to the page cache (comparison runs).
    """

    name = "posix"

    def __init__(
        self,
        *,
        threads: int = DEFAULT_THREADS,
        task_bytes: int = DEFAULT_TASK_BYTES,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        direct: bool = True,
    ) -> None:
        self.refusal = "" if direct else "direct I/O is switched off"
        self.pool = TaskPool("posix", threads, task_bytes, queue_depth)
        self.counter = Counter()
        self.bounce = BounceBuffers()
        self.descriptors: HandleCache[tuple[PosixFile, bool], int] = HandleCache(
            handle_limit(), _close_descriptor
        )
        self._noted = {self.refusal}
        self._closed = False

    def open(self, path: PathLike, *, writable: bool) -> PosixFile:
        if self._closed:
            raise InvariantError(f"opening {os.fspath(path)}: the backend is closed")
        return PosixFile(self, os.fspath(path), writable=writable)

    def create(self, path: PathLike, nbytes: int) -> None:
        create_file(os.fspath(path), nbytes)

    def transfer_path(self, path: PathLike, *, device: bool = False) -> TransferPath:
        if device:
            raise InvariantError("the posix backend moves host memory only")
        if self.refusal:
            return TransferPath("posix-buffered", False, self.refusal)
        return probe(path)

    def note_refusal(self, path: str, reason: str) -> None:
        """Logs once per reason that files go through the page cache."""
        if reason not in self._noted:
            self._noted.add(reason)
            _LOG.warning("%s and others like it are moved through the page cache: %s", path, reason)

    def counts(self) -> TransferCounts:
        return self.counter.counts()

    def close(self) -> None:
        self._closed = True
        self.pool.close()
        self.descriptors.close()


class PosixFile(ThreadedFile):
    """A file of the posix backend: up to two descriptors, which the backend's cache opens and closes."""

    def __init__(self, backend: PosixBackend, path: str, *, writable: bool) -> None:
        super().__init__(backend.pool, path, writable=writable)
        self._backend = backend
        self._identity: tuple[int, int] | None = None
        self._close_error: StorageError | None = None
        self._direct = DirectIO(backend.refusal)
        # Opening tells at once what cannot be opened, and what the kernel knows about direct I/O here.
        if not self._direct.refusal:
            try:
                with self._descriptor(direct=True) as fd:
                    self._direct = examine(fd, seam.current().fstat(fd))
            except StorageError as error:
                self._refuse_direct(error)
        if self._direct.refusal:
            backend.note_refusal(path, self._direct.refusal)
            backend.descriptors.drop((self, True))
            with self._descriptor(direct=False):
                pass

    @property
    def path_taken(self) -> TransferPath:
        refusal = self._direct.refusal
        return TransferPath("posix-buffered" if refusal else "posix-direct", not refusal, refusal)

    @property
    def block_bytes(self) -> int:
        """Offsets and lengths that are multiples of this go through the direct descriptor."""
        return self._direct.block_bytes

    @property
    def _align_bytes(self) -> int:
        return self._direct.block_bytes

    def _view(self, direction: Direction, buffer: Buffer) -> tuple[HostBytes, int]:
        view = host_view(direction, buffer, self.path)
        return view, view.nbytes

    def _move(self, direction: Direction, view: HostBytes, offset: int) -> None:
        if self._close_error is not None:
            raise self._close_error
        block = self._direct.block_bytes
        start = -offset % block
        stop = view.nbytes - (offset + view.nbytes) % block
        if self._direct.refusal or start >= stop:
            self._move_buffered(direction, view, offset)
            return
        self._move_buffered(direction, view[:start], offset)
        self._move_direct(direction, view[start:stop], offset + start)
        self._move_buffered(direction, view[stop:], offset + stop)

    def _move_buffered(self, direction: Direction, view: HostBytes, offset: int) -> None:
        if view.nbytes == 0:
            return
        with self._descriptor(direct=False) as fd:
            transfer_all(direction, fd, self.path, view, offset)
        self._backend.counter.add(direct=0, buffered=view.nbytes)

    def _move_direct(self, direction: Direction, view: HostBytes, offset: int) -> None:
        """Moves whole blocks; what the direct descriptor does not do is done by the buffered one."""
        try:
            with self._descriptor(direct=True) as fd:
                if address_of(view) % self._direct.memory_bytes == 0:
                    block = self._direct.block_bytes
                    done = transfer_some(direction, fd, self.path, view, offset, block_bytes=block)
                else:
                    done = self._move_bounced(direction, fd, view, offset)
        except StorageError as error:
            self._refuse_direct(error)
            done = 0
        self._backend.counter.add(direct=done, buffered=0)
        self._move_buffered(direction, view[done:], offset + done)

    def _move_bounced(self, direction: Direction, fd: int, view: HostBytes, offset: int) -> int:
        block = self._direct.block_bytes
        bounce = self._backend.bounce.get(block)
        done = 0
        while done < view.nbytes:
            part = view[done : done + bounce.nbytes]
            piece = bounce[: part.nbytes]
            if direction is Direction.WRITE:
                piece[:] = part
            count = transfer_some(direction, fd, self.path, piece, offset + done, block_bytes=block)
            if direction is Direction.READ:
                part[:count] = piece[:count]
            done += count
            if count < piece.nbytes:
                break
        return done

    def _refuse_direct(self, error: StorageError) -> None:
        """Goes on without direct I/O if that is what `error` is about; else raises it."""
        if error.errno not in _REFUSALS:
            raise error
        self._direct = replace(self._direct, refusal=f"O_DIRECT was refused: {os.strerror(error.errno)}")
        self._backend.note_refusal(self.path, self._direct.refusal)

    @contextmanager
    def _descriptor(self, *, direct: bool) -> Iterator[int]:
        with self._backend.descriptors.borrow((self, direct), lambda: self._open(direct=direct)) as fd:
            yield fd

    def _open(self, *, direct: bool) -> int:
        flags = (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        calls = seam.current()
        with storage_errors("opening", self.path):
            fd = calls.open(self.path, flags)
        try:
            self._check_identity(calls.fstat(fd))
        except BaseException:
            calls.close(fd)
            raise
        return fd

    def _check_identity(self, status: os.stat_result) -> None:
        """Descriptors are closed and opened again at will: they must go on meaning the same file."""
        if not stat.S_ISREG(status.st_mode):
            raise StorageError("opening", self.path, detail="it is not a regular file")
        identity = (status.st_dev, status.st_ino)
        if self._identity is None:
            self._identity = identity
        elif self._identity != identity:
            raise StorageError(
                "opening", self.path, detail="another file was put in its place while it was in use"
            )

    def note_close_error(self, cause: OSError) -> None:
        """A failed close can mean lost writes (close(2)): the next request or closing the file raises it."""
        self._close_error = StorageError("closing", self.path, cause)

    def _release(self) -> None:
        self._backend.descriptors.drop((self, True))
        self._backend.descriptors.drop((self, False))
        if self._close_error is not None:
            raise self._close_error


def _close_descriptor(key: tuple[PosixFile, bool], fd: int) -> None:
    try:
        seam.current().close(fd)
    except OSError as cause:
        key[0].note_close_error(cause)


def create_file(path: str, nbytes: int) -> None:
    """Makes a new file of `nbytes` with its space reserved (posix_fallocate); nothing is left behind on
    failure.

    Raises:
        StorageError: the file exists, or the drive is full.
    """
    calls = seam.current()
    with storage_errors("creating", path):
        fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        try:
            if nbytes:
                calls.posix_fallocate(fd, 0, nbytes)
        finally:
            calls.close(fd)
    except OSError as cause:
        with suppress(OSError):
            calls.unlink(path)
        raise StorageError("creating", path, cause, detail=f"{format_bytes(nbytes)} wanted") from cause


def probe(path: PathLike) -> TransferPath:
    """The way between host memory and the file `path`, or new files in the directory `path`, found by trying
    it.

    In a directory a block is written to a scratch file and read back; of a file the first block is read.

    Raises:
        StorageError: the path is missing or cannot be read or written, or other bytes came back.
    """
    name = os.fspath(path)
    with storage_errors("looking at", name):
        directory = stat.S_ISDIR(seam.current().stat(name).st_mode)
    backend = PosixBackend(threads=1)
    try:
        return _try_directory(backend, name) if directory else _try_file(backend, name)
    finally:
        backend.close()


def _try_directory(backend: PosixBackend, directory: str) -> TransferPath:
    scratch = os.path.join(directory, f".tierstream-probe-{secrets.token_hex(8)}")
    create_file(scratch, 0)
    try:
        file = backend.open(scratch, writable=True)
        written = aligned_buffer(file.block_bytes)
        written[:] = np.frombuffer(secrets.token_bytes(written.nbytes), dtype=np.uint8)
        read = aligned_buffer(written.nbytes)
        file.write_from(written, 0).result()
        file.read_into(read, 0).result()
        if not np.array_equal(read, written):
            raise StorageError("checking", directory, detail="other bytes were read than had been written")
        return file.path_taken
    finally:
        with suppress(OSError):
            seam.current().unlink(scratch)


def _try_file(backend: PosixBackend, path: str) -> TransferPath:
    file = backend.open(path, writable=False)
    if seam.current().stat(path).st_size >= file.block_bytes:
        file.read_into(aligned_buffer(file.block_bytes), 0).result()
    return file.path_taken
