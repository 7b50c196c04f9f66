"""Prefetch on the schedule: what it brings, when, and what it keeps away from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_bench import Bench, bench
from support.stores import PAGE_BYTES, all_pages, uniform_layout

from tierstream.tiered.cache import Kind
from tierstream.tiered.lease import Intent


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


def test_a_page_that_was_read_ahead_is_a_recent_one_to_lru() -> None:
    it, pages = bench(6, 3, prefetch=2, policy="lru")
    it.use(pages[5], scheduled=False)
    it.begin([pages[0], pages[1]])
    it.end_all()
    it.use(pages[3], scheduled=False)
    assert it.log == [(Kind.PREFETCH, 0), (Kind.PREFETCH, 1), (Kind.DEMAND, 3)], "0 is read again"


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
