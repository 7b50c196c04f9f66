"""Which page leaves DRAM first.

A policy only ranks. `Candidates` keeps the pages that may be evicted (resident, not leased, not in transit) in two heaps, clean
and dirty, ordered by that rank; entries of pages that were taken back are dropped when they surface, so every operation is
O(log n) amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Page

#: Position of a use that is not on the schedule.
NEVER = 1 << 62

Rank = tuple[int, int, int]


class Policy(Protocol):
    """The order of eviction: of two candidates the one with the smaller rank goes first."""

    name: str

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        """Rank of a candidate; ranks of the same page clean and dirty must differ.

        Args:
            next_use: position of its next use in the schedule, or `NEVER`.
            last_use: number of its last use; greater is later.
            dirty: it must be written back before its frame is free.
        """
        ...


class Lru:
    """Least recently used first."""

    name = "lru"

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        return (last_use, int(dirty), 0)


class Lookahead:
    """Used furthest in the future first: L. A. Belady's MIN (IBM Systems Journal 5(2), 1966) on the known schedule.

    At equal distance a clean page goes first, because it leaves without a write, then the least recently used; pages that
    are not on the schedule are all equally far.
    """

    name = "lookahead"

    def rank(self, next_use: int, last_use: int, dirty: bool) -> Rank:
        return (-next_use, int(dirty), last_use)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Lru(), Lookahead())}


class Candidates:
    """The pages that may be evicted, in the order of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._live: dict[Page, Rank] = {}
        self._clean = _LazyHeap(self._live)
        self._dirty = _LazyHeap(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, page: Page) -> bool:
        return page in self._live

    def add(self, page: Page, next_use: int, last_use: int, dirty: bool) -> None:
        """Add a page; `remove` it before its rank changes."""
        if page in self._live:
            raise InvariantError(f"{page} is a candidate for eviction already")
        rank = self._policy.rank(next_use, last_use, dirty)
        self._live[page] = rank
        (self._dirty if dirty else self._clean).push(rank, page)

    def remove(self, page: Page) -> bool:
        """Take a page out, if it is in; tells whether it was."""
        return self._live.pop(page, None) is not None

    def clear(self) -> None:
        self._live.clear()
        self._clean.items.clear()
        self._dirty.items.clear()

    def best(self) -> tuple[Page, bool] | None:
        """The next victim and whether it is dirty; None without candidates."""
        clean, dirty = self._clean.peek(), self._dirty.peek()
        if clean is None:
            return None if dirty is None else (dirty[1], True)
        if dirty is None or clean < dirty:
            return clean[1], False
        return dirty[1], True

    def best_dirty(self) -> Page | None:
        """The dirty page that would be evicted first."""
        dirty = self._dirty.peek()
        return None if dirty is None else dirty[1]


class _LazyHeap:
    """A heap of (rank, page) whose dead items (rank differs from `live`) are dropped when they surface or outnumber the rest."""

    def __init__(self, live: dict[Page, Rank]) -> None:
        self._live = live
        self.items: list[tuple[Rank, Page]] = []

    def push(self, rank: Rank, page: Page) -> None:
        if len(self.items) > 2 * len(self._live) + 64:
            self.items[:] = [item for item in set(self.items) if self._live.get(item[1]) == item[0]]
            heapify(self.items)
        heappush(self.items, (rank, page))

    def peek(self) -> tuple[Rank, Page] | None:
        items = self.items
        while items:
            item = items[0]
            if self._live.get(item[1]) == item[0]:
                return item
            heappop(items)
        return None
