"""Files through NVIDIA's kvikio: host and device buffers, and GPUDirect Storage where the machine has it.

Importing this module needs neither kvikio nor CUDA; opening the backend needs both. Requests are cut into
tasks here, not by kvikio: its future raises at the first failed piece while other pieces may still be using
the buffer. Its system calls are its own and do not go through `tierstream.io.seam`.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import threading
from contextlib import AbstractContextManager
from typing import Any

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
from tierstream.io.errors import ConfigError, InvariantError, StorageError
from tierstream.io.handles import HandleCache, handle_limit
from tierstream.io.posix import PosixBackend, create_file, probe
from tierstream.io.tasks import TaskPool, ThreadedFile, host_view
from tierstream.io.transfer import Direction, end_of_file

#: 26.04 mended races between threads and streams in device transfers.
_OLDEST_VERSION = (26, 4)
#: kvikio cuts direct I/O at pages of this size, whatever the drive says.
_BLOCK_BYTES = 4096
_ERRNO_OF_TEXT = {os.strerror(number): number for number in errno.errorcode}
_INSTALL = "pip install 'tierstream[kvikio]'"


def cuda_device_present() -> bool:
    """Whether the CUDA driver is there and sees a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def kvikio_problem() -> str:
    """Why kvikio cannot be used on this machine, with the remedy; empty where it can."""
    try:
        # Without the driver library every transfer of kvikio fails, also those of host memory.
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the CUDA driver library libcuda.so.1 is not on this machine: use the backend posix"
    try:
        version = importlib.import_module("kvikio").__version__
    except ImportError as error:
        return f"kvikio cannot be imported ({error}): {_INSTALL}"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_VERSION:
        return f"kvikio {version} is older than {'.'.join(map(str, _OLDEST_VERSION))}: {_INSTALL}"
    return ""


