"""Who updates granules, in simulated time: the threads of `engine.update.update`, in the order that the run
itself keeps (`engine.update.order`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstream.engine.planner.case import Case
from tierstream.engine.planner.clock import Changes, Credits, Steps
from tierstream.engine.planner.hardware import Hardware
from tierstream.engine.trace.trace import Track
from tierstream.engine.update.granules import DEVICE_GRANULES, Granule
from tierstream.engine.update.optimizer import Verdict, unconditional
from tierstream.engine.update.order import UNITS_AHEAD, Taken, UpdateOrder, Work
from tierstream.tiered.layout import Page
from tierstream.tiered.lease import Intent, Lease

_CPU_WORKERS = (Track.UPDATER, Track.SECOND_UPDATER)
#: Bytes of the device's memory for each parameter that is updated there: a split master, an fp32 gradient.
_DEVICE_BYTES = 28


class Updates:
    """Workers over one order of granules."""

    def __init__(self, hardware: Hardware, case: Case) -> None:
        self._hardware, self._case, self._script = hardware, case, case.script
        self._layout, self._config = case.layout, case.config.optimizer
        self.order = UpdateOrder(
            self._script.granules.own, self._script.gradient_pages(on_drives=bool(hardware.drives))
        )
        self._verdict: Verdict = unconditional(self._config, 0, 1)
        self._work, self._progress = (Changes(hardware.clock, hardware.rates.wake_s) for _ in range(2))
        self._on_device = Credits(hardware.clock, DEVICE_GRANULES)
        if self._script.streamed and case.plan.cpu_updates:
            for track in _CPU_WORKERS:
                hardware.clock.start(self._cpu_worker(track))
        if self._script.streamed and case.plan.gpu_updates:
            hardware.clock.start(self._device_worker())

    def admit(self) -> Steps[None]:
        yield from self._progress.wait_for(lambda: self.order.has_room)
        self.order.admit()

    def stored(self, page: Page) -> None:
        self.order.stored(page)
        self._work.tell()

    def begin(self, works: Mapping[str, Work], *, unlimited: bool) -> None:
        self.order.decide(works, ahead=None if unlimited else UNITS_AHEAD)
        self._work.tell()

    def begin_first(self, works: Mapping[str, Work]) -> None:
        self.order.decide_first(works)
        self._work.tell()

    def work(self, unit: str) -> Work:
        """One update of a unit, with its gradient."""
        return Work(self._script.granules.own[unit], (self._verdict,))

    def idle_work(self, unit: str, updates: int) -> Work:
        """So many updates of a unit whose gradient is zero."""
        return Work(self._script.granules.idle[unit], (self._verdict,) * updates)

    def wait(self, unit: str, granule: int) -> Steps[None]:
        """Until the pending update of a granule, if any, is finished; lets updates run further ahead."""
        if self.order.ask(unit):
            self._work.tell()
        yield from self._progress.wait_for(lambda: not self.order.is_due(unit, granule))

    def finish(self, units: Sequence[str] | None = None) -> Steps[None]:
        """Until no update of these units is left; None: of any."""
        if self.order.any_due(units):
            self.order.ask_all()
            self._work.tell()
        yield from self._progress.wait_for(lambda: not self.order.any_due(units))

    def _cpu_worker(self, track: Track) -> Steps[None]:
        hardware, notes = self._hardware, self._hardware.notes
        while True:
            granule, verdicts = yield from self._take(track)
            since_s = hardware.clock.now_s
            lease = yield from hardware.store.acquire(granule.uses)
            notes.waited(track, "page", granule.unit, since_s)
            begin_s = hardware.clock.now_s
            numel = self._numel(granule) * len(verdicts)
            yield hardware.kernel.enqueue(numel / hardware.rates.update_parameters_per_s)
            notes.worked(track, "adamw", granule.unit, begin_s)
            self._finished(granule, lease)

    def _device_worker(self) -> Steps[None]:
        hardware, notes, track = self._hardware, self._hardware.notes, Track.DEVICE_UPDATER
        last_first = self._case.plan.cpu_updates
        while True:
            granule, _ = yield from self._take(track, last_first=last_first)
            since_s = hardware.clock.now_s
            yield from self._on_device.take()
            notes.waited(track, "copies", granule.unit, since_s)
            since_s = hardware.clock.now_s
            lease = yield from hardware.store.acquire(granule.uses)
            notes.waited(track, "page", granule.unit, since_s)
            begin_s = hardware.clock.now_s
            for page, _ in granule.uses:
                yield hardware.up.serve(self._layout.page_nbytes(page))
            notes.worked(track, "adamw", granule.unit, begin_s)
            hardware.clock.start(self._leave_device(granule, lease, begin_s))

    def _leave_device(self, granule: Granule, lease: Lease, begin_s: float) -> Steps[None]:
        hardware = self._hardware
        yield self._numel(granule) * _DEVICE_BYTES / hardware.rates.device_memory
        for page, intent in granule.uses:
            if intent is Intent.UPDATE:
                yield hardware.down.serve(self._layout.page_nbytes(page))
        hardware.notes.worked(Track.DEVICE_UPDATES, "adamw", granule.unit, begin_s)
        self._on_device.give()
        self._finished(granule, lease)

    def _take(self, track: Track, *, last_first: bool = False) -> Steps[Taken]:
        since_s, order = self._hardware.clock.now_s, self.order
        while (taken := order.last() if last_first else order.next()) is None:
            yield from self._work.wait()
        self._hardware.notes.waited(track, "work", "", since_s)
        return taken

    def _finished(self, granule: Granule, lease: Lease) -> None:
        self._hardware.store.release(lease)
        self.order.finished(granule)
        self._progress.tell()

    def _numel(self, granule: Granule) -> int:
        start, end = self._layout.page_span(Page(granule.unit, "weight", granule.index))
        return end - start
