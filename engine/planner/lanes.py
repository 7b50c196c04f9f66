"""Who moves pages between the store and the device, in simulated time: the threads of the uploader, of the
experts' uploader and of the downloader (`engine.device.page_copies`, `engine.device.upload`,
`engine.moe.cache`, `engine.device.download`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tierstream.engine.device.memory import IN_FLIGHT_PAGES
from tierstream.engine.device.upload import StepPlan
from tierstream.engine.moe.slots import ExpertSlots
from tierstream.engine.planner.clock import Changes, Credits, Lane, Moment, Steps
from tierstream.engine.planner.hardware import Hardware
from tierstream.engine.trace.trace import Track
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease

#: Blocks until the page of a plane may be read.
Gate = Callable[[str, str, int], Steps[None]]


class PageCopies:
    """Fills buffers on the device; one thread at a time may use it."""

    def __init__(self, hardware: Hardware, layout: Layout, gate: Gate, waits: Track, copies: Track) -> None:
        self._hardware, self._layout, self._gate = hardware, layout, gate
        self._waits, self._copies = waits, copies
        self._lane = hardware.up.lane()
        self._credits = Credits(hardware.clock, IN_FLIGHT_PAGES)

    def fill(self, unit: str, plane: str, idle: Moment | None) -> Steps[Moment]:
        """Enqueue the copy of a plane. Returns the moment at which the buffer has its content.

        Args:
            idle: the buffer may be written then; None: now.
        """
        hardware, notes, clock = self._hardware, self._hardware.notes, self._hardware.clock
        activation = plane == "activation"
        cause, intent = ("download", Intent.CONSUME) if activation else ("update", Intent.READ)
        begin_s = clock.now_s
        end, done = self._layout.spec(unit, plane).nbytes, hardware.past()
        for page in self._layout.pages(unit, plane):
            since_s = clock.now_s
            yield from self._gate(unit, plane, page.index)
            notes.waited(self._waits, cause, unit, since_s)
            since_s = clock.now_s
            yield from self._credits.take()
            notes.waited(self._waits, "copies", unit, since_s)
            since_s = clock.now_s
            lease = yield from hardware.store.acquire([(page, intent)])
            notes.waited(self._waits, "page", unit, since_s)
            size = min(self._layout.page_bytes, end - page.index * self._layout.page_bytes)
            done = self._lane.enqueue(hardware.up.seconds(size), idle)
            done.then(partial(self._give_back, lease))
            if hardware.in_host:
                yield done
        enqueued_s = begin_s, clock.now_s
        done.then(lambda: notes.worked(self._copies, plane, unit, begin_s, enqueued_s))
        return done

    def _give_back(self, lease: Lease) -> None:
        self._hardware.store.release(lease)
        self._credits.give()


@dataclass(slots=True)
class _Upload:
    """Its copy is enqueued; what reads it is enqueued; its bytes are there; they were read."""

    enqueued: Moment
    released: Moment
    ready: Moment | None = None
    idle: Moment | None = None


class Uploads:
    """The uploader's thread, step after step."""

    def __init__(self, hardware: Hardware, layout: Layout, gate: Gate) -> None:
        self._hardware = hardware
        self._copies = PageCopies(hardware, layout, gate, Track.UPLOADER, Track.UPLOAD)
        self._uploads: list[_Upload] = []

    def begin(self, plan: StepPlan) -> None:
        clock = self._hardware.clock
        self._uploads = [_Upload(clock.moment(), clock.moment()) for _ in plan.uploads]
        clock.start(self._run(plan, self._uploads))

    def take(self, index: int, unit: str, cause: str) -> Steps[Moment]:
        """The moment at which the bytes of an upload are there, once its copy is enqueued."""
        upload, since_s = self._uploads[index], self._hardware.clock.now_s
        yield upload.enqueued
        self._hardware.notes.waited(Track.HOST, cause, unit, since_s)
        assert upload.ready is not None
        return upload.ready

    def release(self, index: int) -> None:
        upload = self._uploads[index]
        upload.idle = self._hardware.compute.mark()
        upload.released.set()

    def _run(self, plan: StepPlan, uploads: Sequence[_Upload]) -> Steps[None]:
        hardware = self._hardware
        for upload, planned, own in zip(plan.uploads, plan.assignments, uploads, strict=True):
            before = None if planned.after < 0 else uploads[planned.after]
            if not planned.fetch:
                own.ready = hardware.past() if before is None else before.ready
            else:
                since_s = hardware.clock.now_s
                if before is not None:
                    yield before.released
                hardware.notes.waited(Track.UPLOADER, "slot", upload.unit, since_s)
                idle = None if before is None else before.idle
                own.ready = yield from self._copies.fill(upload.unit, upload.plane, idle)
            own.enqueued.set()


@dataclass(slots=True)
class _Times:
    ready: Moment | None = None
    idle: Moment | None = None