class _Settings:
    """kvikio's settings and its one pool of threads per process: as many as all open backends together work
    with. Bounce buffers are as large as the largest task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[tuple[int, int]] = []
        self._previous: AbstractContextManager[None] | None = None

    def enter(self, defaults: Any, threads: int, task_bytes: int) -> None:
        with self._lock:
            self._users.append((threads, task_bytes))
            largest = max(task for _, task in self._users)
            change = defaults.set(
                {
                    "num_threads": sum(count for count, _ in self._users),
                    "task_size": largest,
                    "bounce_buffer_size": largest,
                    "auto_direct_io_read": True,
                    "auto_direct_io_write": True,
                }
            )
            self._previous = self._previous or change

    def leave(self, threads: int, task_bytes: int) -> None:
        with self._lock:
            self._users.remove((threads, task_bytes))
            if not self._users and self._previous is not None:
                self._previous.__exit__(None, None, None)
                self._previous = None


_SETTINGS = _Settings()


class KvikioBackend:
    """The backend "kvikio".

    Args:
        threads: worker threads here, and as many more in kvikio's pool.
        task_bytes: longer requests are cut into tasks of this size.
        queue_depth: requests begun and not ended at most.

    Raises:
        ConfigError: kvikio cannot be used on this machine.
    """

    name = "kvikio"

    def __init__(
        self,
        *,
        threads: int = DEFAULT_THREADS,
        task_bytes: int = DEFAULT_TASK_BYTES,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
    ) -> None:
        problem = kvikio_problem()
        if problem:
            raise ConfigError(f"the I/O backend kvikio cannot be used: {problem}")
        self.cufile: Any = importlib.import_module("kvikio").CuFile
        self._defaults: Any = importlib.import_module("kvikio.defaults")
        self._driver: Any = importlib.import_module("kvikio.cufile_driver")
        _SETTINGS.enter(self._defaults, threads, task_bytes)
        # Opening a file there first gives errors with their errno, and tells whether direct I/O works on it.
        self.posix = PosixBackend(threads=1)
        self.pool = TaskPool("kvikio", threads, task_bytes, queue_depth)
        self.counter = Counter()
        # A CuFile holds two descriptors: one with O_DIRECT, one without.
        self.handles: HandleCache[KvikioFile, Any] = HandleCache(handle_limit(2), _close_handle)
        self._closed = False

    def open(self, path: PathLike, *, writable: bool) -> KvikioFile:
        if self._closed:
            raise InvariantError(f"opening {os.fspath(path)}: the backend is closed")
        return KvikioFile(self, os.fspath(path), writable=writable)

    def create(self, path: PathLike, nbytes: int) -> None:
        create_file(os.fspath(path), nbytes)

    def transfer_path(self, path: PathLike, *, device: bool = False) -> TransferPath:
        posix = probe(path)
        return self.device_path(posix) if device else self.host_path(posix)

    def host_path(self, posix: TransferPath) -> TransferPath:
        """kvikio serves host memory with POSIX threads, also where GDS is there."""
        return TransferPath("kvikio-compat", posix.direct, posix.reason or "host memory never takes GDS")

    def device_path(self, posix: TransferPath) -> TransferPath:
        if self._defaults.is_compat_mode_preferred():
            reason = "kvikio is in compatibility mode: libcufile, /run/udev or KVIKIO_COMPAT_MODE"
        elif not self._driver.get("is_gds_available"):
            reason = "cuFile is in its own compatibility mode: no GDS driver"
        elif not posix.direct:
            reason = posix.reason
        else:
            return TransferPath("gds", True)
        return TransferPath("kvikio-compat", posix.direct, reason)

    def counts(self) -> TransferCounts:
        return self.counter.counts()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.pool.close()
        self.handles.close()
        self.posix.close()
        _SETTINGS.leave(self.pool.threads, self.pool.task_bytes)


class KvikioFile(ThreadedFile):
    """A file of the kvikio backend.

    Device buffers: kvikio waits for the default stream alone, so the caller orders other streams before a
    request and after its future.
    """

    def __init__(self, backend: KvikioBackend, path: str, *, writable: bool) -> None:
        super().__init__(backend.pool, path, writable=writable)
        self._backend = backend
        posix = backend.posix.open(path, writable=writable)
        self._posix = posix.path_taken
        posix.close()
        with self._handle():
            pass

    @property
    def path_taken(self) -> TransferPath:
        return self._backend.host_path(self._posix)

    @property
    def _align_bytes(self) -> int:
        return _BLOCK_BYTES

    def _view(self, direction: Direction, buffer: Buffer) -> tuple[Any, int]:
        if hasattr(buffer, "__cuda_array_interface__"):
            view = DeviceBytes(buffer, direction, self.path)
            return view, view.nbytes
        host = host_view(direction, buffer, self.path)
        return host, host.nbytes

    def _move(self, direction: Direction, view: Any, offset: int) -> None:
        nbytes = view.nbytes
        if nbytes == 0:
            return
        with self._handle() as handle:
            start = handle.pread if direction is Direction.READ else handle.pwrite
            try:
                # One piece per call: task_size is not below the size. The view lives until get() returns.
                done = start(view, nbytes, offset, nbytes).get()
            except (OSError, RuntimeError) as error:
                failure = self._explain(direction, offset, nbytes, error)
                if failure.errno != errno.EINTR:
                    raise failure from error
                # kvikio takes an interrupted call for a failed one, and does not say how far it came.
                done = self._move_again(direction, view, offset)
        if done != nbytes:
            raise self._explain(direction, offset, nbytes, None)
        self._count(view, offset)

    def _move_again(self, direction: Direction, view: Any, offset: int) -> int:
        """The whole of an interrupted task: host memory by way of the posix backend, which goes on where a
        call was interrupted; device memory by kvikio once more.
        """
        if isinstance(view, DeviceBytes):
            with self._handle() as handle:
                start = handle.pread if direction is Direction.READ else handle.pwrite
                return int(start(view, view.nbytes, offset, view.nbytes).get())
        file = self._backend.posix.open(self.path, writable=self.writable)
        try:
            move = file.read_into if direction is Direction.READ else file.write_from
            return move(view, offset).result()
        finally:
            file.close()

    def _explain(
        self, direction: Direction, offset: int, nbytes: int, error: Exception | None
    ) -> StorageError:
        file_bytes = seam.current().stat(self.path).st_size
        if direction is Direction.READ and offset + nbytes > file_bytes:
            return end_of_file(self.path, offset, nbytes, file_bytes=file_bytes)
        if error is None:
            detail = f"kvikio moved fewer than the {nbytes} bytes asked for"
            return StorageError(direction.value, self.path, offset=offset, detail=detail)
        return _storage_error(direction.value, self.path, error, offset)

    def _count(self, view: Any, offset: int) -> None:
        if isinstance(view, DeviceBytes) and self._backend.device_path(self._posix).name == "gds":
            self._backend.counter.add(direct=view.nbytes, buffered=0)
            return
        end = offset + view.nbytes
        blocks = max(0, end // _BLOCK_BYTES - -(-offset // _BLOCK_BYTES)) if self._posix.direct else 0
        self._backend.counter.add(direct=blocks * _BLOCK_BYTES, buffered=view.nbytes - blocks * _BLOCK_BYTES)

    def _handle(self) -> AbstractContextManager[Any]:
        return self._backend.handles.borrow(self, self._open)

    def _open(self) -> Any:
        try:
            return self._backend.cufile(self.path, "r+" if self.writable else "r")
        except (OSError, RuntimeError) as error:
            raise _storage_error("opening", self.path, error, None) from error

    def _release(self) -> None:
        self._backend.handles.drop(self)


def _storage_error(action: str, path: str, error: Exception, offset: int | None) -> StorageError:
    """kvikio's errors are RuntimeErrors whose text ends in the system's words for the errno."""
    text = str(error)
    number = _ERRNO_OF_TEXT.get(text.rpartition(": ")[2])
    if number is None:
        return StorageError(action, path, offset=offset, detail=f"kvikio: {text}")
    return StorageError(action, path, OSError(number, text), offset=offset)


def _close_handle(key: KvikioFile, handle: Any) -> None:
    handle.close()


class DeviceBytes:
    """Bytes `[start, start + nbytes)` of a C-contiguous device array of any dtype; keeps the array alive.

    Source: the CUDA array interface, version 3.
    """

    def __init__(self, array: Any, direction: Direction, path: str) -> None:
        interface = array.__cuda_array_interface__
        nbytes = int(interface["typestr"][2:])
        strides: list[int] = []
        for length in reversed(interface["shape"]):
            strides.insert(0, nbytes)
            nbytes *= length
        if interface.get("strides") not in (None, tuple(strides)):
            raise InvariantError(f"{direction.value} {path}: the device array is not C-contiguous")
        self._array = array
        self._address = interface["data"][0]
        self.nbytes = nbytes

    def __getitem__(self, span: slice) -> DeviceBytes:
        start, stop, _ = span.indices(self.nbytes)
        part = DeviceBytes.__new__(DeviceBytes)
        part._array = self._array
        part._address = self._address + start
        part.nbytes = stop - start
        return part

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }
