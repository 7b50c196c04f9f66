"""Requests cut into tasks, run by worker threads: what every backend has in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from tierstream.io.backend import DEFAULT_QUEUE_DEPTH, Buffer
from tierstream.io.errors import InvariantError
from tierstream.io.seam import HostBytes
from tierstream.io.transfer import Direction
from tierstream.io.watchdog import Watchdog


class _Request:
    """One future for several tasks.

    The future resolves when the *last* task has ended, also after an error: from then on nobody touches the
    buffer. The first error wins, and tasks that have not begun by then are skipped.
    """

    def __init__(self, nbytes: int, tasks: Iterable[Callable[[], None]], on_end: Callable[[], None]) -> None:
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # a running future refuses cancel(): the buffer is in use
        self.tasks = deque(tasks)
        """Those that nobody has taken."""
        self._nbytes = nbytes
        self._unfinished = len(self.tasks)
        self._on_end = on_end
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run_next(self, error: BaseException | None = None) -> bool:
        """Does the next task, or takes it for failed if there was an `error`; whether it was the last."""
        try:
            task = self.tasks.popleft()
        except IndexError:
            return False
        if self._error is None and error is None:
            try:
                task()
            except BaseException as raised:
                error = raised
        with self._lock:
            self._error = self._error or error
            self._unfinished -= 1
            return self._unfinished == 0

    def resolve(self) -> None:
        try:
            self._on_end()
        except BaseException as raised:
            self._error = self._error or raised
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._nbytes)


class TaskPool:
    """Worker threads, the rule by which requests are cut, and how many requests they work on at a time.

    Args:
        name: prefix of the threads' names.
        threads: number of worker threads.
        task_bytes: bytes moved by one task at most.
        queue_depth: requests begun and not ended at most; later ones wait for their turn.
    """

    def __init__(
        self, name: str, threads: int, task_bytes: int, queue_depth: int = DEFAULT_QUEUE_DEPTH
    ) -> None:
        if min(threads, task_bytes, queue_depth) < 1:
            raise InvariantError(f"{threads=}, {task_bytes=} and {queue_depth=} must be positive")
        self.threads = threads
        self.task_bytes = task_bytes
        self.queue_depth = queue_depth
        self.watchdog = Watchdog()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"tierstream-{name}")
        self._waiting: deque[_Request] = deque()
        self._begun = 0
        self._idle = threading.Condition()

    def submit(
        self,
        move: Callable[[int, int], None],
        offset: int,
        nbytes: int,
        *,
        align_bytes: int,
        on_end: Callable[[], None],
    ) -> Future[int]:
        """Calls `move(start, stop)` in worker threads for consecutive ranges that cover `[0, nbytes)`.

        Ranges are cut where the file offset, `offset + start`, is a multiple of `align_bytes`, so that at
        most the two ends of a request are unaligned. `on_end()` runs just before the future resolves. The
        future's result is `nbytes`.
        """
        step = max(align_bytes, self.task_bytes // align_bytes * align_bytes)
        first = offset - offset % align_bytes + step - offset
        cuts = [0, *range(first, nbytes, step), nbytes]
        tasks = [partial(move, start, stop) for start, stop in pairwise(cuts)]
        request = _Request(nbytes, tasks, on_end)
        with self._idle:
            if self._begun == self.queue_depth:
                self._waiting.append(request)
                return request.future
            self._begun += 1
        self._begin(request)
        return request.future

    def close(self) -> None:
        """Waits for the requests under way, then ends the threads."""
        with self._idle:
            self._idle.wait_for(lambda: not self._begun)
        self._executor.shutdown(wait=True)
        self.watchdog.close()

    def _begin(self, request: _Request) -> None:
        try:
            for _ in range(len(request.tasks)):
                self._executor.submit(self._run, request)
        except BaseException as error:  # an interrupt: what nobody has begun must still come to an end
            while request.tasks:
                self._run(request, error)
            raise

    def _run(self, request: _Request, error: BaseException | None = None) -> None:
        if not request.run_next(error):
            return
        # The next request begins before this one is reported: the drive does not wait for who reads that.
        with self._idle:
            following = self._waiting.popleft() if self._waiting else None
            if following is None:
                self._begun -= 1
                self._idle.notify_all()
        if following is not None:
            self._begin(following)
        request.resolve()


class ThreadedFile(ABC):
    """A file whose requests run in a `TaskPool`; backends add how a task is done, how the file is let go."""

    def __init__(self, pool: TaskPool, path: str, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self._pool = pool
        self._lock = threading.Lock()
        self._requests = 0
        self._closed = False

    def read_into(self, buffer: Buffer, offset: int) -> Future[int]:
        return self._submit(Direction.READ, buffer, offset)

    def write_from(self, buffer: Buffer, offset: int) -> Future[int]:
        if not self.writable:
            raise InvariantError(f"{self.path} was opened for reading, and is written at byte {offset}")
        return self._submit(Direction.WRITE, buffer, offset)

    def close(self) -> None:
        with self._lock:
            idle = not self._closed and self._requests == 0
            self._closed = True
        if idle:
            self._release()

    def _submit(self, direction: Direction, buffer: Buffer, offset: int) -> Future[int]:
        if offset < 0:
            raise InvariantError(f"{direction.value} {self.path}: byte offset {offset} is negative")
        view, nbytes = self._view(direction, buffer)
        with self._lock:
            if self._closed:
                raise InvariantError(f"{direction.value} {self.path}: the file is closed")
            self._requests += 1

        def move(start: int, stop: int) -> None:
            with self._pool.watchdog.watching(f"{direction.value} {self.path} at byte {offset + start}"):
                self._move(direction, view[start:stop], offset + start)

        return self._pool.submit(
            move, offset, nbytes, align_bytes=self._align_bytes, on_end=self._request_ended
        )

    def _request_ended(self) -> None:
        with self._lock:
            self._requests -= 1
            last = self._closed and self._requests == 0
        if last:
            self._release()

    @property
    @abstractmethod
    def _align_bytes(self) -> int:
        """File offsets at which requests are best cut."""

    @abstractmethod
    def _view(self, direction: Direction, buffer: Buffer) -> tuple[Any, int]:
        """The buffer as something that slices by bytes, and its size; InvariantError if it is unfit."""

    @abstractmethod
    def _move(self, direction: Direction, view: Any, offset: int) -> None:
        """One task, in a worker thread: moves the whole view or raises StorageError."""

    @abstractmethod
    def _release(self) -> None:
        """Gives back what the file holds; called once, when it is closed and no request is under way."""


def host_view(direction: Direction, buffer: Buffer, path: str) -> HostBytes:
    """`buffer` itself, after checking that it is a flat C-contiguous uint8 array, writeable for reads."""
    if not isinstance(buffer, np.ndarray):
        raise InvariantError(f"{direction.value} {path}: {type(buffer).__name__} is no array in host memory")
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise InvariantError(
            f"{direction.value} {path}: a flat C-contiguous uint8 array is wanted, not "
            f"{buffer.dtype} of shape {buffer.shape}"
        )
    if direction is Direction.READ and not buffer.flags.writeable:
        raise InvariantError(f"{direction.value} {path}: the array is read-only")
    return buffer
