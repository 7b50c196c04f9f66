"""What will be needed next: the schedule of page uses, and the window that prefetch may look into.

Positions count page uses from `begin_step`: the step's own `[0, n)`, then `following` over and over. Each
page consumes its positions in order, one per scheduled acquire; several threads may run at different points
of the schedule at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from tierstream.tiered.frames import Entry
from tierstream.tiered.layout import Page
from tierstream.tiered.policy import NEVER


class Schedule:
    """Page uses of a step in order and, for ever after, of the steps like `following`."""

    def __init__(self, step: Sequence[Page] = (), following: Sequence[Page] = ()) -> None:
        self._step = step
        self._following = following
        self._uses = _positions(step)
        self._later = _positions(following)
        self.pages: list[Page] = list(self._uses | self._later)
        self._own, self._length = len(step), len(step) + len(following)

    def __len__(self) -> int:
        """Positions before the schedule repeats itself."""
        return self._length

    def page_at(self, position: int) -> Page | None:
        """The page used at a position; None past the end of a schedule that nothing follows."""
        if position < self._own:
            return self._step[position]
        if not self._following:
            return None
        return self._following[(position - self._own) % len(self._following)]

    def start(self, entry: Entry) -> None:
        """Let the page begin at its first use."""
        entry.uses = self._uses.get(entry.page, ())
        entry.later = self._later.get(entry.page, ())
        entry.cursor = -1
        self.advance(entry)

    def advance(self, entry: Entry) -> None:
        """Set `entry.next_use` to the position after the present one."""
        entry.cursor += 1
        index = entry.cursor - len(entry.uses)
        if index < 0:
            entry.next_use = entry.uses[entry.cursor]
        elif entry.later:
            round_, index = divmod(index, len(entry.later))
            entry.next_use = len(self._step) + round_ * len(self._following) + entry.later[index]
        else:
            entry.next_use = NEVER


def _positions(pages: Sequence[Page]) -> dict[Page, list[int]]:
    positions: dict[Page, list[int]] = {}
    for position, page in enumerate(pages):
        positions.setdefault(page, []).append(position)
    return positions


class Window:
    """The part of the schedule that lies ahead, at most `prefetch_bytes` of page uses. Every method needs the
    store's lock.

    Args:
        prefetch_bytes: uses ahead, hits included; 0 turns prefetch off.
        lapse_uses: a position is given up as one that will not come any more (an expert without tokens, an
            update that was skipped) when this many later ones have been consumed. The uses in flight at once,
            from the oldest to the newest, have to fit in DRAM, so the number of frames is a safe value.
        lookup: the entry of a page.
    """

    def __init__(self, prefetch_bytes: int, lapse_uses: int, lookup: Callable[[Page], Entry]) -> None:
        self._limit_bytes = prefetch_bytes
        self._lapse_uses = lapse_uses
        self._lookup = lookup
        self._schedule = Schedule()
        self._head = 0
        self._scan = 0
        self._ahead_bytes = 0
        self._consumed_ahead = 0
        self._missing: list[tuple[int, Page]] = []
        self._fresh: dict[Page, int] = {}

    @property
    def active(self) -> bool:
        return self._limit_bytes > 0 and len(self._schedule) > 0

    @property
    def head(self) -> int:
        """First position whose use has not come."""
        return self._head

    @property
    def end(self) -> int:
        """First position that the window has not reached."""
        return self._scan

    @property
    def frames_wanted(self) -> int:
        """Frames to see to now: those of the window's pages that are to be read, as an upper bound, and those
        of half of its pages that begin without content.

        The latter need no frame before their use, and what is seen to early is taken from pages that might
        have stayed: until then others are used up and leave for nothing.
        """
        return len(self._missing) + len(self._fresh) // 2

    def begin(self, schedule: Schedule, entries: Iterable[Entry]) -> None:
        """Start a step. Positions of the old one that were not consumed are forgotten."""
        self._schedule = schedule
        for entry in entries:
            schedule.start(entry)
        self._head = self._scan = self._ahead_bytes = self._consumed_ahead = 0
        self._missing.clear()
        self._fresh.clear()
        self.extend()

    def consume(self, entry: Entry) -> list[Entry]:
        """The page is used: its next position is over. Returns pages whose next position was given up."""
        position = entry.next_use
        if position == NEVER:
            return []
        self._pass(entry)
        self._consumed_ahead += 1
        return self._move_head()

    def extend(self) -> None:
        """Look at further positions as far as the window allows."""
        if not self.active:
            return
        last = self._head + len(self._schedule)
        while self._scan < last:
            page = self._schedule.page_at(self._scan)
            if page is None:
                return
            entry = self._lookup(page)
            if entry.next_use <= self._scan:
                if self._ahead_bytes + entry.nbytes > self._limit_bytes:
                    return
                self._ahead_bytes += entry.nbytes
                if entry.next_use == self._scan:
                    self._scan += 1
                    self.note(entry)
                    continue
            self._scan += 1

    def note(self, entry: Entry) -> None:
        """Take account of a page that is not in DRAM."""
        if entry.frame is not None or entry.next_use >= self._scan:
            return
        if entry.stored:
            heappush(self._missing, (entry.next_use, entry.page))
        else:
            self._fresh[entry.page] = entry.next_use

    def first_missing(self) -> Entry | None:
        """The page in the window that must be read soonest."""
        missing = self._missing
        while missing:
            position, page = missing[0]
            entry = self._lookup(page)
            if entry.frame is None and entry.stored and entry.next_use == position:
                return entry
            heappop(missing)
        return None

    def _pass(self, entry: Entry) -> None:
        position = entry.next_use
        self._schedule.advance(entry)
        if position < self._scan:
            self._ahead_bytes -= entry.nbytes
        if self._fresh and self._fresh.get(entry.page) == position:
            del self._fresh[entry.page]

    def _move_head(self) -> list[Entry]:
        lapsed: list[Entry] = []
        while True:
            page = self._schedule.page_at(self._head)
            if page is None:
                return lapsed
            entry = self._lookup(page)
            if entry.next_use > self._head:
                self._consumed_ahead -= 1
            elif self._consumed_ahead > self._lapse_uses:
                self._pass(entry)
                lapsed.append(entry)
            else:
                return lapsed
            self._head += 1
