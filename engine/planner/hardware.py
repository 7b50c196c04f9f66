"""What a simulated step runs on: cores, lanes, links, drives, the store over them; and what is noted."""

from __future__ import annotations

import math
from collections.abc import Callable

from tierstream.engine.bound import update_bytes
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.clock import Bandwidth, Clock, Cores, Dedicated, Lane, Moment, Server, Wait
from tierstream.engine.planner.drive import SimulatedDrive
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.store import SimulatedStore
from tierstream.engine.trace.trace import Span, Track
from tierstream.io.transfer import Direction
from tierstream.tiered.layout import Page
from tierstream.tiered.policy import POLICIES

_DRIVE_TRACKS = {Direction.READ: Track.READS, Direction.WRITE: Track.WRITES}


class Notes:
    """Spans of a step, as `Trace` keeps them.

    Attributes:
        spans: that ended in the latest step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.recording = False
        self.spans: list[Span] = []

    def begin(self, *, recording: bool) -> None:
        """A step begins, of which spans are kept or not."""
        self.recording, self.spans = recording, []

    def waited(self, track: Track, cause: str, unit: str, begin_s: float) -> None:
        """Somebody has waited since then, if it was any time."""
        if self.recording and self._clock.now_s > begin_s:
            self.spans.append(Span(track, cause, unit, begin_s, self._clock.now_s, waiting=True))

    def worked(
        self,
        track: Track,
        what: str,
        unit: str,
        begin_s: float,
        enqueued_s: tuple[float, float] | None = None,
    ) -> None:
        """Work has ended that began then."""
        if self.recording:
            self.spans.append(Span(track, what, unit, begin_s, self._clock.now_s, enqueued_s=enqueued_s))

    def moved(self, direction: Direction, page: Page, nbytes: int, begin_s: float, end_s: float) -> None:
        if self.recording:
            track = _DRIVE_TRACKS[direction]
            self.spans.append(
                Span(track, track.removesuffix("s"), "", begin_s, end_s, page=page, nbytes=nbytes)
            )


class Link:
    """Between host memory and the device, shared evenly by whoever copies.

    Attributes:
        busy_s: seconds of copies. nbytes: copied.
    """

    def __init__(self, clock: Clock, rate: float, server: Callable[[], Server]) -> None:
        self._clock, self._rate, self._server = clock, rate, server
        self.busy_s, self.nbytes = 0.0, 0

    def seconds(self, nbytes: int) -> float:
        """Of a copy that has the link for itself."""
        self.nbytes += nbytes
        self.busy_s += nbytes / self._rate
        return nbytes / self._rate

    def serve(self, nbytes: int) -> Wait:
        """A copy now."""
        return self._server().serve(self.seconds(nbytes))

    def lane(self) -> Lane:
        """An ordered queue of copies."""
        return Lane(self._clock, self._server())


class Hardware:
    """A machine that a case runs on.

    Attributes:
        in_host: the device is the CPU; its lanes are plain calls, which their callers wait for.
        compute: its compute lane. up, down: links to it and back.
        kernel: where AdamW runs on the CPU, with all of its threads.
        interpreter: where Python runs.

    AdamW and what goes to the device and back share the host's memory. What drives move through it is left
    out, as what the CPU does where it is the device: they are slower by far, and it takes all cores anyway.
    """

    def __init__(self, case: Case, machine: Machine) -> None:
        self.clock = clock = Clock()
        self.notes = Notes(clock)
        self.rates = rates = machine.rates
        self.in_host = machine.gpu_bytes is None
        memory = None if self.in_host else Bandwidth(rates.host_memory)
        self.cores = cores = Cores(clock, machine.cores, memory)
        threads = case.config.optimizer.threads_of(machine.cores)
        moves = rates.update_parameters_per_s * update_bytes(case.plan, case.layout)
        self.interpreter = Lane(clock, cores.threads(1))
        self.kernel = Lane(clock, cores.threads(threads, moves))
        self.compute = Lane(clock, cores.threads(machine.cores) if self.in_host else Dedicated())
        if self.in_host:
            self.up, self.down = (Link(clock, rates.host_copy, lambda: cores.threads(1)) for _ in range(2))
        else:
            upload = rates.upload or math.inf
            self.up = _shared_link(clock, upload, memory)
            self.down = _shared_link(clock, rates.download or upload, memory)
        names = case.config.tiers.nvme_dirs or []
        self.drives = [SimulatedDrive(clock, drive) for drive in machine.drives_of(names)]
        plan = case.plan
        self.store = SimulatedStore(
            clock, case.layout, self.drives, POLICIES[case.plan.policy], dram_bytes=plan.dram_bytes,
            prefetch_bytes=plan.prefetch_bytes, writeback_bytes=plan.writeback_bytes,
            interpreter=self.interpreter, page_s=rates.page_s * case.grain, wake_s=rates.wake_s,
            watch=self.notes.moved,
        )  # fmt: skip

    def past(self) -> Moment:
        """A moment that is over."""
        moment = self.clock.moment()
        moment.set()
        return moment


def _shared_link(clock: Clock, rate: float, memory: Bandwidth | None) -> Link:
    link = Cores(clock, 1, memory)
    return Link(clock, rate, lambda: link.threads(1, rate))
