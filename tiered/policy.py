"""Which page leaves DRAM first.

A policy only ranks. `Candidates` keeps the pages that may be evicted (resident, not leased, not in transit)
in two heaps, ordered by that rank: those that would spill, and the others. Pages that were taken back stay in
the heaps as dead items and are dropped when they surface or outnumber the rest, so every operation is
O(log n) amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from tierstream.io.errors import InvariantError

#: Position of a use that is not on the schedule.
NEVER = 1 << 62
#: A page that would spill stays in place of one that is used this many times sooner. More than two, which is
#: what a write and a read cost per time: DRAM is short for as long as gradients or boundaries pile up, not
#: until their use. Not far more: weights that are not written yet would be written and read in their place.
SPILL_PATIENCE = 4

Rank = tuple[int, int, int]


class Ranked(Protocol):
    """What is ranked."""

    next_use: int
    last_use: int
    dirty: bool
    durable: bool


class Policy(Protocol):
    """The order of eviction: of two candidates the one with the smaller rank goes first."""

    name: str

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        """Rank of a candidate.

        Args:
            next_use: position of its next use in the schedule, or `NEVER`.
            last_use: number of its last use; greater is later.
            dirty: it must be written back before its frame is free.
        """
        ...

    def spills(self, page: Ranked, other: Ranked, now: int) -> bool:
        """Whether a dirty step-local page goes before another one.

        Args:
            now: position of the earliest use that has not come.
        """
        ...


class Lru:
    """Least recently used first."""

    name = "lru"

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        return (last_use, int(dirty), 0)

    def spills(self, page: Ranked, other: Ranked, now: int) -> bool:
        return page.last_use < other.last_use


class Lookahead:
    """Used furthest in the future first: L. A. Belady's MIN (IBM Systems Journal 5(2), 1966) on a known
    schedule.

    At equal distance a clean page goes first, because it leaves without a write, then the least recently
    used; pages that are not on the schedule are all equally far.

    MIN counts reads. A dirty step-local page that leaves costs a write too; one that is durable is written
    once for each change anyway, if it leaves at any time before the next. So step-local pages stay longer.
    """

    name = "lookahead"

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        return (-next_use, int(dirty), last_use)

    def spills(self, page: Ranked, other: Ranked, now: int) -> bool:
        return page.next_use - now > SPILL_PATIENCE * (other.next_use - now)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Lru(), Lookahead())}


_Item = TypeVar("_Item", bound=Ranked)


class Candidates(Generic[_Item]):
    """The pages that may be evicted, in the order of a policy. Take a page out before its rank changes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._adds = 0
        # The number of the latest `add` of each candidate: it tells a live heap item from a dead one.
        self._live: dict[_Item, int] = {}
        self._plain = _LazyHeap(self._live)
        self._spilling = _LazyHeap(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: _Item) -> bool:
        return item in self._live

    def add(self, item: _Item) -> None:
        if item in self._live:
            raise InvariantError("a page is added to the candidates for eviction twice")
        self._adds += 1
        self._live[item] = self._adds
        rank = self._policy.rank(item.next_use, item.last_use, item.dirty)
        (self._spilling if item.dirty and not item.durable else self._plain).push(rank, self._adds, item)

    def remove(self, item: _Item) -> bool:
        """Take a page out, if it is in; tells whether it was."""
        return self._live.pop(item, None) is not None

    def best(self, now: int) -> _Item | None:
        """The next victim. `now`: see `Policy.spills`."""
        other, page = self._plain.peek(), self._spilling.peek()
        if other is None or page is None:
            return other or page
        return page if self._policy.spills(page, other, now) else other


class _LazyHeap(Generic[_Item]):
    """A heap of (rank, number of the `add`, page), some of them dead."""

    def __init__(self, live: dict[_Item, int]) -> None:
        self._live = live
        self._items: list[tuple[Rank, int, _Item]] = []

    def push(self, rank: Rank, number: int, item: _Item) -> None:
        items = self._items
        if len(items) > 2 * len(self._live) + 64:
            items[:] = [entry for entry in items if self._live.get(entry[2]) == entry[1]]
            heapify(items)
        heappush(items, (rank, number, item))

    def peek(self) -> _Item | None:
        """The live item of the smallest rank."""
        items = self._items
        while items:
            if self._live.get(items[0][2]) == items[0][1]:
                return items[0][2]
            heappop(items)
        return None
