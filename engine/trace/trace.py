"""Who did what when in a step: spans of every lane and thread, of pages on their way, and of every wait.

There is one `Trace` per run. It always counts what the computation waits for (`stall`, cheap); while
`recording` it also keeps a span for each piece of work and each wait. What is off costs a call: `span`,
`wait` and `on_lane` then give back one shared object that does nothing.

Work of a lane is timed where it happens: a stamp goes into the queue before it and one behind it. On CUDA
these are timing events, read when the step has ended, so the host waits for nothing more than without a
trace; on the CPU they are readings of the host's clock. The clock of the device is brought to the host's by a
stamp of an idle lane at the begin of each step; the stamps are read when the trace ends.

`file` writes the spans for a viewer, `summary` says what the lane `compute` waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstream.tiered.layout import Page
from tierstream.tiered.store import Directory

if TYPE_CHECKING:
    from tierstream.engine.device.device import Lane, Stamp


class Track(StrEnum):
    """Where something happens; in the order in which a viewer shows it."""

    STEPS = "steps"
    COMPUTE = "compute"
    UPLOAD = "upload"
    EXPERTS = "expert upload"
    DOWNLOAD = "download"
    HOST = "compute host"
    UPDATER = "updater"
    SECOND_UPDATER = "updater 2"
    DEVICE_UPDATER = "device updater"
    DEVICE_UPDATES = "device updates"
    UPLOADER = "uploader"
    EXPERT_UPLOADER = "expert uploader"
    DOWNLOADER = "downloader"
    READS = "nvme reads"
    WRITES = "nvme writes"

    @property
    def overlaps(self) -> bool:
        """Several spans may be under way at once."""
        return self in (Track.READS, Track.WRITES, Track.DEVICE_UPDATES)


class Span(NamedTuple):
    """Something that took from `begin_s` to `end_s` on the host's clock (time.perf_counter, seconds)."""

    track: Track
    what: str
    """The work, or the cause of a wait."""
    unit: str
    begin_s: float
    end_s: float
    waiting: bool = False
    enqueued_s: tuple[float, float] | None = None
    """When the host began and ended to enqueue the work of a lane."""
    page: Page | None = None
    nbytes: int = 0

    @property
    def name(self) -> str:
        what = f"wait for {self.what}" if self.waiting else self.what
        return what if self.unit in ("", self.what) else f"{what} {self.unit}"


class _Reference(NamedTuple):
    """A stamp whose time on the host's clock is known."""

    stamp: Stamp
    time_s: float


class _LaneWork(NamedTuple):
    """Work of a lane whose stamps cannot be read yet."""

    lane: Lane
    track: Track
    what: str
    unit: str
    stamps: tuple[Stamp, Stamp]
    enqueued_s: tuple[float, float]
    reference: _Reference


class Trace:
    """Spans of a run. Every method may be called from any thread.

    Attributes:
        recording: spans are kept; changed between steps only.
        spans: those that have ended so far.
    """

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self._step = 0
        self._lane_work: list[_LaneWork] = []
        self._reference: _Reference | None = None
        self._lock = threading.Lock()
        self._stall_s: dict[str, float] = {}

    def start(self, next_step: int) -> None:
        """Record from now on; `next_step` is the number of the step that comes."""
        self.recording, self._step, self.spans = True, next_step, []
        self._lane_work, self._reference = [], None

    def stop(self) -> list[Span]:
        """Record no more; the spans that have ended, in no particular order. Waits for the lanes."""
        self.recording = False
        work, self._lane_work = self._lane_work, []
        for last in {id(item.lane): item.stamps[-1] for item in work}.values():
            last.wait()  # a lane works in order
        self.spans += [_resolved(item) for item in work]
        spans, self.spans = self.spans, []
        return spans

    def span(self, track: Track, what: str, unit: str = "") -> AbstractContextManager[None]:
        """The calling thread works on something, for the time of the block."""
        return _HostSpan(self, track, what, unit, False) if self.recording else _NOTHING

    def wait(self, track: Track, cause: str, unit: str = "") -> AbstractContextManager[None]:
        """The calling thread waits for `cause`, for the time of the block."""
        return _HostSpan(self, track, cause, unit, True) if self.recording else _NOTHING

    def stall(self, cause: str, unit: str = "") -> AbstractContextManager[None]:
        """The thread that computes waits: a `wait` of `Track.HOST` that is also counted, trace or not."""
        return _Stall(self, Track.HOST, cause, unit, True)

    def take_stalls(self) -> dict[str, float]:
        """Seconds stalled since the last call, by cause."""
        with self._lock:
            seconds, self._stall_s = self._stall_s, {}
        return seconds

    def on_lane(self, track: Track, lane: Lane, what: str, unit: str) -> AbstractContextManager[None]:
        """What the block enqueues on `lane`, timed on the lane."""
        if not self.recording or self._reference is None:
            return _NOTHING
        return _LaneSpan(self, self._reference, lane, (track, what, unit))

    @contextmanager
    def step(self, lane: Lane) -> Iterator[None]:
        """One step, from an idle compute lane until its verdict.

        Args:
            lane: one with nothing to do, for the host waits for its stamp.
        """
        if not self.recording:
            yield
            return
        before = time.perf_counter()
        stamp = lane.stamp()
        stamp.wait()
        begin = time.perf_counter()
        self._reference = _Reference(stamp, (before + begin) / 2)
        yield
        self.spans.append(Span(Track.STEPS, "step", str(self._step), begin, time.perf_counter()))
        self._step += 1


