"""The store in simulated time: the state machine of the real one (`tierstream.tiered.cache`), frames without
memory, and drives that move nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierstream.engine.planner.clock import Clock, Lane, Steps
from tierstream.engine.planner.drive import SimulatedDrive
from tierstream.io.spread import Root, Spread
from tierstream.io.transfer import Direction
from tierstream.tiered.arena import Arena
from tierstream.tiered.cache import Cache
from tierstream.tiered.frames import Frame
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import Policy
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import StoreStats
from tierstream.tiered.transfers import Kind, Transfer

_EMPTY: Frame = np.empty(0, np.uint8)
_ROOM_BYTES = 1 << 62


class _Frames:
    """Frames of which only the number is of interest."""

    private = False

    def __init__(self, frames: int) -> None:
        self.arena, self.count, self.available = Arena([]), frames, frames

    def take(self, page: Page) -> Frame | None:
        if not self.available:
            return None
        self.available -= 1
        return _EMPTY

    def give(self, frame: Frame) -> None:
        self.available += 1


class _Waking:
    """In place of the event that a thread sleeps on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.moment = clock.moment()

    def set(self) -> None:
        woken, self.moment = self.moment, self._clock.moment()
        woken.set()


class SimulatedStore:
    """Leases of pages, as `Store` gives them, whose durable pages all have content.

    Args:
        drives: none where DRAM is home to every page.
        policy: ranks the pages to evict.
        interpreter: where the Python of page uses and transfers runs.
        page_s: what that takes for a page. wake_s: what a thread takes to wake up.
        watch: is told of each transfer's direction, page, bytes, begin and end.
    """

    def __init__(
        self,
        clock: Clock,
        layout: Layout,
        drives: Sequence[SimulatedDrive],
        policy: Policy,
        *,
        dram_bytes: int,
        prefetch_bytes: int,
        writeback_bytes: int,
        interpreter: Lane,
        page_s: float,
        wake_s: float,
        watch: Callable[[Direction, Page, int, float, float], None],
    ) -> None:
        self._clock, self._interpreter, self._watch = clock, interpreter, watch
        self._page_s, self._wake_s = page_s, wake_s
        self._drives = drives
        self.stats = StoreStats()
        pages = {page: layout.page_nbytes(page) for key in layout.planes for page in layout.pages(*key)}
        self._drive_of = _spread(drives, pages) if drives else {}
        frames = min(dram_bytes // layout.page_bytes, len(pages)) if drives else len(pages)
        pool = _Frames(frames)
        self._cache = Cache(
            layout,
            pool,
            policy if drives else None,
            prefetch_bytes=prefetch_bytes,
            writeback_bytes=writeback_bytes,
            debug=False,
            stats=self.stats,
            issue=self._issue,
        )
        for key, spec in layout.planes.items():
            for page in layout.pages(*key) if spec.durable else ():
                entry = self._cache.entry(page)
                entry.stored = True
                if not drives and pool.take(page) is not None:
                    entry.bind(_EMPTY, filling=False)

    def begin_step(self, schedule: Sequence[Page], following: Sequence[Page]) -> None:
        if self._drives:
            self._cache.begin(Schedule(schedule, following))

    def acquire(self, uses: Sequence[tuple[Page, Intent]]) -> Steps[Lease]:
        yield self._interpreter.enqueue(self._page_s * len(uses))
        entry = self._cache.entry
        lease = Lease(
            self, [page for page, _ in uses], [entry(page) for page, _ in uses],
            [intent for _, intent in uses], True,
        )  # fmt: skip
        self._cache.submit(lease)
        if not lease.granted or lease.unfilled:
            lease.event = waking = _Waking(self._clock)  # type: ignore[assignment]
            while not lease.granted or lease.unfilled:
                if lease.error is not None:
                    raise lease.error
                yield waking.moment
                yield self._wake_s
        return lease

    def release(self, lease: Lease) -> None:
        self._cache.release(lease)

    def _issue(self, transfer: Transfer) -> None:
        direction = Direction.WRITE if transfer.kind is Kind.WRITE else Direction.READ
        begin_s, entry = self._clock.now_s, transfer.entry

        def ended() -> None:
            self._watch(direction, entry.page, entry.nbytes, begin_s, self._clock.now_s)
            self._cache.complete(transfer)

        def begun() -> None:
            self._drive_of[entry.page].move(direction, entry.nbytes).then(ended)

        def woken() -> None:  # the thread that starts transfers
            self._interpreter.enqueue(self._page_s).then(begun)

        self._clock.after(self._wake_s, woken)


def _spread(drives: Sequence[SimulatedDrive], pages: Mapping[Page, int]) -> dict[Page, SimulatedDrive]:
    roots = [
        Root(directory=d.rates.directory, weight=d.rates.weight, capacity_bytes=_ROOM_BYTES, volume=index)
        for index, d in enumerate(drives)
    ]
    spread = Spread(roots, pages.items())
    return {page: drives[spread.index_of(page)] for page in pages}
