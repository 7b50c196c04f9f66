"""Prefetch, write-back and eviction of the state machine, transfer by transfer and without threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import PAGE_BYTES, Frame, all_pages, layout_of, uniform_layout

from tierstream.io.errors import InvariantError
from tierstream.tiered.cache import Cache, Kind, Transfer
from tierstream.tiered.frames import Entry, State, UniformPool
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import StoreStats


class Bench:
    """A cache whose transfers end when the test says so."""

    def __init__(
        self,
        layout: Layout,
        frames: int,
        *,
        prefetch: int = 0,
        writeback: int = 100,
        policy: str = "lookahead",
    ) -> None:
        self.layout = layout
        self.stats = StoreStats()
        self.transfers: list[Transfer] = []
        self.log: list[tuple[Kind, int]] = []
        self.cache = Cache(
            layout,
            UniformPool(layout, frames * PAGE_BYTES),
            POLICIES[policy],
            prefetch_bytes=prefetch * PAGE_BYTES,
            writeback_bytes=writeback * PAGE_BYTES,
            debug=True,
            stats=self.stats,
            issue=self._issue,
        )

    def _issue(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self.log.append((transfer.kind, transfer.entry.page.index))

    def release(self, lease: Lease) -> None:
        self.cache.release(lease)

    def ask(self, *uses: tuple[Page, Intent], scheduled: bool = True) -> Lease:
        entries = [self.cache.entry(page) for page, _ in uses]
        lease = Lease(self, [page for page, _ in uses], entries, [intent for _, intent in uses], scheduled)
        self.cache.submit(lease)
        return lease

    def use(self, page: Page, intent: Intent = Intent.READ, *, scheduled: bool = True) -> None:
        """One whole lease; transfers that it needs end."""
        lease = self.ask((page, intent), scheduled=scheduled)
        while not lease.granted or lease.unfilled:
            for entry in lease.zeroes:
                self.cache.filled(entry)
            lease.zeroes = []
            if not lease.granted or lease.unfilled:
                self.end(0)
        self.release(lease)

    def end(self, index: int = 0) -> None:
        self.cache.complete(self.transfers.pop(index))

    def end_all(self) -> None:
        while self.transfers:
            self.end()

    def begin(self, step: Sequence[Page], following: Sequence[Page] = ()) -> None:
        self.cache.begin(Schedule(step, following))

    def resident(self) -> set[int]:
        return {entry.page.index for entry in self.cache._entries.values() if entry.frame is not None}

    def fill(self, pages: Sequence[Page]) -> None:
        """Give the pages content on NVMe."""
        for page in pages:
            self.use(page, Intent.OVERWRITE, scheduled=False)
            self.cache.write_back([self.cache.entry(page)])
            self.end_all()
        self.log.clear()


def bench(pages: int, frames: int, **settings: int | str) -> tuple[Bench, list[Page]]:
    """All pages have content on NVMe, and the last ones are in DRAM."""
    layout = uniform_layout(pages)
    it = Bench(layout, frames, **settings)  # type: ignore[arg-type]
    it.fill(all_pages(layout))
    return it, all_pages(layout)


# Prefetch


def test_prefetch_brings_the_window_in_order_and_no_more() -> None:
    it, pages = bench(8, 4, prefetch=3)
    it.begin(pages)
    assert it.log == [(Kind.PREFETCH, index) for index in range(3)]
    it.end_all()
    it.use(pages[0])
    assert it.log[3:] == [(Kind.PREFETCH, 3)]
    assert it.stats.prefetched == 1
    assert it.stats.misses == it.stats.hits == 0


def test_prefetch_is_off_at_zero_bytes() -> None:
    it, pages = bench(8, 4, prefetch=0)
    it.begin(pages)
    assert it.log == []
    it.use(pages[0])
    assert it.log == [(Kind.DEMAND, 0)]


def test_a_scheduled_scan_waits_for_no_read_when_transfers_are_fast() -> None:
    it, pages = bench(12, 6, prefetch=3)
    it.begin(pages, pages)
    for page in [*pages, *pages, *pages]:
        it.end_all()
        it.use(page)
    assert it.stats.misses == 0
    assert it.stats.prefetched + it.stats.hits == 36
    assert it.stats.hits > 0, "lookahead keeps nothing over a cycle"


def test_prefetch_never_evicts_what_is_needed_sooner() -> None:
    """Pages 3, 4 and 5 are in DRAM and needed before page 0 is."""
    it, pages = bench(6, 3, prefetch=6)
    it.begin([pages[3], pages[4], pages[5], pages[0]])
    assert it.log == []
    it.use(pages[3])
    assert it.log == [(Kind.PREFETCH, 0)], "the frame of a page that is not needed any more"
    assert it.resident() == {0, 4, 5}


def test_prefetch_waits_while_the_victim_of_lru_is_needed_sooner() -> None:
    it, pages = bench(6, 3, prefetch=6, policy="lru")
    it.begin([pages[4], pages[3], pages[0], pages[5]])
    it.use(pages[4])
    assert it.log == [], "the oldest, page 3, is needed before page 0"
    it.use(pages[3])
    assert it.log == [(Kind.PREFETCH, 0), (Kind.PREFETCH, 5)], "the oldest, page 5, is needed after page 0"


def test_prefetch_keeps_away_while_a_request_waits_for_frames() -> None:
    it, pages = bench(8, 3, prefetch=4)
    held = it.ask(*((page, Intent.READ) for page in pages[5:8]), scheduled=False)
    it.begin(pages[:4])
    assert it.log == [], "there is no frame"
    waiting = it.ask((pages[4], Intent.READ), scheduled=False)
    it.release(held)
    assert it.log[0] == (Kind.DEMAND, 4)
    assert waiting.granted


def test_pages_evicted_inside_the_window_are_fetched_again() -> None:
    it, pages = bench(6, 2, prefetch=2)
    it.begin([pages[0], pages[1]])
    it.end_all()
    lease = it.ask((pages[4], Intent.READ), (pages[5], Intent.READ), scheduled=False)
    it.end_all()
    assert lease.granted
    assert it.resident() == {4, 5}
    it.release(lease)
    assert it.log[-2:] == [(Kind.PREFETCH, 0), (Kind.PREFETCH, 1)]


def test_prefetch_bounds_its_reads_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstream.tiered.cache.PREFETCH_IN_FLIGHT_BYTES", 2 * PAGE_BYTES)
    it, pages = bench(16, 6, prefetch=6)
    it.begin(pages[:6])
    in_flight = [transfer.entry.page.index for transfer in it.transfers]
    assert len(in_flight) == 2
    it.end()
    assert len(it.transfers) == 2


def test_uses_that_never_come_do_not_stop_prefetch() -> None:
    it, pages = bench(40, 4, prefetch=2)
    skipped, rest = pages[:10], pages[10:]
    it.begin(pages, pages)
    for page in rest:
        it.end_all()
        it.use(page)
    late = rest[15:26]
    fetched = [index for kind, index in it.log if kind is Kind.PREFETCH]
    assert {page.index for page in late} <= set(fetched)
    assert all(it.cache.entry(page).next_use >= 40 for page in skipped), "given up until the next step"


def test_a_use_out_of_order_gives_up_nothing() -> None:
    it, pages = bench(12, 4, prefetch=2)
    it.begin(pages)
    it.end_all()
    it.use(pages[11])
    assert [it.cache.entry(page).next_use for page in pages[:11]] == list(range(11))


def test_next_use_runs_through_the_step_and_then_around_what_follows() -> None:
    a, b, c = all_pages(uniform_layout(3))
    it = Bench(uniform_layout(3), 3)
    it.begin([a, b, a], [c, a])
    seen = []
    for _ in range(5):
        seen.append(it.cache.entry(a).next_use)
        it.use(a, Intent.UPDATE)
    assert seen == [0, 2, 4, 6, 8]
    assert it.cache.entry(c).next_use == 3
    it.use(c, scheduled=False)
    assert it.cache.entry(c).next_use == 3, "an unscheduled use consumes no position"
    it.begin([c, c])
    assert it.cache.entry(c).next_use == 0


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=40),
    st.lists(st.integers(0, 7), max_size=20),
    st.integers(2, 6),
    st.integers(0, 6),
    st.data(),
)
def test_window_books_are_right(
    step: list[int], following: list[int], frames: int, prefetch: int, data: st.DataObject
) -> None:
    """Bytes ahead, against a count from scratch after every use and every transfer."""
    it, pages = bench(8, frames, prefetch=prefetch)
    it.begin([pages[i] for i in step], [pages[i] for i in following])
    window = it.cache._window
    sequence = [*step, *(following * 4)]
    for index in sequence[: len(step) + len(following)]:
        if it.transfers and data.draw(st.booleans()):
            it.end(data.draw(st.integers(0, len(it.transfers) - 1)))
        it.use(pages[index])
        ahead = 0
        for position in range(window.end):
            page = window._schedule.page_at(position)
            assert page is not None
            ahead += it.cache.entry(page).next_use <= position
        assert window._ahead_bytes == ahead * PAGE_BYTES
        assert ahead <= prefetch


# Write-back


def test_what_fits_is_never_written() -> None:
    layout = layout_of(
        ("u", "weight", "uint8", 4 * PAGE_BYTES, True), ("u", "grad", "uint8", 4 * PAGE_BYTES, False)
    )
    it = Bench(layout, 8, prefetch=4, writeback=4)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    step = [*grads, *(page for pair in zip(grads, weights, strict=True) for page in pair)]
    it.begin(step, step)
    for _ in range(3):
        for grad in grads:
            it.use(grad, Intent.OVERWRITE)
        for grad, weight in zip(grads, weights, strict=True):
            it.use(grad, Intent.CONSUME)
            it.use(weight, Intent.UPDATE)
    assert it.log == []
    assert it.stats.evictions == 0


def test_gradients_that_are_used_up_in_time_never_touch_nvme() -> None:
    """Weights do not fit and are streamed; gradients are consumed before they would have to go."""
    layout = layout_of(
        ("u", "weight", "uint8", 12 * PAGE_BYTES, True), ("u", "grad", "uint8", 12 * PAGE_BYTES, False)
    )
    it = Bench(layout, 4, prefetch=2, writeback=2)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    it.fill(weights)
    step = [page for grad, weight in zip(grads, weights, strict=True) for page in (grad, grad, weight)]
    it.begin(step, step)
    for _ in range(3):
        for grad, weight in zip(grads, weights, strict=True):
            it.use(grad, Intent.OVERWRITE)
            it.use(grad, Intent.CONSUME)
            it.use(weight, Intent.UPDATE)
            it.end_all()
    assert not any(transfer.entry.page.plane == "grad" for transfer in it.transfers)
    assert it.stats.nvme_bytes_read == sum(kind is not Kind.WRITE for kind, _ in it.log) * PAGE_BYTES
    assert not it.cache.entry(grads[0]).stored
    assert it.stats.nvme_bytes_written > 0


def test_write_back_runs_ahead_of_need_within_its_bytes() -> None:
    it, pages = bench(12, 6, prefetch=3, writeback=2)
    it.begin(pages, pages)
    it.end_all()
    for page in pages[:4]:
        it.use(page, Intent.UPDATE)
        assert sum(transfer.kind is Kind.WRITE for transfer in it.transfers) <= 2
    writes = [index for kind, index in it.log if kind is Kind.WRITE]
    assert writes, "dirty victims are written before a request waits for them"
    it.end_all()
    assert all(transfer.kind is not Kind.DEMAND for transfer in it.transfers)


def test_a_dirty_page_is_read_back_as_it_was_written() -> None:
    it, pages = bench(4, 2)
    lease = it.ask((pages[0], Intent.OVERWRITE))
    it.end_all()
    lease.arrays[0].fill(9)
    it.release(lease)
    assert it.cache.entry(pages[0]).dirty
    frames: dict[int, Frame] = {}
    for page in pages[1:]:
        it.ask((page, Intent.READ), scheduled=False)
        for transfer in it.transfers:
            if transfer.kind is Kind.WRITE:
                frames[transfer.entry.page.index] = transfer.entry.view().copy()
        if len(frames):
            break
    assert np.array_equal(frames[0], np.full(PAGE_BYTES, 9, np.uint8))


def test_the_head_takes_its_pages_as_frames_become_free() -> None:
    it, pages = bench(8, 4)
    held = it.ask(*((page, Intent.READ) for page in pages[6:8]), scheduled=False)
    waiting = it.ask(*((page, Intent.READ) for page in pages[0:4]), scheduled=False)
    assert it.log == [(Kind.DEMAND, 0), (Kind.DEMAND, 1)], "reads start before all frames are there"
    assert not waiting.granted
    it.end_all()
    it.release(held)
    assert waiting.granted
    assert waiting.unfilled == 2
    it.end_all()
    assert not waiting.unfilled


def test_a_request_for_many_frames_writes_no_more_at_once_than_allowed() -> None:
    it, pages = bench(16, 8, writeback=2)
    for page in pages[8:]:
        it.use(page, Intent.UPDATE)
    lease = it.ask(*((page, Intent.READ) for page in pages[:8]), scheduled=False)
    most = 0
    while not lease.granted:
        most = max(most, sum(transfer.kind is Kind.WRITE for transfer in it.transfers))
        it.end()
    assert most == 2


def test_a_clean_page_does_not_go_in_place_of_the_dirty_victim() -> None:
    """Page 1 is dirty and used last, page 0 clean and used sooner: the request waits for page 1."""
    it, pages = bench(3, 2)
    it.use(pages[0])
    it.use(pages[1], Intent.UPDATE)
    it.end_all()
    it.begin([pages[2], pages[0], pages[1]])
    lease = it.ask((pages[2], Intent.READ))
    assert not lease.granted
    it.end()
    assert it.resident() == {0, 2}


def test_pages_needed_within_the_window_are_not_written_ahead() -> None:
    """All that is resident is dirty and used within the window; the missing page comes last."""
    it, pages = bench(5, 4, prefetch=5)
    for page in pages[1:]:
        it.use(page, Intent.UPDATE)
    it.begin([*pages[1:], pages[0]])
    assert it.log == []
    it.use(pages[1])
    assert it.log == [(Kind.WRITE, 1)]


def test_a_request_at_the_head_keeps_its_pages_while_others_read_them() -> None:
    it, pages = bench(6, 3)
    for page in pages[:3]:
        it.use(page)
    it.log.clear()
    held = it.ask((pages[1], Intent.READ))
    waiting = it.ask(*((pages[index], Intent.READ) for index in (0, 4, 5)))
    assert it.log == [(Kind.DEMAND, 4)]
    it.use(pages[0])
    it.end_all()
    assert not waiting.granted
    it.release(held)
    assert waiting.granted
    assert it.log == [(Kind.DEMAND, 4), (Kind.DEMAND, 5)], "page 0 was evicted and read again"


def test_discarding_a_page_in_transit_frees_its_frame_at_the_end() -> None:
    layout = layout_of(
        ("u", "weight", "uint8", 4 * PAGE_BYTES, True), ("u", "grad", "uint8", PAGE_BYTES, False)
    )
    it = Bench(layout, 2)
    (grad,), weights = layout.pages("u", "grad"), layout.pages("u", "weight")
    it.use(grad, Intent.OVERWRITE)
    it.fill(weights[:1])
    lease = it.ask((weights[1], Intent.OVERWRITE), (weights[2], Intent.OVERWRITE))
    assert [transfer.entry.page for transfer in it.transfers] == [grad]
    entry = it.cache.entry(grad)
    assert entry.state is State.WRITING
    it.cache.discard([entry])
    assert entry.state is State.WRITING
    it.end()
    assert entry.state is State.FREE
    assert lease.granted


# States


def test_illegal_transitions_are_bugs() -> None:
    layout = uniform_layout(2)
    frame = np.zeros(PAGE_BYTES, np.uint8)

    def entry() -> Entry:
        made = Entry(Page("unit", "weight", 0), layout)
        made.bind(frame, filling=False)
        made.stored = True
        return made

    free = Entry(Page("unit", "weight", 1), layout)
    for action in (free.view, free.unbind, free.start_fill, free.end_fill, free.end_write):
        with pytest.raises(InvariantError, match="it is free"):
            action()
    leased = entry()
    leased.lease(alone=True)
    assert leased.state is State.LEASED
    for illegal in (
        leased.unbind,
        leased.start_fill,
        lambda: leased.lease(alone=False),
        lambda: leased.lease(alone=True),
        lambda: leased.start_write(victim=False),
        lambda: leased.unlease(alone=False),
        lambda: leased.bind(frame, filling=False),
    ):
        with pytest.raises(InvariantError, match="it is leased"):
            illegal()
    writing = entry()
    writing.start_write(victim=True)
    writing.lease(alone=False)
    with pytest.raises(InvariantError, match="writing=True"):
        writing.lease(alone=True)
    with pytest.raises(InvariantError, match="writing=True"):
        writing.start_write(victim=True)
    writing.unlease(alone=False)
    with pytest.raises(InvariantError, match="it is writing"):
        writing.unbind()
    writing.end_write()
    assert writing.state is State.READY
    filling = entry()
    filling.start_fill()
    assert filling.state is State.FILLING
    with pytest.raises(InvariantError, match="it is filling"):
        filling.unbind()


def test_freed_frames_are_poisoned() -> None:
    layout = layout_of(
        ("u", "weight", "bfloat16", PAGE_BYTES, True), ("u", "grad", "float32", PAGE_BYTES // 4, False)
    )
    it = Bench(layout, 1)
    (grad,) = layout.pages("u", "grad")
    it.use(grad, Intent.OVERWRITE)
    frame = it.cache.entry(grad).view()
    frame.fill(1)
    it.use(grad, Intent.CONSUME)
    assert np.isnan(frame.view(np.float32)).all()
