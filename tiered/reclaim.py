"""Where frames come from: the free ones, and those of the pages that the policy gives up.

Victims are chosen in the order of the policy, as many as frames are wanted, and leave in that order as frames
are taken; dirty ones are written back in between. So write-back runs ahead of need, a victim that was written
leaves even if the policy would by then prefer another one, unless it is used again, and a page that can stay
in DRAM until it changes again is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tierstream.tiered.arena import POISON
from tierstream.tiered.frames import Entry, Frame, FramePool
from tierstream.tiered.policy import Candidates, Policy
from tierstream.tiered.stats import StoreStats


class Reclaimer:
    """Frames, candidates for eviction, and write-backs under way. Every method needs the store's lock.

    Args:
        pool: the frames.
        policy: ranks the candidates; None where no page ever leaves DRAM.
        writeback_bytes: write-backs in flight at most (one page is always allowed).
        debug: fill freed frames with NaN.
        stats: counters to keep.
        write: starts a write-back; must not block.
        gone: told of every page that loses its frame.
        now: position of the earliest use that has not come.
    """

    def __init__(
        self,
        pool: FramePool,
        policy: Policy | None,
        *,
        writeback_bytes: int,
        debug: bool,
        stats: StoreStats,
        write: Callable[[Entry], None],
        gone: Callable[[Entry], None],
        now: Callable[[], int],
    ) -> None:
        self.pool = pool
        self._candidates: Candidates[Entry] | None = Candidates(policy) if policy is not None else None
        self._writeback_bytes = writeback_bytes
        self._debug = debug
        self._stats = stats
        self._write = write
        self._gone = gone
        self._now = now
        self._writing_bytes = 0
        self._victims_writing = 0
        #: clean victims, in the order in which they leave
        self._chosen: dict[Entry, None] = {}

    def take(self, entry: Entry, wanted: int, *, beyond: int) -> Frame | None:
        """A frame for a page: a free one, or that of the next victim.

        None means that something must end first which is under way: a write-back, a lease or a fill.

        Args:
            entry: the page.
            wanted: frames wanted at this time; so many victims may be on their way to NVMe.
            beyond: victims must be used later than this position.
        """
        frame = self.pool.take(entry.page)
        while frame is None:
            victim = next((chosen for chosen in self._chosen if chosen.next_use > beyond), None)
            if victim is not None:
                self.withdraw(victim)
                self._stats.evictions += 1
                frame = self._unbind(victim)
            elif self._victims_writing >= wanted or not self._choose(beyond):
                return None
        self._count_frames()
        return frame

    def choose_ahead(self, frames: int, *, beyond: int) -> None:
        """See to it that so many frames are free, or of victims that are chosen by now.

        Only victims used later than `beyond` are chosen.
        """
        while self.pool.available + len(self._chosen) + self._victims_writing < frames:
            if not self._choose(beyond):
                return

    def write_back(self, entries: Iterable[Entry]) -> list[Entry]:
        """Start what write-backs of the pages may start now; returns the pages that are not clean yet."""
        left = [entry for entry in entries if entry.dirty or entry.writer]
        for entry in left:
            if not (entry.filling or entry.writer or entry.writing) and self._may_write(entry):
                self._start_write(entry, victim=False)
        return left

    def written(self, entry: Entry) -> None:
        """A write-back has ended."""
        self._writing_bytes -= entry.nbytes
        for_frame = entry.victim
        entry.end_write()
        entry.dirty = False
        self._victims_writing -= for_frame
        self.settle(entry)
        if for_frame:
            self._keep_chosen(entry)

    def settle(self, entry: Entry) -> None:
        """Make a page that nobody uses a candidate for eviction; if it has no content, free its frame."""
        if not entry.idle or entry.pinned:
            return
        if entry.blank or not (entry.stored or entry.durable):
            self.withdraw(entry)
            self.pool.give(self._unbind(entry))
            self._count_frames()
        elif self._candidates is not None:
            self._candidates.add(entry)

    def withdraw(self, entry: Entry) -> None:
        """The page is no victim and no candidate for eviction any more, if it was one."""
        self._chosen.pop(entry, None)
        if self._candidates is not None:
            self._candidates.remove(entry)

    def reorder(self, entries: Iterable[Entry]) -> None:
        """The next uses of these pages have changed."""
        if self._candidates is not None:
            for entry in entries:
                if entry in self._candidates or entry in self._chosen:
                    self.withdraw(entry)
                    self._candidates.add(entry)

    def _choose(self, beyond: int) -> bool:
        """Make the policy's next victim one, and write it back if it is dirty; False: there is none now."""
        victim = self._candidates.best(self._now()) if self._candidates is not None else None
        if victim is None or victim.next_use <= beyond or (victim.dirty and not self._may_write(victim)):
            return False
        if victim.dirty:
            self._start_write(victim, victim=True)
        else:
            self._keep_chosen(victim)
        return True

    def _keep_chosen(self, entry: Entry) -> None:
        """A candidate that is clean leaves next, unless it is used before."""
        if self._candidates is not None and self._candidates.remove(entry):
            self._chosen[entry] = None

    def _may_write(self, entry: Entry) -> bool:
        return not self._writing_bytes or self._writing_bytes + entry.nbytes <= self._writeback_bytes

    def _start_write(self, entry: Entry, *, victim: bool) -> None:
        self.withdraw(entry)
        entry.start_write(victim=victim)
        self._writing_bytes += entry.nbytes
        self._victims_writing += victim
        self._write(entry)

    def _unbind(self, entry: Entry) -> Frame:
        if entry.stored:
            entry.check_seal()
        frame = entry.unbind()
        if self._debug:
            frame.fill(POISON)
        if self._debug or not self.pool.private:
            entry.padded = entry.content_bytes == entry.nbytes
        self._gone(entry)
        return frame

    def _count_frames(self) -> None:
        stats = self._stats
        stats.frames_in_use = self.pool.count - self.pool.available
        stats.frames_in_use_peak = max(stats.frames_in_use_peak, stats.frames_in_use)
