"""Recorded uses of pages, and what they cost: under the store's own rules, and at best.

`RecordingStore` keeps what the callers of a real store do. `replay` lets a `Cache`, the state machine of that
store, serve them again, with any number of frames and any policy, without content, threads or drives: every
transfer ends as soon as it has begun. `fewest_reads` is the exact optimum of the same uses.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tierstream.io.errors import BudgetError
from tierstream.tiered.arena import Arena
from tierstream.tiered.cache import Cache
from tierstream.tiered.frames import Frame
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import Policy
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import StoreStats
from tierstream.tiered.store import Store
from tierstream.tiered.transfers import Kind, Transfer


class Begin(NamedTuple):
    """A step begins; see `Store.begin_step`."""

    schedule: Sequence[Page]
    following: Sequence[Page]


class Acquire(NamedTuple):
    """Pages are leased, under a number of its own."""

    number: int
    uses: Sequence[tuple[Page, Intent]]
    scheduled: bool


class Release(NamedTuple):
    """The lease of that number is given back."""

    number: int


class Discard(NamedTuple):
    """Step-local pages lose their content."""

    pages: Sequence[Page]


Event: TypeAlias = Begin | Acquire | Release | Discard


@dataclass(frozen=True, slots=True)
class Moved:
    """How often each page was read and written."""

    reads: Counter[Page] = field(default_factory=Counter)
    writes: Counter[Page] = field(default_factory=Counter)

    def add(self, transfer: Transfer) -> None:
        (self.writes if transfer.kind is Kind.WRITE else self.reads)[transfer.entry.page] += 1


class RecordingStore(Store):
    """A store that keeps what its callers do. Its durable pages have content when the record begins.

    A lease is recorded as begun once its caller has it, and as ended before it is given back. So the record
    is an order in which one thread could have done it all.

    Attributes:
        events: so far; may be cleared while nobody holds a lease.
        moved: what the store itself has moved.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.events: list[Event] = []
        self.moved = Moved()
        self._numbers = count()
        self._number_of: dict[Lease, int] = {}
        super().__init__(*args, **options)

    def acquire(self, uses: Sequence[tuple[Page, Intent]], *, scheduled: bool = True) -> Lease:
        lease = super().acquire(uses, scheduled=scheduled)
        number = self._number_of[lease] = next(self._numbers)
        self.events.append(Acquire(number, tuple(uses), scheduled))
        return lease

    def release(self, lease: Lease) -> None:
        self.events.append(Release(self._number_of.pop(lease)))
        super().release(lease)

    def discard(self, pages: Iterable[Page]) -> None:
        chosen = tuple(pages)
        self.events.append(Discard(chosen))
        super().discard(chosen)

    def begin_step(self, schedule: Sequence[Page], following: Sequence[Page]) -> None:
        self.events.append(Begin(tuple(schedule), tuple(following)))
        super().begin_step(schedule, following)

    def _issue(self, transfer: Transfer) -> None:
        self.moved.add(transfer)
        super()._issue(transfer)


def ending(events: Sequence[Event]) -> list[Event]:
    """The same, and the last step knows that it is the last."""
    last = max((at for at, event in enumerate(events) if isinstance(event, Begin)), default=None)
    return [
        event._replace(following=()) if at == last and isinstance(event, Begin) else event
        for at, event in enumerate(events)
    ]


def foreseen(events: Sequence[Event]) -> list[Event]:
    """The same uses, with schedules that say what really comes, to the end: what a policy does that is not
    misled.
    """
    coming: list[Page] = []
    made: list[Event] = []
    for event in reversed(events):
        if isinstance(event, Acquire) and event.scheduled:
            coming += [page for page, _ in reversed(event.uses)]
        made.append(Begin(coming[::-1], ()) if isinstance(event, Begin) else event)
    return made[::-1]


class _FramesWithoutMemory:
    """Frames of which only the number is of interest."""

    private = False

    def __init__(self, frames: int) -> None:
        self.arena, self.count, self.available = Arena([]), frames, frames
        self._frame: Frame = np.empty(0, np.uint8)

    def take(self, page: Page) -> Frame | None:
        if not self.available:
            return None
        self.available -= 1
        return self._frame

    def give(self, frame: Frame) -> None:
        self.available += 1


class _Replay:
    """A cache and the leases that are held of it; a caller for all of them."""

    def __init__(
        self, layout: Layout, frames: int, policy: Policy, prefetch_bytes: int, writeback_bytes: int
    ) -> None:
        self.moved = Moved()
        self._transfers: deque[Transfer] = deque()
        self._leases: dict[int, Lease] = {}
        self._cache = Cache(
            layout,
            _FramesWithoutMemory(frames),
            policy,
            prefetch_bytes=prefetch_bytes,
            writeback_bytes=writeback_bytes,
            debug=False,
            stats=StoreStats(),
            issue=self._transfers.append,
        )
        for key, spec in layout.planes.items():
            for page in layout.pages(*key) if spec.durable else ():
                self._cache.entry(page).stored = True

    def serve(self, event: Event) -> None:
        cache = self._cache
        match event:
            case Begin():
                cache.begin(Schedule(event.schedule, event.following))
            case Acquire(number, uses, scheduled):
                pages, intents = [page for page, _ in uses], [intent for _, intent in uses]
                lease = Lease(self, pages, [cache.entry(page) for page in pages], intents, scheduled)
                self._leases[number] = lease
                cache.submit(lease)
            case Release(number):
                self.release(self._leases.pop(number))
            case Discard(pages):
                cache.discard([cache.entry(page) for page in pages])
        self._end_transfers()
        if isinstance(event, Acquire):
            self._take(lease)

    def release(self, lease: Lease) -> None:
        self._cache.release(lease)

    def _take(self, lease: Lease) -> None:
        for entry in lease.zeroes:
            self._cache.filled(entry)
        self._end_transfers()
        if lease.error is not None:
            raise lease.error
        if not lease.granted or lease.unfilled:
            raise BudgetError(f"too few frames for the leases that were held at once: {lease.pages} wait")

    def _end_transfers(self) -> None:
        while self._transfers:
            transfer = self._transfers.popleft()
            self.moved.add(transfer)
            self._cache.complete(transfer)


