"""The DRAM tier as a state machine: who gets which page when. No threads and no I/O of its own.

Every method needs the store's lock. Transfers are handed to `issue` and reported back with `complete`.

Requests are granted in order of arrival. The one at the head of the queue collects its frames one by one, and
alone may do so; then its pages are marked as leased in one go. So two requests never wait for each other's
frames. A later request may overtake the head only if it needs no frame and no page that an earlier one wants
for itself, and only `OVERTAKES_MAX` times.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from tierstream.io.errors import BudgetError, InvariantError
from tierstream.tiered.capture import Capture
from tierstream.tiered.frames import Entry, Frame, FramePool
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import Policy
from tierstream.tiered.prefetch import Schedule, Window
from tierstream.tiered.reclaim import Reclaimer
from tierstream.tiered.stats import StoreStats
from tierstream.tiered.transfers import Kind, Transfer

#: Requests that may be granted ahead of the one at the head of the queue while it waits.
OVERTAKES_MAX = 16
#: Bytes of prefetch reads in flight: enough for any number of drives, few enough that a read which cannot
#: wait is not queued behind a whole window.
PREFETCH_IN_FLIGHT_BYTES = 512 << 20


class Cache:
    """Pages in frames.

    Args:
        layout: all pages.
        pool: the frames.
        policy: ranks the pages to evict; None where there is no NVMe and every page has a frame for good.
        prefetch_bytes: how far prefetch looks ahead; 0 for not at all.
        writeback_bytes: write-backs in flight at most (one page is always allowed).
        debug: fill freed frames with NaN, and check that pages change under leases to change them only.
        stats: counters to keep.
        issue: starts a transfer; must not block.
    """

    def __init__(
        self,
        layout: Layout,
        pool: FramePool,
        policy: Policy | None,
        *,
        prefetch_bytes: int,
        writeback_bytes: int,
        debug: bool,
        stats: StoreStats,
        issue: Callable[[Transfer], None],
    ) -> None:
        self._layout = layout
        self._stats = stats
        self._issue = issue
        self._debug = debug
        self._frame_count = pool.count
        # Without a schedule this many frames are kept clean ahead of need, once there is need.
        self._clean_ahead = min(writeback_bytes // layout.page_bytes, pool.count // 4)
        self._entries: dict[Page, Entry] = {}
        self._window = Window(prefetch_bytes if policy is not None else 0, pool.count, self.entry)
        self._frames = Reclaimer(
            pool,
            policy,
            writeback_bytes=writeback_bytes,
            debug=debug,
            stats=stats,
            write=lambda entry: issue(Transfer(Kind.WRITE, entry)),
            gone=self._window.note,
            now=lambda: self._window.head,
        )
        self._queue: deque[Lease] = deque()
        self._clock = 0
        self._error: BaseException | None = None
        self._prefetch_in_flight_bytes = 0
        #: the latest; those who change a page ask it first
        self._capture: Capture | None = None

    # Pages and leases

    def entry(self, page: Page) -> Entry:
        """The state of a page; InvariantError if the layout has no such page."""
        entry = self._entries.get(page)
        if entry is None:
            key = (page.unit, page.plane)
            if key not in self._layout.planes or not 0 <= page.index < self._layout.page_count(*key):
                raise InvariantError(f"{page} is not in the layout")
            page = Page(*page)
            entry = self._entries[page] = Entry(page, self._layout)
        return entry

    def submit(self, lease: Lease) -> None:
        """Take a request; it is granted at once, or queued."""
        if len(lease.entries) > self._frame_count:
            raise BudgetError(
                f"one request needs {len(lease.entries)} pages of {self._layout.page_bytes} bytes at once, "
                f"but the DRAM budget holds {self._frame_count}: raise the DRAM budget or lower page_bytes"
            )
        if self._may_overtake(lease):
            if self._queue:
                self._queue[0].overtaken += 1
            self._grant(lease)
        else:
            self._queue.append(lease)
            for entry in lease.entries:
                entry.requests.append(lease)
        self.pump()

    def release(self, lease: Lease) -> None:
        """Take a lease back."""
        for entry, intent in zip(lease.entries, lease.intents, strict=True):
            if intent is Intent.READ:
                entry.check_seal()
                entry.unlease(alone=False)
            else:
                entry.unlease(alone=True)
                if intent is Intent.CONSUME:
                    entry.stored = entry.dirty = False
                else:
                    entry.stored = entry.dirty = True
                    if self._debug:
                        entry.set_seal()
            self._frames.settle(entry)
        self.pump()

    def discard(self, entries: Iterable[Entry]) -> None:
        """Forget the content of step-local pages."""
        chosen = list(entries)
        for entry in chosen:
            if entry.durable or entry.readers or entry.writer:
                why = "it is durable" if entry.durable else "it is leased"
                raise InvariantError(f"{entry.page} cannot be discarded: {why}")
        for entry in chosen:
            entry.stored = entry.dirty = False
            self._frames.withdraw(entry)
            self._frames.settle(entry)
        self.pump()

    def begin(self, schedule: Schedule) -> None:
        """Start a step: new next uses, new order of eviction."""
        for page in schedule.pages:
            self.entry(page)
        self._window.begin(schedule, self._entries.values())
        self._frames.reorder(self._entries.values())
        self.pump()

    # Transfers

    def complete(self, transfer: Transfer) -> None:
        """A transfer has ended well."""
        entry = transfer.entry
        if transfer.kind is Kind.WRITE:
            self._stats.nvme_bytes_written += entry.nbytes
            self._frames.written(entry)
            self.pump()
            return
        self._stats.nvme_bytes_read += entry.nbytes
        if transfer.buffer is not None:
            assert self._capture is not None
            self._capture.arrived(entry, transfer.buffer)
            self.pump()
            return
        if transfer.kind is Kind.PREFETCH:
            self._prefetch_in_flight_bytes -= entry.nbytes
        self.filled(entry)

    def filled(self, entry: Entry) -> None:
        """The frame of the page has its content."""
        entry.end_fill()
        entry.padded = True
        if self._debug:
            entry.set_seal()
        waiters, entry.waiters = entry.waiters, []
        for lease in waiters:
            lease.unfilled -= 1
            if not lease.unfilled:
                lease.wake()
        self._frames.settle(entry)
        self.pump()

    def fail(self, error: BaseException) -> None:
        """Every waiting request ends with the error; nothing is granted or started any more."""
        self._error = self._error or error
        waiting = [*self._queue, *(lease for entry in self._entries.values() for lease in entry.waiters)]
        self._queue.clear()
        for lease in waiting:
            lease.error = self._error
            lease.wake()
        if self._capture is not None:
            self._capture.fail(self._error)

    def write_back(self, entries: Iterable[Entry] | None = None) -> list[Entry]:
        """Start write-backs of durable pages, as far as allowed; returns those to call again with after a
        change.

        Args:
            entries: what an earlier call returned; None for all pages that are dirty or leased by a writer.
        """
        if entries is None:
            entries = [entry for entry in self._entries.values() if entry.durable]
        return self._frames.write_back(entries)

    # Captures

    def begin_capture(self, first: Iterable[Page], buffers: list[Frame], lock: threading.Lock) -> Capture:
        """See `Store.capture`."""
        if self._capture is not None and not self._capture.closed:
            raise InvariantError("a capture begins before the one before it is closed")
        planes = self._layout.planes.items()
        durable = (page for key, spec in planes if spec.durable for page in self._layout.pages(*key))
        entries = [self.entry(page) for page in dict.fromkeys((*first, *durable))]
        self._capture = Capture(self, self._layout, entries, buffers, lock)
        return self._capture

    def read_aside(self, entry: Entry, buffer: Frame) -> None:
        self._issue(Transfer(Kind.ASIDE, entry, buffer))

    def hold(self, entry: Entry) -> None:
        self._frames.withdraw(entry)
        entry.lease(alone=False)

    def let_go(self, entry: Entry) -> None:
        entry.check_seal()
        entry.unlease(alone=False)
        self._frames.settle(entry)

    # Granting

    def pump(self) -> None:
        """Do what has become possible: grant, overtake, prefetch."""
        if self._error is not None:
            return
        queue = self._queue
        while queue and self._assemble(queue[0]):
            self._dequeue(queue[0])
        if len(queue) > 1:
            self._overtake()
        if self._window.active:
            self._prefetch()

    def _assemble(self, lease: Lease) -> bool:
        """Collect frames for the request at the head; True when it was granted, or cannot ever be."""
        if not lease.pinned:
            lease.pinned = True
            for entry in lease.entries:
                entry.pinned = True
                self._frames.withdraw(entry)
        wanted = sum(entry.frame is None for entry in lease.entries)
        short = wanted > self._frames.pool.available
        ready = True
        for entry, intent in zip(lease.entries, lease.intents, strict=True):
            if intent is not Intent.OVERWRITE and not (entry.stored or entry.durable or entry.writer):
                self._refuse(
                    lease, InvariantError(f"{entry.page} is read, but it was never written or is gone")
                )
                return True
            if entry.frame is None:
                frame = self._frames.take(entry, wanted, beyond=-1)
                if frame is None:
                    ready = False
                    break
                wanted -= 1
                self._bind_for_head(entry, intent, frame)
            elif entry.writer or (intent is not Intent.READ and (entry.readers or entry.writing)):
                ready = False
        ready = ready and (self._capture is None or self._capture.admits(lease))
        if ready:
            self._grant(lease)
        if short and not self._window.active:
            self._frames.choose_ahead(self._clean_ahead, beyond=-1)
        return ready

    def _bind_for_head(self, entry: Entry, intent: Intent, frame: Frame) -> None:
        """Give the page its frame; a read may start before the request is complete."""
        if entry.stored and (entry.owed or intent is not Intent.OVERWRITE):
            entry.bind(frame, filling=True)
            entry.demanded = True
            self._issue(Transfer(Kind.DEMAND, entry))
        else:
            entry.bind(frame, filling=False)
            entry.blank = True

    def _refuse(self, lease: Lease, error: BaseException) -> None:
        lease.error = error
        for entry in lease.entries:
            entry.pinned = entry.demanded = False
            self._frames.settle(entry)
        lease.wake()

    def _dequeue(self, lease: Lease) -> None:
        self._queue.remove(lease)
        for entry in lease.entries:
            entry.requests.remove(lease)

    def _overtake(self) -> None:
        """Grant later requests that need nothing but pages which are there."""
        head, *later = self._queue
        for lease in later:
            if self._may_overtake(lease):
                head.overtaken += 1
                self._dequeue(lease)
                self._grant(lease)

    def _may_overtake(self, lease: Lease) -> bool:
        if self._queue and self._queue[0].overtaken >= OVERTAKES_MAX:
            return False
        if lease.blocked_on and self._blocked(lease, lease.blocked_on):
            return False
        for index in range(len(lease.entries)):
            if self._blocked(lease, index):
                lease.blocked_on = index
                return False
        return True

    def _blocked(self, lease: Lease, index: int) -> bool:
        """The page is not there, in use, or wanted by an earlier request that this one would disturb."""
        entry, alone = lease.entries[index], lease.intents[index] is not Intent.READ
        if entry.frame is None or entry.blank or entry.writer or (alone and (entry.readers or entry.writing)):
            return True
        if not (entry.stored or entry.durable or lease.intents[index] is Intent.OVERWRITE):
            return True
        if alone and entry.owed:
            return True
        for earlier in entry.requests:
            if earlier is lease:
                break
            if alone or earlier.intents[earlier.entries.index(entry)] is not Intent.READ:
                return True
        return False

    def _grant(self, lease: Lease) -> None:
        self._clock += 1
        stats = self._stats
        for entry, intent in zip(lease.entries, lease.intents, strict=True):
            if lease.pinned:
                entry.pinned = False
            self._frames.withdraw(entry)
            if entry.blank:
                entry.blank = False
                stats.fresh += 1
                if intent is not Intent.OVERWRITE:
                    entry.start_fill()
                    lease.zeroes.append(entry)
                elif not entry.padded:
                    lease.paddings.append(entry)
                entry.padded = True
            elif entry.demanded:
                entry.demanded = False
                stats.misses += 1
            elif entry.prefetched:
                entry.prefetched = False
                stats.prefetched += 1
            else:
                stats.hits += 1
            entry.lease(alone=intent is not Intent.READ)
            if entry.filling:
                lease.unfilled += 1
                entry.waiters.append(lease)
            lease.arrays.append(entry.view() if intent is Intent.READ else entry.content())
            entry.last_use = self._clock
            if lease.scheduled:
                self._consume(entry)
        if self._capture is not None:
            lease.copies = self._capture.copies(lease)
        lease.granted = True
        lease.wake()

    def _consume(self, entry: Entry) -> None:
        self._frames.reorder(self._window.consume(entry))
        self._window.extend()

    def _prefetch(self) -> None:
        """Bring pages of the window, soonest first, as long as none that is needed sooner has to go."""
        window = self._window
        while (entry := window.first_missing()) is not None:
            ahead_bytes = self._prefetch_in_flight_bytes
            if ahead_bytes and ahead_bytes + entry.nbytes > PREFETCH_IN_FLIGHT_BYTES:
                break
            frame = self._frames.take(entry, window.frames_wanted, beyond=entry.next_use)
            if frame is None:
                break
            entry.bind(frame, filling=True)
            entry.prefetched = True
            entry.last_use = self._clock  # LRU would give it up first
            self._prefetch_in_flight_bytes += entry.nbytes
            self._issue(Transfer(Kind.PREFETCH, entry))
        if window.frames_wanted:
            self._frames.choose_ahead(window.frames_wanted, beyond=window.end)
