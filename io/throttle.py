"""A drive made slower: any backend, with a limit on its bandwidth and a latency for each request.

    backend = ThrottledBackend(open_backend(), Limits(read=2e9, write=1e9, latency_s=1e-4))

Bytes move as they did before, from and into the caller's buffer, and at once. Only their future waits until
the slower drive would have been done. When that is, `Pace` decides.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from tierstream.io.backend import Backend, Buffer, File, PathLike, TransferCounts, TransferPath
from tierstream.io.errors import InvariantError
from tierstream.io.transfer import Direction

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a drive gives at most.

    Attributes:
        read, write: bytes per second of each direction.
        total: bytes per second of both together.
        latency_s: seconds that a request takes beside the time of its bytes. Requests under way at once
            share them, so latency costs bandwidth only where few are.
    """

    read: float = math.inf
    write: float = math.inf
    total: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.read, self.write, self.total) <= 0 or not 0 <= self.latency_s < math.inf:
            raise InvariantError(f"{self} is no drive")


class _Waiting(NamedTuple, Generic[_Item]):
    submitted_s: float
    nbytes: int
    item: _Item


class Pace(Generic[_Item]):
    """When each request would be done: a token bucket for each direction and one for both. Not thread-safe.

    The buckets hold nothing: what an idle drive could have moved is lost, as it is on a real one. Requests
    of one direction are served in order of arrival, whoever made them. Where both directions wait for what
    they share, they take turns, however long their queues are. Times are those of the drive: a caller who
    looks late finds the same ends.

    Times are in seconds of any clock that does not go back.
    """

    def __init__(self, limits: Limits) -> None:
        self._latency_s = limits.latency_s
        self._rate = {Direction.READ: limits.read, Direction.WRITE: limits.write}
        self._total = limits.total
        self._free_s = dict.fromkeys(Direction, -math.inf)
        self._shared_free_s = -math.inf
        self._waiting: dict[Direction, deque[_Waiting[_Item]]] = {way: deque() for way in Direction}
        self._ends: list[tuple[float, int, _Item]] = []
        self._numbers = count()

    def submit(self, now_s: float, direction: Direction, nbytes: int, item: _Item) -> None:
        """A request arrives."""
        self._waiting[direction].append(_Waiting(now_s, nbytes, item))

    def ended(self, now_s: float) -> list[_Item]:
        """The requests that have ended since the last call, in order."""
        while (first := self._next_begin()) is not None and first[0] <= now_s:
            self._begin(*first)
        done = []
        while self._ends and self._ends[0][0] <= now_s:
            done.append(heappop(self._ends)[2])
        return done

    def next_s(self) -> float | None:
        """When to call `ended` again, if nothing arrives until then; None: never."""
        times = [first[0] for first in (self._next_begin(), *self._ends[:1]) if first is not None]
        return min(times, default=None)

    def _next_begin(self) -> tuple[float, Direction] | None:
        """When the next request is served, and its direction."""
        free_s = self._free_s
        heads = [
            (max(queue[0].submitted_s, free_s[way], self._shared_free_s), way)
            for way, queue in self._waiting.items()
            if queue
        ]
        return min(heads, default=None, key=lambda head: (head[0], free_s[head[1]]))

    def _begin(self, begin_s: float, direction: Direction) -> None:
        request = self._waiting[direction].popleft()
        self._free_s[direction] = begin_s + request.nbytes / self._rate[direction]
        self._shared_free_s = begin_s + request.nbytes / self._total
        end_s = max(self._free_s[direction], self._shared_free_s) + self._latency_s
        heappush(self._ends, (end_s, next(self._numbers), request.item))


class Clock:
    """The time, and how to wait for it. Tests have another."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Sleep until `changed` is notified, or for so long; None: as long as it takes."""
        changed.wait(seconds)


class _Request(NamedTuple):
    """A future that resolves as `inner` does, but not before its time. File and buffer live till then."""

    inner: Future[int]
    file: File
    buffer: Buffer
    future: Future[int]

    def resolve(self) -> None:
        """Its time has come."""
        future = self.future

        def ended(inner: Future[int]) -> None:
            error = inner.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(inner.result())

        self.inner.add_done_callback(ended)


class ThrottledBackend:
    """The backend `backend`, which it closes, within `limits`.

    Files are made, and ways tried, as fast as they were.
    """

    def __init__(self, backend: Backend, limits: Limits, clock: Clock | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._clock = clock or Clock()
        self._pace: Pace[_Request] = Pace(limits)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._resolve_in_time, name="tierstream-throttle", daemon=True)
        self._thread.start()

    def open(self, path: PathLike, *, writable: bool) -> File:
        return _ThrottledFile(self._backend.open(path, writable=writable), self._submit)

    def create(self, path: PathLike, nbytes: int) -> None:
        self._backend.create(path, nbytes)

    def transfer_path(self, path: PathLike, *, device: bool = False) -> TransferPath:
        return self._backend.transfer_path(path, device=device)

    def counts(self) -> TransferCounts:
        return self._backend.counts()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._backend.close()

    def _submit(self, direction: Direction, file: File, buffer: Buffer, inner: Future[int]) -> Future[int]:
        """A request of the backend has begun; the future that its caller gets."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # refuses cancel(): the buffer is in use
        request = _Request(inner, file, buffer, future)
        with self._changed:
            self._pace.submit(self._clock.now_s(), direction, buffer.nbytes, request)
            self._changed.notify()
        return future

    def _resolve_in_time(self) -> None:
        """The thread: sleeps until a request has ended, and reports it."""
        while True:
            with self._changed:
                while not (ended := self._pace.ended(self._clock.now_s())):
                    next_s = self._pace.next_s()
                    if next_s is None and self._closing:
                        return
                    self._clock.wait(self._changed, None if next_s is None else next_s - self._clock.now_s())
            for request in ended:
                request.resolve()
            del ended, request  # and the buffers that they hold


class _ThrottledFile:
    """A file of a `ThrottledBackend`."""

    def __init__(
        self, file: File, submit: Callable[[Direction, File, Buffer, Future[int]], Future[int]]
    ) -> None:
        self.path = file.path
        self._file = file
        self._submit = submit

    def read_into(self, buffer: Buffer, offset: int) -> Future[int]:
        return self._submit(Direction.READ, self._file, buffer, self._file.read_into(buffer, offset))

    def write_from(self, buffer: Buffer, offset: int) -> Future[int]:
        return self._submit(Direction.WRITE, self._file, buffer, self._file.write_from(buffer, offset))

    @property
    def path_taken(self) -> TransferPath:
        return self._file.path_taken

    def close(self) -> None:
        self._file.close()
