"""The store: pages of model state in DRAM, backed by chunk files on NVMe.

`Cache` decides, under one lock; this module brings the threads together with it. A thread that must wait
sleeps on an event of its own request, which every change that it must see sets, so no wake-up is lost. One
thread of the store starts all transfers; the backend's threads report their ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from numpy.typing import NDArray

from tierstream.io.errors import BudgetError, ConfigError, InvariantError
from tierstream.tiered.arena import POISON, Arena, Register, Unregister
from tierstream.tiered.cache import Cache
from tierstream.tiered.capture import READS_AHEAD, Capture
from tierstream.tiered.frames import Entry, FramePool, HomePool, UniformPool
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import Faults, StoreStats
from tierstream.tiered.transfers import Directory, Kind, Transfer

__all__ = ["Directory", "Faults", "Intent", "Lease", "Store", "StoreStats"]


class Store:
    """All planes of a layout, as pages that are leased.

    Any number of threads may use it; each holds at most one lease at a time.

    Args:
        layout: units, planes, page size.
        dram_bytes: the DRAM budget; whole frames of `layout.page_bytes` are made of it.
        directory: chunk files behind the DRAM; the store closes it. None: the DRAM is home to every page, and
            small planes take no more than their size.
        stored: pages that have content in the directory from the start.
        policy: "lookahead" or "lru".
        prefetch_bytes: how far prefetch looks ahead on the schedule, in bytes of page uses; 0 turns it off.
        writeback_bytes: write-backs in flight at most.
        copy_bytes: memory beside `dram_bytes` for pages that change before a capture of them is written.
        register: pins a range `(address, nbytes)` for the GPU, or raises; see `Arena`.
        unregister: takes the address of such a range.
        debug: fill freed frames with 0xFF, NaN in bfloat16 and in float32, and check by checksums that no
            page is changed by a holder who may only read it (slow).
        faults: random delays, for tests.

    Attributes:
        stats: counters; see `StoreStats`.
        pinned: the DRAM is pinned for the GPU.
        pageable_reason: why `register` did not succeed, for a warning; empty otherwise.

    Raises:
        BudgetError: `dram_bytes` holds no frame, or, without a directory, not every page.
        ConfigError: there is no such policy.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        dram_bytes: int,
        directory: Directory | None,
        stored: Iterable[Page] = (),
        policy: str = "lookahead",
        prefetch_bytes: int,
        writeback_bytes: int,
        copy_bytes: int = 0,
        register: Register | None = None,
        unregister: Unregister | None = None,
        debug: bool = False,
        faults: Faults | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown cache policy {policy!r}: choose one of {', '.join(POLICIES)}")
        self.layout = layout
        make_pool = HomePool if directory is None else UniformPool
        pool: FramePool = make_pool(layout, dram_bytes, register, unregister)
        self.stats = StoreStats(frame_count=pool.count)
        self._arena = pool.arena
        self.pinned, self.pageable_reason = pool.arena.pinned, pool.arena.pageable_reason
        if debug:
            for frame in pool.arena.frames:
                frame.fill(POISON)
        self._copies = Arena([layout.page_bytes] * (copy_bytes // layout.page_bytes))
        self._directory = directory
        self._faults = faults
        self._transfers: SimpleQueue[Transfer | None] = SimpleQueue()
        self._in_flight = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for flush and settle; requests have events
        self._error: BaseException | None = None
        self._closed = False
        self._cache = Cache(
            layout,
            pool,
            None if directory is None else POLICIES[policy],
            prefetch_bytes=prefetch_bytes,
            writeback_bytes=writeback_bytes,
            debug=debug,
            stats=self.stats,
            issue=self._issue,
        )
        for page in stored:
            self._cache.entry(page).stored = True
        self._thread: threading.Thread | None = None
        if directory is not None:
            self._thread = threading.Thread(
                target=self._transfer_loop, args=(directory,), name="tierstream-store", daemon=True
            )
            self._thread.start()

    @property
    def on_drives(self) -> bool:
        """Pages live on drives; DRAM holds some of them."""
        return self._directory is not None

    # Leases

    def acquire(self, uses: Sequence[tuple[Page, Intent]], *, scheduled: bool = True) -> Lease:
        """Wait until every page is in DRAM, and lease them all.

        Frames are granted all or none, in order of request.

        Args:
            uses: pages, each at most once, and what is done with them.
            scheduled: these are uses on the schedule of `begin_step`; False for those beside it (snapshot,
                export).

        Raises:
            BudgetError: more pages than there are frames.
            StorageError: a read or write-back failed, now or earlier.
            InvariantError: unknown page, a page named twice, a step-local page read that has no content, a
                durable page consumed, or the store is closed.
        """
        pages = [page for page, _ in uses]
        if len(set(pages)) != len(pages):
            raise InvariantError(f"a request names a page twice: {pages}")
        with self._lock:
            self._check()
            entry = self._cache.entry
            lease = Lease(
                self, pages, [entry(page) for page in pages], [intent for _, intent in uses], scheduled
            )
            for wanted, intent in zip(lease.entries, lease.intents, strict=True):
                if intent is Intent.CONSUME and wanted.durable:
                    raise InvariantError(f"{wanted.page} is durable and cannot be consumed")
            try:
                self._cache.submit(lease)
            except BaseException as bug:
                if not isinstance(bug, BudgetError):
                    self._fail(bug)
                raise
            ready = lease.granted and not lease.unfilled
            if not ready:
                lease.event = threading.Event()
                if lease.granted or lease.error:
                    lease.event.set()
        if not ready:
            self._wait(lease)
        for copy in lease.copies:
            copy()
        for padded in lease.paddings:
            padded.view()[padded.content_bytes :] = 0
        if self._faults is not None:
            self._faults.delay()
        lease.held = True
        return lease

    def release(self, lease: Lease) -> None:
        """Give the pages back, changed as the intents said.

        Raises:
            InvariantError: it was released before.
        """
        with self._lock:
            if not lease.held:
                raise InvariantError(f"a lease is released twice: {lease.pages}")
            lease.held = False
            lease.arrays = []
            try:
                self._cache.release(lease)
            except BaseException as bug:
                self._fail(bug)
                raise
            self._changed.notify_all()

    def discard(self, pages: Iterable[Page]) -> None:
        """Forget the content of step-local pages that nobody holds (a skipped step's gradients).

        Raises:
            InvariantError: a page is durable, or leased.
        """
        with self._lock:
            self._cache.discard([self._cache.entry(page) for page in pages])

    def begin_step(self, schedule: Sequence[Page], following: Sequence[Page]) -> None:
        """Tell what will be used, for eviction and prefetch. It changes speed only, never content.

        Args:
            schedule: page uses of this step, in order; those of the step before that did not come are
                forgotten.
            following: page uses of the step after it, and of every one after that.
        """
        if self._directory is None:  # every page is there: nothing is evicted or read ahead
            return
        parsed = Schedule(schedule, following)
        with self._lock:
            self._check()
            self._cache.begin(parsed)

    def has_content(self, page: Page) -> bool:
        """Whether the page was ever written and, if step-local, not consumed or discarded since."""
        with self._lock:
            return self._cache.entry(page).stored

    # Ranges

    def write_range(self, unit: str, plane: str, start_element: int, values: NDArray[Any]) -> None:
        """Set elements `[start_element, start_element + len(values))` of a plane, page by page.

        Args:
            values: flat array of the plane's dtype; bfloat16 also as uint16 bit patterns.

        Raises:
            InvariantError: unknown plane, wrong dtype, or out of range.
        """
        source = self.layout.range_bytes(unit, plane, start_element, values)
        for page, inside, outside in self.layout.pieces(unit, plane, start_element, values.size):
            start, end = self.layout.page_span(page)
            item = self.layout.spec(unit, plane).item_bytes
            whole = inside.stop - inside.start == (end - start) * item
            intent = Intent.OVERWRITE if whole else Intent.UPDATE
            with self.acquire([(page, intent)], scheduled=False) as lease:
                lease.arrays[0][inside] = source[outside]

    def read_range(self, unit: str, plane: str, start_element: int, out: NDArray[Any]) -> None:
        """Copy elements `[start_element, start_element + len(out))` of a plane; else as `write_range`."""
        target = self.layout.range_bytes(unit, plane, start_element, out)
        for page, inside, outside in self.layout.pieces(unit, plane, start_element, out.size):
            with self.acquire([(page, Intent.READ)], scheduled=False) as lease:
                target[outside] = lease.arrays[0][inside]

    # Ends

    def capture(self, first: Iterable[Page] = ()) -> Capture:
        """The durable pages as they are now, to be written somewhere while they change.

        Args:
            first: pages in the order in which they will change; the others follow.

        Raises:
            InvariantError: an earlier capture is not closed, or a durable page is being changed.
        """
        with self._lock:
            self._check()
            if self.on_drives and not self._copies.frames:  # pages that are not in DRAM must pass somewhere
                self._copies = Arena([self.layout.page_bytes] * READS_AHEAD)
            return self._cache.begin_capture(first, self._copies.frames, self._lock)

    def flush(self) -> None:
        """Bring the chunk files of all durable planes up to date, and wait for it.

        Raises:
            StorageError: a write failed.
        """
        left: list[Entry] | None = None

        def all_written() -> bool:
            nonlocal left
            self._check()
            left = self._cache.write_back(left)
            return not left

        if self._directory is not None:
            with self._lock:
                self._changed.wait_for(all_written)

    def settle(self) -> None:
        """Wait until the drives rest: of itself the store moves nothing more before a page is used."""
        with self._lock:
            self._changed.wait_for(lambda: not self._in_flight)

    def close(self) -> None:
        """Wait for transfers under way and let everything go: threads, files, memory.

        Dirty pages are not written (`flush` does it). Leases still held stay valid memory. A second call does
        nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._cache.fail(self._error or InvariantError("the store was closed while a request waited"))
            self._changed.notify_all()
        self._transfers.put(None)
        if self._thread is not None:
            self._thread.join()
        self.settle()
        if self._directory is not None:
            self._directory.close()
        self._arena.close()
        self._copies.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Waiting and transfers

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise InvariantError("the store is closed")

    def _wait(self, lease: Lease) -> None:
        """Sleep until the lease is granted and its pages are filled; fill those that start as zeros."""
        event = lease.event
        assert event is not None
        begun = time.perf_counter()
        granted_at: float | None = None
        while True:
            try:
                event.wait()
            except BaseException:  # a KeyboardInterrupt: nobody will give the lease back
                with self._lock:
                    self._fail(InvariantError("a wait for pages was interrupted, and its lease is lost"))
                raise
            with self._lock:
                event.clear()
                if lease.error is not None:
                    raise lease.error
                if lease.granted and granted_at is None:
                    granted_at = time.perf_counter()
                zeroes, lease.zeroes = lease.zeroes, []
                if granted_at is not None and not lease.unfilled:
                    self.stats.frame_wait_s += granted_at - begun
                    self.stats.read_wait_s += time.perf_counter() - granted_at
                    return
            for entry in zeroes:
                entry.view().fill(0)
            if zeroes:
                with self._lock:
                    for entry in zeroes:
                        self._cache.filled(entry)

    def _issue(self, transfer: Transfer) -> None:
        self._in_flight += 1
        self._transfers.put(transfer)

    def _transfer_loop(self, directory: Directory) -> None:
        """Start transfers in order, in the store's own thread: opening a file may take a while."""
        while (transfer := self._transfers.get()) is not None:
            move = directory.write if transfer.kind is Kind.WRITE else directory.read
            try:
                future = move(transfer.entry.page, transfer.array)
            except BaseException as error:
                self._ended(transfer, error)
            else:
                future.add_done_callback(partial(self._transfer_done, transfer))

    def _transfer_done(self, transfer: Transfer, future: Future[int]) -> None:
        if self._faults is not None:
            self._faults.delay()
        self._ended(transfer, future.exception())

    def _ended(self, transfer: Transfer, error: BaseException | None) -> None:
        with self._lock:
            self._in_flight -= 1
            if error is None:
                try:
                    self._cache.complete(transfer)
                except BaseException as bug:
                    error = bug
            if error is not None:
                self._fail(error)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """From now on every request ends with the error."""
        self._error = self._error or error
        self._cache.fail(self._error)
        self._changed.notify_all()