def replay(
    layout: Layout,
    events: Iterable[Event],
    *,
    frames: int,
    policy: Policy,
    prefetch_bytes: int,
    writeback_bytes: int,
) -> Moved:
    """What the store would move, from no page in DRAM, if drives took no time.

    Args:
        layout: of the recorded store.
        frames: of `layout.page_bytes`. policy, prefetch_bytes, writeback_bytes: see `Store`.

    Raises:
        BudgetError: leases were held at once that take more frames.
    """
    served = _Replay(layout, frames, policy, prefetch_bytes, writeback_bytes)
    for event in events:
        served.serve(event)
    return served.moved


class Gap(NamedTuple):
    """From the end of a page's lease to its next one. Whoever keeps the page in DRAM spares a read then.

    Attributes:
        begin, end: as positions of acquires: that before which it began, and that which ends it.
        version: of the page's content, which is on the drive only once it was written there; None: it is.
    """

    begin: int
    end: int
    version: int | None


@dataclass(slots=True)
class Demand:
    """What any way of serving the uses has to live with.

    Attributes:
        leased: after each acquire, pages that are leased, each of which has a frame.
        first_reads: uses of durable pages that were in no frame before.
        gaps: those of pages whose content is read afterwards, by their end.
        unread: of the others those whose content is on no drive, until the end of the record.
    """

    leased: list[int] = field(default_factory=list)
    first_reads: int = 0
    gaps: list[Gap] = field(default_factory=list)
    unread: list[Gap] = field(default_factory=list)


def demand(layout: Layout, events: Iterable[Event]) -> Demand:
    """The gaps between the recorded leases."""
    found, versions = Demand(), count()
    held: dict[int, Acquire] = {}
    holders: Counter[Page] = Counter()
    resting: dict[Page, int] = {}
    version_of: dict[Page, int | None] = {}
    for event in events:
        if isinstance(event, Acquire):
            held[event.number] = event
            position = len(found.leased)
            for page, intent in event.uses:
                begin = resting.pop(page, None)
                if begin is not None and intent is not Intent.OVERWRITE:
                    found.gaps.append(Gap(begin, position, version_of[page]))
                elif page not in version_of and layout.spec(page.unit, page.plane).durable:
                    found.first_reads += intent is not Intent.OVERWRITE
                    version_of[page] = None
                holders[page] += 1
            found.leased.append(len(holders))
        elif isinstance(event, Release):
            for page, intent in held.pop(event.number).uses:
                if intent in (Intent.UPDATE, Intent.OVERWRITE):
                    version_of[page] = next(versions)
                holders[page] -= 1
                if not holders[page]:
                    del holders[page]
                    if intent is not Intent.CONSUME:
                        resting[page] = len(found.leased) - 1
        elif isinstance(event, Discard):
            for page in event.pages:
                resting.pop(page, None)
    end = len(found.leased)
    rests = (Gap(begin, end, version_of[page]) for page, begin in resting.items())
    found.unread = [gap for gap in rests if gap.version is not None]
    return found


def fewest_reads(found: Demand, frames: int) -> int:
    """The least number of reads: where a frame is short, the page goes whose next lease is furthest, whatever
    a write of it costs.

    L. A. Belady's MIN (IBM Systems Journal 5(2), 1966), with leases that take more than an instant: of the
    gaps that are open at an acquire, no more can be kept than there are frames beside the leased pages. Of
    gaps that are open together, the one that ends last is in the way of all that the others are.

    Raises:
        BudgetError: leases were held at once that take more frames.
    """
    beginning: dict[int, list[int]] = {}
    for gap in found.gaps:
        beginning.setdefault(gap.begin, []).append(gap.end)
    latest: list[int] = []  # ends of the gaps that are kept, the last first
    ending: Counter[int] = Counter()
    kept, dropped = 0, 0
    for position, leased in enumerate(found.leased):
        if leased > frames:
            raise BudgetError(f"{leased} pages were leased at once, and there are {frames} frames")
        for end in beginning.get(position - 1, ()):
            heappush(latest, -end)
            ending[end] += 1
            kept += 1
        kept -= ending.pop(position, 0)
        while kept > frames - leased:
            ending[-heappop(latest)] -= 1
            kept -= 1
            dropped += 1
    return found.first_reads + dropped
