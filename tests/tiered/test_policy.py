"""Eviction against oracles: exhaustive search for the optimum, a list for LRU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import MemoryDirectory, all_pages, uniform_layout

from tierstream.io.errors import ConfigError, InvariantError
from tierstream.tiered.policy import NEVER, Candidates, Lookahead, Lru
from tierstream.tiered.store import Intent, Store


@dataclass(eq=False)
class Item:
    name: str
    next_use: int = NEVER
    last_use: int = 0
    dirty: bool = False
    durable: bool = True


def fewest_misses(trace: Sequence[int], frames: int) -> int:
    """Least number of misses of any eviction rule, by trying all of them."""

    @cache
    def search(position: int, held: frozenset[int]) -> int:
        if position == len(trace):
            return 0
        page = trace[position]
        if page in held:
            return search(position + 1, held)
        if len(held) < frames:
            return 1 + search(position + 1, held | {page})
        return 1 + min(search(position + 1, held - {victim} | {page}) for victim in held)

    return search(0, frozenset())


def lru_misses(trace: Sequence[int], frames: int) -> int:
    held: list[int] = []
    misses = 0
    for page in trace:
        if page in held:
            held.remove(page)
        else:
            misses += 1
            if len(held) == frames:
                held.pop(0)
        held.append(page)
    return misses


def store_misses(trace: Sequence[int], frames: int, policy: str) -> int:
    """Reads that the store makes, one page at a time, for pages that all start on NVMe."""
    layout = uniform_layout(8)
    pages = all_pages(layout)
    size = layout.page_bytes
    with Store(
        layout,
        dram_bytes=frames * size,
        directory=MemoryDirectory(threads=1),
        policy=policy,
        prefetch_bytes=0,
        writeback_bytes=size,
    ) as store:
        for page in pages:
            store.acquire([(page, Intent.OVERWRITE)]).release()
        store.flush()
        # Pages that the traces do not use take the frames first, so that the trace starts cold.
        for page in pages[-frames:]:
            store.acquire([(page, Intent.READ)], scheduled=False).release()
        schedule = [pages[index] for index in trace]
        store.begin_step(schedule, [])
        before = store.stats.copy()
        for page in schedule:
            store.acquire([(page, Intent.READ)]).release()
        assert store.stats.hits + store.stats.misses - before.hits - before.misses == len(trace)
        return store.stats.misses - before.misses


traces = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@given(traces, st.integers(1, 3))
def test_lookahead_makes_the_fewest_misses_possible(trace: list[int], frames: int) -> None:
    assert store_misses(trace, frames, "lookahead") == fewest_misses(tuple(trace), frames)


@given(traces, st.integers(1, 3))
def test_lru_makes_the_misses_of_lru(trace: list[int], frames: int) -> None:
    assert store_misses(trace, frames, "lru") == lru_misses(trace, frames)


def test_a_cyclic_scan_is_where_lookahead_beats_lru() -> None:
    trace = [0, 1, 2, 3, 4] * 4
    assert lru_misses(trace, 3) == store_misses(trace, 3, "lru") == len(trace)
    assert store_misses(trace, 3, "lookahead") == fewest_misses(tuple(trace), 3) < len(trace)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.sampled_from(["add", "remove"]),
            st.integers(0, 5),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=120,
    ),
    st.sampled_from([Lru(), Lookahead()]),
)
def test_candidates_give_the_smallest_rank(
    operations: list[tuple[int, str, int, int, bool]], policy: Lru | Lookahead
) -> None:
    """Against a plain minimum over what is in."""
    items = [Item(str(number)) for number in range(10)]
    candidates: Candidates[Item] = Candidates(policy)
    held: list[Item] = []

    def rank(item: Item) -> tuple[int, int, int]:
        return policy.rank(item.next_use, item.last_use, item.dirty)

    for number, action, next_use, last_use, dirty in operations:
        item = items[number]
        assert candidates.remove(item) == (item in held)
        if item in held:
            held.remove(item)
        if action == "add":
            item.next_use, item.last_use, item.dirty = next_use, last_use, dirty
            candidates.add(item)
            held.append(item)
        assert len(candidates) == len(held)
        best = candidates.best(0)
        assert (best is None) == (not held)
        assert best is None or rank(best) == min(map(rank, held))


def test_dead_items_do_not_pile_up() -> None:
    candidates: Candidates[Item] = Candidates(Lookahead())
    items = [Item(str(number)) for number in range(100)]
    for turn in range(1000):
        for item in items:
            candidates.remove(item)
            item.next_use = turn
            candidates.add(item)
    assert len(candidates._plain._items) < 1000


def test_at_equal_distance_the_clean_page_goes() -> None:
    candidates: Candidates[Item] = Candidates(Lookahead())
    dirty, clean = Item("dirty", 5, 1, True), Item("clean", 5, 2, False)
    candidates.add(dirty)
    candidates.add(clean)
    assert candidates.best(0) is clean


def test_a_page_spills_only_in_place_of_one_that_is_used_soon() -> None:
    candidates: Candidates[Item] = Candidates(Lookahead())
    gradient, weight = Item("gradient", 109, dirty=True, durable=False), Item("weight", 102)
    candidates.add(gradient)
    candidates.add(weight)
    assert candidates.best(99) is weight
    assert candidates.best(100) is gradient, "4 times as far, and one more"
    candidates.remove(weight)
    assert candidates.best(0) is gradient


def test_adding_a_candidate_twice_is_a_bug() -> None:
    candidates: Candidates[Item] = Candidates(Lru())
    item = Item("page")
    candidates.add(item)
    with pytest.raises(InvariantError):
        candidates.add(item)


def test_unknown_policy_is_named_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'.*lru, lookahead"):
        Store(
            uniform_layout(1),
            dram_bytes=1 << 20,
            directory=None,
            policy="fifo",
            prefetch_bytes=0,
            writeback_bytes=0,
        )
