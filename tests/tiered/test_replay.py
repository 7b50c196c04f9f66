"""Recorded uses served again, and the optimum of them against exhaustive search."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import PAGE_BYTES, MemoryDirectory, all_pages, layout_of, uniform_layout

from tierstream.io.errors import BudgetError
from tierstream.tiered.layout import Page
from tierstream.tiered.lease import Intent
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.replay import (
    Acquire,
    Begin,
    Event,
    Moved,
    RecordingStore,
    Release,
    demand,
    ending,
    fewest_reads,
    foreseen,
    replay,
)

LAYOUT = uniform_layout(5)
PAGES = all_pages(LAYOUT)
#: A lease: which pages, whether they change, whether it lasts into the next one.
Leased = tuple[frozenset[int], bool, bool]
leases = st.lists(
    st.tuples(st.frozensets(st.integers(0, 4), min_size=1, max_size=2), st.booleans(), st.booleans()),
    min_size=1,
    max_size=14,
)


def recorded(trace: Sequence[Leased]) -> Iterator[Event]:
    """Leases that last are there to read; nobody changes a page that another one holds."""
    yield Begin([], [])
    held: tuple[int, frozenset[int]] | None = None
    for number, (pages, changed, lasting) in enumerate(trace):
        alone = changed and not lasting and (held is None or not held[1] & pages)
        intent = Intent.UPDATE if alone else Intent.READ
        yield Acquire(number, [(PAGES[index], intent) for index in sorted(pages)], True)
        if held is not None:
            yield Release(held[0])
        held = (number, pages)
        if not lasting:
            yield Release(number)
            held = None


def fewest_by_search(events: Sequence[Event], frames: int) -> int:
    """Least number of reads of any way to serve the events, by trying all of them."""

    @cache
    def search(at: int, resident: frozenset[Page], held: tuple[tuple[int, frozenset[Page]], ...]) -> int:
        if at == len(events):
            return 0
        event = events[at]
        if isinstance(event, Release):
            return search(at + 1, resident, tuple(lease for lease in held if lease[0] != event.number))
        if not isinstance(event, Acquire):
            return search(at + 1, resident, held)
        wanted = frozenset(page for page, _ in event.uses)
        fixed = wanted.union(*(pages for _, pages in held))
        free = sorted(resident - fixed)
        room = min(frames - len(fixed), len(free))
        now_held = (*held, (event.number, wanted))
        kept = (frozenset(chosen) for chosen in combinations(free, room))
        return len(wanted - resident) + min(search(at + 1, fixed | chosen, now_held) for chosen in kept)

    return search(0, frozenset(), ())


def served(events: Sequence[Event], frames: int, policy: str = "lookahead", prefetch: int = 0) -> Moved:
    return replay(
        LAYOUT,
        events,
        frames=frames,
        policy=POLICIES[policy],
        prefetch_bytes=prefetch * PAGE_BYTES,
        writeback_bytes=2 * PAGE_BYTES,
    )


@given(leases, st.integers(4, 5), st.sampled_from(sorted(POLICIES)), st.integers(0, 5))
def test_nothing_reads_less_than_the_optimum(
    trace: list[Leased], frames: int, policy: str, prefetch: int
) -> None:
    events = foreseen(list(recorded(trace)))
    fewest = fewest_reads(demand(LAYOUT, events), frames)
    assert fewest == fewest_by_search(events, frames)
    assert served(events, frames, policy, prefetch).reads.total() >= fewest


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=24), st.integers(1, 4))
def test_lookahead_that_reads_when_it_must_is_the_optimum(trace: list[tuple[int, bool]], frames: int) -> None:
    """One page at a time."""
    events = foreseen(list(recorded([(frozenset([index]), changed, False) for index, changed in trace])))
    fewest = fewest_reads(demand(LAYOUT, events), frames)
    assert served(events, frames).reads.total() == fewest == fewest_by_search(events, frames)


def test_what_the_store_moves_is_what_its_record_moves() -> None:
    """Durable pages, and step-local ones that are made and consumed in each step."""
    layout = layout_of(
        ("u", "weight", "uint8", 6 * PAGE_BYTES, True), ("u", "grad", "uint8", 3 * PAGE_BYTES, False)
    )
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    uses = [
        *((page, Intent.READ) for page in weights),
        *((page, Intent.OVERWRITE) for page in grads),
        *((page, Intent.READ) for page in reversed(weights)),
        *((page, Intent.CONSUME) for page in grads),
        *((page, Intent.UPDATE) for page in weights),
    ]
    pages = [page for page, _ in uses]
    with recording(layout, frames=4) as store:
        for page in weights:
            store.acquire([(page, Intent.OVERWRITE)], scheduled=False).release()
        store.flush()
        for page in grads:  # only the last weight stays in DRAM; a replay begins with none
            store.acquire([(page, Intent.OVERWRITE)], scheduled=False).release()
        store.discard(grads)
        store.events.clear()
        store.moved = Moved()
        for _ in range(4):
            store.begin_step(pages, pages)
            for use in uses:
                store.acquire([use]).release()
        again = replay(
            layout,
            store.events,
            frames=4,
            policy=POLICIES["lookahead"],
            prefetch_bytes=0,
            writeback_bytes=PAGE_BYTES,
        )
        at_best = fewest_reads(demand(layout, ending(store.events)), 4)
    assert again.reads.total() == store.moved.reads.total() + 1  # that weight
    assert at_best <= again.reads.total()


def test_the_record_of_many_threads_can_be_served_by_one() -> None:
    layout = uniform_layout(8)
    pages = all_pages(layout)
    with recording(layout, frames=7) as store:
        store.begin_step(pages * 3, pages)

        def use(first: int) -> None:
            for turn in range(12):
                pair = [pages[(first + turn) % 8], pages[(first + 3 * turn + 1) % 8]]
                intent = Intent.UPDATE if turn % 3 else Intent.READ
                store.acquire([(page, intent) for page in dict.fromkeys(pair)]).release()

        threads = [threading.Thread(target=use, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(event, Acquire) for event in store.events) == 36
        assert max(demand(layout, store.events).leased) <= 6
        moved = replay(
            layout,
            store.events,
            frames=7,
            policy=POLICIES["lru"],
            prefetch_bytes=3 * PAGE_BYTES,
            writeback_bytes=PAGE_BYTES,
        )
    assert moved.reads.total() >= fewest_reads(demand(layout, store.events), 7) >= 8


def test_leases_that_do_not_fit_have_no_optimum() -> None:
    events = list(recorded([(frozenset([0, 1]), False, True), (frozenset([2, 3]), False, False)]))
    assert fewest_reads(demand(LAYOUT, events), 4) == 4
    with pytest.raises(BudgetError, match="too few frames"):
        served(events, 3)
    with pytest.raises(BudgetError, match="4 pages were leased at once, and there are 3 frames"):
        fewest_reads(demand(LAYOUT, events), 3)


def recording(layout: object, *, frames: int) -> RecordingStore:
    return RecordingStore(
        layout,
        dram_bytes=frames * PAGE_BYTES,
        directory=MemoryDirectory(threads=1),
        prefetch_bytes=0,
        writeback_bytes=PAGE_BYTES,
    )
