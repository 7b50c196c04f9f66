"""The state machine with requests that wait and transfers that end in any order: model and books."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.stores import PAGE_BYTES, layout_of

from tierstream.io.errors import InvariantError
from tierstream.tiered.cache import Cache, Kind, Transfer
from tierstream.tiered.frames import UniformPool
from tierstream.tiered.layout import Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import StoreStats

LAYOUT = layout_of(
    ("u", "weight", "uint8", 8 * PAGE_BYTES, True), ("u", "grad", "uint8", 4 * PAGE_BYTES - 100, False)
)
DURABLE, LOCAL = LAYOUT.pages("u", "weight"), LAYOUT.pages("u", "grad")
PAGES = [*DURABLE, *LOCAL]
#: More than any of the tests' threads hold; each ends its own lease before it asks for another.
CALLERS = 5


class CacheMachine(RuleBasedStateMachine):
    """Callers with one lease each; content is one byte per page."""

    @initialize(
        frames=st.integers(3, 8),
        prefetch=st.integers(0, 6),
        writeback=st.integers(1, 4),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, frames: int, prefetch: int, writeback: int, policy: str) -> None:
        self.frames, self.writeback_bytes = frames, writeback * PAGE_BYTES
        self.stats = StoreStats()
        self.transfers: list[Transfer] = []
        self.cache = Cache(
            LAYOUT,
            UniformPool(LAYOUT, frames * PAGE_BYTES),
            POLICIES[policy],
            prefetch_bytes=prefetch * PAGE_BYTES,
            writeback_bytes=self.writeback_bytes,
            debug=True,
            stats=self.stats,
            issue=self.transfers.append,
        )
        self.files: dict[Page, int] = {}
        self.truth: dict[Page, int] = {}
        self.version = 0
        self.callers: list[Lease | None] = [None] * CALLERS

    # What callers do

    @rule(
        caller=st.integers(0, CALLERS - 1),
        pages=st.lists(st.sampled_from(PAGES), min_size=1, max_size=3, unique=True),
        data=st.data(),
        scheduled=st.booleans(),
    )
    def ask(self, caller: int, pages: list[Page], data: st.DataObject, scheduled: bool) -> None:
        if self.callers[caller] is not None:
            return
        intents = []
        for page in pages:
            allowed = [Intent.READ, Intent.READ, Intent.UPDATE, Intent.OVERWRITE]
            intents.append(
                data.draw(st.sampled_from(allowed if page in DURABLE else [*allowed, Intent.CONSUME]))
            )
        lease = Lease(self, pages, [self.cache.entry(page) for page in pages], intents, scheduled)
        self.callers[caller] = lease
        self.cache.submit(lease)
        self.hand_over()

    @rule(caller=st.integers(0, CALLERS - 1))
    def give_back(self, caller: int) -> None:
        lease = self.callers[caller]
        if lease is not None and lease.held:
            self.release(lease)
            self.hand_over()

    def release(self, lease: Lease) -> None:
        for page, intent, array in zip(lease.pages, lease.intents, lease.arrays, strict=True):
            if intent is Intent.READ:
                self.check(page, array)
            elif intent is Intent.CONSUME:
                self.truth.pop(page)
            else:
                self.version = self.version % 250 + 1
                array.fill(self.version)
                self.truth[page] = self.version
        self.callers[self.callers.index(lease)] = None
        self.cache.release(lease)

    def hand_over(self) -> None:
        """What `Store.acquire` does when it returns: zero fills, and the look at the content."""
        again = True
        while again:
            again = False
            for lease in self.callers:
                if lease is None:
                    continue
                if lease.error is not None:
                    self.refused(lease)
                    again = True
                zeroes, lease.zeroes = lease.zeroes, []
                for entry in zeroes:
                    entry.view().fill(0)
                    self.cache.filled(entry)
                    again = True
                if lease.granted and not lease.unfilled and not lease.held:
                    for entry in lease.paddings:
                        entry.view()[entry.content_bytes :] = 0
                    lease.paddings = []
                    lease.held = True
                    for page, intent, array in zip(lease.pages, lease.intents, lease.arrays, strict=True):
                        if intent is not Intent.OVERWRITE:
                            self.check(page, array)

    def refused(self, lease: Lease) -> None:
        assert isinstance(lease.error, InvariantError)
        assert any(
            page in LOCAL and page not in self.truth and intent is not Intent.OVERWRITE
            for page, intent in zip(lease.pages, lease.intents, strict=True)
        )
        self.callers[self.callers.index(lease)] = None

    def check(self, page: Page, array: np.ndarray) -> None:
        expected = self.truth[page] if page in LOCAL else self.truth.get(page, 0)
        assert (array[: self.cache.entry(page).content_bytes] == expected).all()
        assert not array[self.cache.entry(page).content_bytes :].any()

    @rule(index=st.integers(0, 20))
    def end_transfer(self, index: int) -> None:
        if self.transfers:
            self.end(self.transfers.pop(index % len(self.transfers)))
            self.hand_over()

    def end(self, transfer: Transfer) -> None:
        entry = transfer.entry
        if transfer.kind is Kind.WRITE:
            frame = entry.view()
            assert len(set(frame[: entry.content_bytes])) == 1, "written while it is changed"
            assert not frame[entry.content_bytes :].any(), "padding is written as it is"
            self.files[entry.page] = int(frame[0])
        else:
            entry.view()[: entry.content_bytes] = self.files[entry.page]
            entry.view()[entry.content_bytes :] = 0
        self.cache.complete(transfer)

    @rule(
        step=st.lists(st.sampled_from(PAGES), max_size=15),
        following=st.lists(st.sampled_from(PAGES), max_size=8),
    )
    def begin(self, step: list[Page], following: list[Page]) -> None:
        self.cache.begin(Schedule(step, following))
        self.hand_over()

    @rule(page=st.sampled_from(LOCAL))
    def discard(self, page: Page) -> None:
        entry = self.cache.entry(page)
        if not (entry.readers or entry.writer):
            self.cache.discard([entry])
            self.truth.pop(page, None)
            self.hand_over()

    @rule(pages=st.lists(st.sampled_from(DURABLE), max_size=4))
    def flush(self, pages: list[Page]) -> None:
        self.cache.write_back([self.cache.entry(page) for page in pages])

    # What must always hold

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        entries = list(self.cache._entries.values())
        frames = self.cache._frames
        bound = [entry for entry in entries if entry.frame is not None]
        assert len(bound) + frames.pool.available == self.frames
        assert len({entry.view().ctypes.data for entry in bound}) == len(bound), "two pages in one frame"
        assert frames._writing_bytes == sum(entry.nbytes for entry in entries if entry.writing)
        assert frames._writing_bytes <= max(self.writeback_bytes, PAGE_BYTES)
        assert frames._victims_writing == sum(entry.victim for entry in entries)
        assert frames._candidates is not None
        assert not any(entry.dirty or entry in frames._candidates for entry in frames._chosen)
        for entry in entries:
            may_leave = entry in frames._candidates or entry in frames._chosen
            assert may_leave == (entry.idle and not entry.pinned), entry.page
            assert not (entry.writer and (entry.readers or entry.writing))
            assert (entry.page in self.truth) == entry.stored
            assert entry.blank <= entry.pinned
        reads = [t.entry.nbytes for t in self.transfers if t.kind is Kind.PREFETCH]
        assert self.cache._prefetch_in_flight_bytes == sum(reads)

    def teardown(self) -> None:
        """Nobody is stuck: when leases are given back and transfers end, every request ends."""
        if not hasattr(self, "cache"):
            return
        for _ in range(1000):
            if not self.transfers and not any(self.callers):
                break
            for lease in self.callers:
                if lease is not None and lease.held:
                    self.release(lease)
            if self.transfers:
                self.end(self.transfers.pop())
            self.hand_over()
            self.books_are_right()
        assert not any(self.callers), "a request waits for ever"
        assert not self.transfers


CacheMachine.TestCase.settings = settings(stateful_step_count=40)
TestCacheModel = CacheMachine.TestCase