def _resolved(work: _LaneWork) -> Span:
    """The span of a lane's work that is done, on the host's clock."""
    reference = work.reference
    begin_s, end_s = (reference.time_s + stamp.seconds_since(reference.stamp) for stamp in work.stamps)
    return Span(work.track, work.what, work.unit, begin_s, end_s, enqueued_s=work.enqueued_s)


class _Nothing:
    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


_NOTHING = _Nothing()


class _HostSpan:
    __slots__ = ("_begin_s", "_labels", "_trace")

    def __init__(self, trace: Trace, *labels: Any) -> None:
        self._trace, self._labels = trace, labels

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        track, what, unit, waiting = self._labels
        self._trace.spans.append(Span(track, what, unit, self._begin_s, time.perf_counter(), waiting))


class _Stall(_HostSpan):
    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        end, trace = time.perf_counter(), self._trace
        track, cause, unit, waiting = self._labels
        with trace._lock:
            trace._stall_s[cause] = trace._stall_s.get(cause, 0.0) + end - self._begin_s
        if trace.recording:
            trace.spans.append(Span(track, cause, unit, self._begin_s, end, waiting))


class _LaneSpan:
    __slots__ = ("_begin_s", "_labels", "_lane", "_reference", "_stamp", "_trace")

    def __init__(
        self, trace: Trace, reference: _Reference, lane: Lane, labels: tuple[Track, str, str]
    ) -> None:
        self._trace, self._reference, self._lane, self._labels = trace, reference, lane, labels

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()
        self._stamp = self._lane.stamp()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the device may be in any state
            stamps = self._stamp, self._lane.stamp()
            enqueued = self._begin_s, time.perf_counter()
            work = _LaneWork(self._lane, *self._labels, stamps, enqueued, self._reference)
            self._trace._lane_work.append(work)


class TracedDirectory:
    """A store's directory, with a span for every page that it reads or writes while the trace records."""

    def __init__(self, directory: Directory, trace: Trace) -> None:
        self._directory, self._trace = directory, trace

    def read(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        return self._follow(Track.READS, self._directory.read, page, frame)

    def write(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        return self._follow(Track.WRITES, self._directory.write, page, frame)

    def close(self) -> None:
        self._directory.close()

    def _follow(
        self,
        track: Track,
        move: Callable[[Page, NDArray[np.uint8]], Future[int]],
        page: Page,
        frame: NDArray[np.uint8],
    ) -> Future[int]:
        if not self._trace.recording:
            return move(page, frame)
        begin, what, nbytes = time.perf_counter(), track.removesuffix("s"), frame.nbytes
        future = move(page, frame)

        def ended(_: Future[int]) -> None:
            self._trace.spans.append(
                Span(track, what, "", begin, time.perf_counter(), page=page, nbytes=nbytes)
            )

        future.add_done_callback(ended)
        return future