class ExpertUploads:
    """The experts' uploader."""

    def __init__(
        self,
        hardware: Hardware,
        layout: Layout,
        gate: Gate,
        slots: int,
        group: int,
        is_behind: Callable[[str], bool],
    ) -> None:
        self._hardware = hardware
        self._copies = PageCopies(hardware, layout, gate, Track.EXPERT_UPLOADER, Track.EXPERTS)
        self.group = group
        self.slots = ExpertSlots([_Times() for _ in range(slots)], is_behind)
        self._changes = Changes(hardware.clock, hardware.rates.wake_s)
        hardware.clock.start(self._run())

    def forget(self) -> None:
        self.slots.stop_guessing()
        self.slots.forget()

    def want(self, units: Sequence[str]) -> list[str]:
        order = self.slots.want(units)
        self._changes.tell()
        return order

    def expect(self, units: Sequence[str]) -> None:
        self.slots.expect(units)
        self._changes.tell()

    def take(self, units: Sequence[str]) -> Steps[list[Moment]]:
        """The moments at which the bytes of wanted experts are there, once their copies are enqueued."""
        since_s = self._hardware.clock.now_s
        yield from self._changes.wait_for(lambda: self.slots.filled(units))
        self._hardware.notes.waited(Track.HOST, "experts", units[0], since_s)
        slots = self.slots.filled(units)
        assert slots is not None
        return [slot.buffer.ready for slot in slots if slot.buffer.ready is not None]

    def release(self, units: Sequence[str]) -> None:
        for unit in units:
            self.slots.release(unit).buffer.idle = self._hardware.compute.mark()
        self._changes.tell()

    def _run(self) -> Steps[None]:
        while True:
            job = self.slots.next()
            if job is None:
                yield from self._changes.wait()
                continue
            unit, slot = job
            slot.buffer.ready = yield from self._copies.fill(unit, "weight", slot.buffer.idle)
            slot.filled = True
            self._changes.tell()


@dataclass(frozen=True, slots=True)
class _Download:
    unit: str
    plane: str
    ready: Moment
    stored: Callable[[Page], None]
    admit: Callable[[], Steps[None]] | None
    enqueued: Moment
    done: Moment


class Downloads:
    """The downloader's thread."""

    def __init__(self, hardware: Hardware, layout: Layout) -> None:
        self._hardware, self._layout = hardware, layout
        self._lane: Lane = hardware.down.lane()
        self._credits = Credits(hardware.clock, IN_FLIGHT_PAGES)
        self._queue: deque[_Download] = deque()
        self._changes = Changes(hardware.clock, hardware.rates.wake_s)
        hardware.clock.start(self._run())

    def submit(
        self,
        unit: str,
        plane: str,
        ready: Moment,
        stored: Callable[[Page], None] = lambda page: None,
        admit: Callable[[], Steps[None]] | None = None,
    ) -> tuple[Moment, Moment]:
        """Queue a plane. Returns when all of it is enqueued, and when it is in DRAM."""
        clock = self._hardware.clock
        job = _Download(unit, plane, ready, stored, admit, clock.moment(), clock.moment())
        self._queue.append(job)
        self._changes.tell()
        return job.enqueued, job.done

    def _run(self) -> Steps[None]:
        while True:
            yield from self._changes.wait_for(lambda: self._queue)
            yield from self._send(self._queue.popleft())

    def _send(self, job: _Download) -> Steps[None]:
        hardware, notes, clock = self._hardware, self._hardware.notes, self._hardware.clock
        begin_s, last = clock.now_s, job.ready
        end = self._layout.spec(job.unit, job.plane).nbytes
        for page in self._layout.pages(job.unit, job.plane):
            since_s = clock.now_s
            if job.admit is not None:
                yield from job.admit()
                notes.waited(Track.DOWNLOADER, "update", job.unit, since_s)
            since_s = clock.now_s
            yield from self._credits.take()
            notes.waited(Track.DOWNLOADER, "copies", job.unit, since_s)
            since_s = clock.now_s
            lease = yield from hardware.store.acquire([(page, Intent.OVERWRITE)])
            notes.waited(Track.DOWNLOADER, "page", job.unit, since_s)
            size = min(self._layout.page_bytes, end - page.index * self._layout.page_bytes)
            last = self._lane.enqueue(hardware.down.seconds(size), job.ready)
            last.then(partial(self._give_back, lease, page, job.stored))
            if hardware.in_host:
                yield last
        job.enqueued.set()
        enqueued_s = begin_s, clock.now_s
        last.then(lambda: notes.worked(Track.DOWNLOAD, job.plane, job.unit, begin_s, enqueued_s))
        last.then(job.done.set)

    def _give_back(self, lease: Lease, page: Page, stored: Callable[[Page], None]) -> None:
        self._hardware.store.release(lease)
        self._credits.give()
        stored(page)
