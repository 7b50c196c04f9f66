"""What a backend is: the one interface through which pages and checkpoints reach the drives."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from tierstream.io.errors import ConfigError
from tierstream.io.seam import HostBytes

#: A one-dimensional C-contiguous uint8 numpy array, or (kvikio only) a C-contiguous object with
#: `__cuda_array_interface__`.
Buffer: TypeAlias = HostBytes | Any
PathLike: TypeAlias = str | os.PathLike[str]

BackendKind: TypeAlias = Literal["posix", "kvikio"]
BACKENDS = ("auto", "posix", "kvikio")
DEFAULT_THREADS = 16
DEFAULT_TASK_BYTES = 4 << 20
DEFAULT_QUEUE_DEPTH = 64


@dataclass(frozen=True, slots=True)
class TransferPath:
    """The way that bytes really take between memory and a file.

    Attributes:
        name: "posix-direct" (O_DIRECT), "posix-buffered" (page cache), "kvikio-compat" (kvikio's POSIX
            threads) or "gds" (drive to GPU without a copy in host memory).
        direct: whether aligned transfers bypass the page cache.
        reason: why it is not a better one; empty where there is none.
    """

    name: Literal["posix-direct", "posix-buffered", "kvikio-compat", "gds"]
    direct: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Bytes moved by a backend since it was opened, by the descriptor that moved them."""

    bytes_direct: int
    bytes_buffered: int


class File(Protocol):
    """One open file of a backend. The path must stay in place while it is open."""

    path: str

    def read_into(self, buffer: Buffer, offset: int) -> Future[int]:
        """Fills the whole `buffer` from byte `offset`; the future gives `buffer.nbytes`.

        The future resolves once, after the last access to the buffer; buffer and file are kept alive until
        then. It cannot be cancelled.

        Raises (from the future):
            StorageError: with path, offset and errno; also where the file ends first.
        """
        ...

    def write_from(self, buffer: Buffer, offset: int) -> Future[int]:
        """Writes the whole `buffer` at byte `offset`; else as `read_into`. The buffer must not change."""
        ...

    @property
    def path_taken(self) -> TransferPath:
        """The way between host memory and this file, by what was seen so far."""
        ...

    def close(self) -> None:
        """Lets go of the file once the requests under way are done. Later requests raise InvariantError."""
        ...


class Backend(Protocol):
    """Opens files and moves bytes with worker threads that release the GIL."""

    name: str

    def open(self, path: PathLike, *, writable: bool) -> File:
        """Opens an existing regular file; never creates one.

        Raises:
            StorageError: missing, not permitted, not a regular file.
        """
        ...

    def create(self, path: PathLike, nbytes: int) -> None:
        """Makes a new file of `nbytes` with its space reserved on the drive; nothing is left behind on
        failure.

        Raises:
            StorageError: the file exists, or the drive is full.
        """
        ...

    def transfer_path(self, path: PathLike, *, device: bool = False) -> TransferPath:
        """The way between `path`, a file or a directory of files, and host or `device` memory, by trying it.

        Raises:
            StorageError: the path is missing or cannot be used.
        """
        ...

    def counts(self) -> TransferCounts: ...

    def close(self) -> None:
        """Waits for the requests under way; closes every file and thread."""
        ...


class Counter:
    """Thread-safe sums behind `TransferCounts`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_direct = 0
        self._bytes_buffered = 0

    def add(self, *, direct: int, buffered: int) -> None:
        with self._lock:
            self._bytes_direct += direct
            self._bytes_buffered += buffered

    def counts(self) -> TransferCounts:
        with self._lock:
            return TransferCounts(self._bytes_direct, self._bytes_buffered)


def resolve_backend(name: str) -> BackendKind:
    """What "auto" stands for on this machine: kvikio where it and a CUDA device are there, else posix.

    Raises:
        ConfigError: an unknown name.
    """
    from tierstream.io.kvikio_backend import cuda_device_present, kvikio_problem

    if name not in BACKENDS:
        raise ConfigError(f"unknown I/O backend {name!r}; choose one of {', '.join(BACKENDS)}")
    if name == "posix" or name == "kvikio":
        return name  # type: ignore[return-value]
    return "kvikio" if cuda_device_present() and not kvikio_problem() else "posix"


def open_backend(
    name: str = "auto",
    *,
    threads: int = DEFAULT_THREADS,
    task_bytes: int = DEFAULT_TASK_BYTES,
    queue_depth: int = DEFAULT_QUEUE_DEPTH,
) -> Backend:
    """Opens the backend `name`: "posix", "kvikio", or "auto" (see `resolve_backend`).

    Args:
        threads: worker threads; also the number of transfers in flight at a time.
        task_bytes: longer requests are cut into tasks of this size.
        queue_depth: requests that are begun and not ended at most; later ones wait for their turn.

    Raises:
        ConfigError: an unknown name, or kvikio cannot be used here (with the reason and the remedy).
    """
    # The backends import this module's types.
    from tierstream.io.kvikio_backend import KvikioBackend
    from tierstream.io.posix import PosixBackend

    kind = KvikioBackend if resolve_backend(name) == "kvikio" else PosixBackend
    return kind(threads=threads, task_bytes=task_bytes, queue_depth=queue_depth)
