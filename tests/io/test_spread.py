"""Pages on drives: in proportion to their weights, never beyond their space, the same every time."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.io.errors import InvariantError, StorageError
from tierstream.io.spread import Root, Spread

AMPLE = 1 << 60

Pages = list[tuple[int, int]]

pages_and_sizes = st.lists(st.integers(1, 64), max_size=200).map(lambda sizes: list(enumerate(sizes)))
weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


def roots_of(weights: Sequence[float], capacities: Sequence[int] = (), volumes: str = "") -> list[Root]:
    """`/a`, `/b` ...; by default each with a volume of its own that never fills."""
    return [
        Root(
            directory=f"/{chr(97 + number)}",
            weight=weight,
            capacity_bytes=capacities[number] if capacities else AMPLE,
            volume=volumes[number] if volumes else number,
        )
        for number, weight in enumerate(weights)
    ]


def filled(spread: Spread[int], pages: Pages, count: int) -> list[int]:
    sums = [0] * count
    for page, nbytes in pages:
        sums[spread.index_of(page)] += nbytes
    return sums


@given(pages_and_sizes, weights)
def test_each_root_is_within_one_page_of_its_share(pages: Pages, weights: list[float]) -> None:
    """After every page: reading them in order keeps the drives busy in proportion."""
    spread = Spread(roots_of(weights), pages)
    sums, total = [0] * len(weights), 0
    largest = max((nbytes for _, nbytes in pages), default=0)
    for page, nbytes in pages:
        sums[spread.index_of(page)] += nbytes
        total += nbytes
        for done, weight in zip(sums, weights, strict=True):
            assert abs(done - total * weight / sum(weights)) <= largest * (1 + 1e-9)
    assert spread.nbytes == tuple(sums)


@given(st.integers(1, 300), st.integers(2, 12))
def test_a_heavy_root_among_light_ones_does_not_run_ahead(count: int, light: int) -> None:
    """The least (bytes + page) / weight alone would give it up to `light` / 2 pages too many."""
    weights = [light, *[1.0] * light]
    pages = [(number, 4096) for number in range(count)]
    heavy = filled(Spread(roots_of(weights), pages), pages, len(weights))[0]
    assert abs(heavy - 4096 * count / 2) <= 4096


@given(pages_and_sizes, st.data())
def test_never_beyond_the_space_and_all_placed_or_refused(pages: Pages, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    numbers = data.draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    free = {volume: data.draw(st.integers(0, 1500)) for volume in "xyz"}
    volumes = "".join(data.draw(st.sampled_from("xyz")) for _ in range(count))
    roots = roots_of(numbers, [free[volume] for volume in volumes], volumes)
    try:
        spread = Spread(roots, pages)
    except StorageError:
        # One byte less than a page may be left on each volume.
        largest = max(nbytes for _, nbytes in pages)
        used = {root.volume for root in roots}
        assert sum(nbytes for _, nbytes in pages) > sum(free[v] for v in used) - len(used) * (largest - 1) - 1
        with pytest.raises(StorageError):
            Spread(roots, pages)
        return
    sums = filled(spread, pages, count)
    assert spread.nbytes == tuple(sums)
    for volume in set(volumes):
        on_it = sum(nbytes for nbytes, root in zip(sums, roots, strict=True) if root.volume == volume)
        assert on_it <= free[volume]  # type: ignore[index]
    again = Spread(roots, pages)
    assert [again.index_of(page) for page, _ in pages] == [spread.index_of(page) for page, _ in pages]


def test_pages_of_one_size_alternate_by_weight() -> None:
    pages = [(number, 4096) for number in range(12)]
    even = Spread(roots_of([1, 1, 1]), pages)
    assert [even.index_of(number) for number in range(12)] == [0, 1, 2] * 4
    double = Spread(roots_of([2, 1]), pages)
    assert [double.index_of(number) for number in range(12)] == [0, 0, 1] * 4


def test_a_root_that_is_full_leaves_the_rest_to_the_others() -> None:
    pages = [(number, 10) for number in range(10)]
    spread = Spread(roots_of([1, 1, 2], [20, AMPLE, AMPLE]), pages)
    assert spread.nbytes == (20, 30, 50)


def test_exactly_enough_on_one_shared_file_system() -> None:
    pages = [(number, 10) for number in range(9)]
    assert sum(Spread(roots_of([1, 1], [90, 90], "xx"), pages).nbytes) == 90
    with pytest.raises(StorageError, match="directories on one file system share its space"):
        Spread(roots_of([1, 1], [89, 89], "xx"), pages)


def test_no_room_names_every_root_with_both_numbers() -> None:
    pages = [(number, 1 << 20) for number in range(40)]
    with pytest.raises(StorageError) as caught:
        Spread(roots_of([3, 1], [8 << 20, 31 << 20]), pages)
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert "spreading 40.00 MiB (41943040 bytes) over /a, /b failed: No space left on device" in text
    assert "/a would need 30.00 MiB (31457280 bytes), 8.00 MiB (8388608 bytes) are free" in text
    assert "/b would need 10.00 MiB (10485760 bytes), 31.00 MiB (32505856 bytes) are free" in text
    assert text.endswith("free space or name a directory on another drive")
    assert "share its space" not in text
    Spread(roots_of([3, 1], [8 << 20, 32 << 20]), pages)


def test_loose_pages_take_what_room_is_left_and_need_none() -> None:
    pages, loose = [(number, 10) for number in range(4)], [(number, 10) for number in range(4, 10)]
    spread = Spread(roots_of([1, 1], [20, 40]), pages, loose)
    assert spread.nbytes == (20, 20)
    assert [spread.index_of(number) for number in (4, 5)] == [1, 1]
    assert [spread.index_of(number) for number in range(6, 10)] == [0, 0, 0, 1], "full: weights alone"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive(weight: float) -> None:
    with pytest.raises(InvariantError, match=r"/a: weight .* is not positive"):
        roots_of([weight])
