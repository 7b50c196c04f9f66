"""Where frames come from: the free ones, and those of the pages that the policy gives up.

Eviction follows the policy strictly. A dirty victim is written back first; as many victims are written as
frames are wanted, so write-back runs ahead of need, and a page that can stay in DRAM until it changes again
is never written.
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
    ) -> None:
        self.pool = pool
        self._candidates: Candidates[Entry] | None = Candidates(policy) if policy is not None else None
        self._writeback_bytes = writeback_bytes
        self._debug = debug
        self._stats = stats
        self._write = write
        self._gone = gone
        self._writing_bytes = 0
        self._victims_writing = 0
        self._victims_cleaned = 0

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
            victim = self._candidates.best() if self._candidates is not None else None
            if victim is None or victim.next_use <= beyond or self._victims_writing >= wanted:
                return None
            if not victim.dirty:
                self.withdraw(victim)
                self._stats.evictions += 1
                frame = self._unbind(victim)
            elif self._may_write(victim):
                self._start_write(victim, victim=True)
            else:
                return None
        self._count_frames()
        return frame

    def write_ahead(self, frames: int, *, beyond: int) -> None:
        """See to it that so many frames are free, clean by an earlier call, or on their way there.

        Only victims used later than `beyond` are written.
        """
        while self.pool.available + self._victims_cleaned + self._victims_writing < frames:
            victim = self._candidates.best_dirty() if self._candidates is not None else None
            if victim is None or victim.next_use <= beyond or not self._may_write(victim):
                return
            self._start_write(victim, victim=True)

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
        if for_frame:
            self._victims_writing -= 1
            if entry.idle and not entry.pinned:
                entry.cleaned = True
                self._victims_cleaned += 1
        self.settle(entry)

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
        """The page is no candidate for eviction any more, if it was one."""
        if entry.cleaned:
            entry.cleaned = False
            self._victims_cleaned -= 1
        if self._candidates is not None:
            self._candidates.remove(entry)

    def reorder(self, entries: Iterable[Entry]) -> None:
        """The next uses of these pages have changed."""
        if self._candidates is not None:
            for entry in entries:
                if self._candidates.remove(entry):
                    self._candidates.add(entry)

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
