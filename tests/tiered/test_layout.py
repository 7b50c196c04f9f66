"""Units, planes and pages against direct counts."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import layout_of

from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import TENSOR_ALIGN_ELEMENTS, UNIT_ALIGN_ELEMENTS, Page, pack_unit

tensor_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(0, 3)), min_size=1, max_size=12
)


@given(tensor_lists)
def test_tensors_of_a_unit_are_aligned_disjoint_and_sorted_by_group(
    tensors: list[tuple[list[int], int]],
) -> None:
    unit = pack_unit("u", "bfloat16", [(str(n), shape, group) for n, (shape, group) in enumerate(tensors)])
    assert sorted(spec.name for spec in unit.tensors) == sorted(map(str, range(len(tensors))))
    end = 0
    for spec in unit.tensors:
        assert spec.offset % TENSOR_ALIGN_ELEMENTS == 0
        assert spec.offset >= end
        assert spec.numel == int(np.prod(spec.shape))
        end = spec.end
    assert unit.numel % UNIT_ALIGN_ELEMENTS == 0
    assert 0 <= unit.numel - end < UNIT_ALIGN_ELEMENTS + TENSOR_ALIGN_ELEMENTS
    groups = [spec.group for spec in unit.tensors]
    assert groups == sorted(groups)


@given(tensor_lists)
def test_group_runs_cover_the_unit(tensors: list[tuple[list[int], int]]) -> None:
    unit = pack_unit("u", "bfloat16", [(str(n), shape, group) for n, (shape, group) in enumerate(tensors)])
    runs = unit.group_runs()
    assert runs[0][0] == 0
    assert runs[-1][1] == unit.numel
    assert all(run[1] == after[0] for run, after in pairwise(runs))
    assert len(runs) == len({group for _, group in tensors})
    for spec in unit.tensors:
        (run,) = [run for run in runs if run[0] <= spec.offset < run[1]]
        assert run[1] >= spec.end
        assert run[2] == spec.group


def test_parts_of_a_stack_lie_one_after_another() -> None:
    unit = pack_unit("u", "bfloat16", [("stack", (3, 5, 7), 2), ("vector", (9,), 3)])
    stack = unit.tensors[0]
    parts = stack.parts()
    assert [(part.name, part.shape, part.part, part.group) for part in parts] == [
        ("stack", (5, 7), index, 2) for index in range(3)
    ]
    assert [part.offset for part in parts] == [0, 35, 70]
    assert parts[-1].end == stack.end


def test_a_unit_without_tensors_has_no_runs() -> None:
    assert pack_unit("u", "float32", []).group_runs() == []


@given(
    st.integers(1, 30_000),
    st.sampled_from([("bfloat16", 2), ("uint16", 2), ("float32", 4), ("uint8", 1)]),
    st.sampled_from([4096, 8192, 12288]),
    st.data(),
)
def test_pages_tile_a_plane(numel: int, dtype: tuple[str, int], page_bytes: int, data: st.DataObject) -> None:
    name, item = dtype
    layout = layout_of(("u", "p", name, numel, True), page_bytes=page_bytes)
    pages = layout.pages("u", "p")
    spans = [layout.page_span(page) for page in pages]
    assert [element for start, end in spans for element in range(start, end)] == list(range(numel))
    assert len(pages) == layout.page_count("u", "p") == -(-numel * item // page_bytes)
    sizes = {layout.page_nbytes(page) for page in pages}
    assert sizes == ({numel * item} if numel * item <= page_bytes else {page_bytes})
    assert layout.nbytes(durable=True) == sum(map(layout.page_nbytes, pages))
    assert layout.nbytes(durable=False) == 0

    start = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(start + 1, numel))
    touched = [page for page, (low, high) in zip(pages, spans, strict=True) if low < end and start < high]
    assert layout.pages_over("u", "p", start, end) == touched
    pieces = list(layout.pieces("u", "p", start, end - start))
    assert [page for page, _, _ in pieces] == touched
    plane = np.arange(numel * item, dtype=np.uint32)
    got = [plane[page.index * page_bytes :][inside] for page, inside, _ in pieces]
    assert np.array_equal(np.concatenate(got), plane[start * item : end * item])
    outside = np.concatenate([np.arange((end - start) * item)[part] for _, _, part in pieces])
    assert np.array_equal(outside, np.arange((end - start) * item))
    assert list(layout.pieces("u", "p", start, 0)) == []


@pytest.mark.parametrize("page_bytes", [0, -4096, 4095, 6000])
def test_page_size_is_checked(page_bytes: int) -> None:
    with pytest.raises(InvariantError, match=f"page_bytes={page_bytes}"):
        layout_of(page_bytes=page_bytes)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (
            "bfloat16",
            [np.dtype("uint16"), np.dtype(ml_dtypes.bfloat16)],
            [np.dtype("float16"), np.dtype("float32")],
        ),
        ("uint16", [np.dtype("uint16")], [np.dtype("int16"), np.dtype(ml_dtypes.bfloat16), np.dtype(">u2")]),
        ("float32", [np.dtype("float32")], [np.dtype("uint32"), np.dtype("float64"), np.dtype(">f4")]),
        ("uint8", [np.dtype("uint8")], [np.dtype("int8"), np.dtype("bool")]),
    ],
)
def test_dtypes_of_ranges(dtype: str, good: list[np.dtype], bad: list[np.dtype]) -> None:
    layout = layout_of(("u", "p", dtype, 100, True))
    for other in good:
        values = np.zeros(10, other)
        view = layout.range_bytes("u", "p", 90, values)
        view[0] = 1
        assert values.tobytes()[0] == 1, "a view, not a copy"
    for other in bad:
        with pytest.raises(InvariantError, match=f"takes a flat {dtype} array"):
            layout.range_bytes("u", "p", 0, np.zeros(10, other))
    array = np.zeros((10, 10), good[0])
    for wrong in (array, array[:, 0]):
        with pytest.raises(InvariantError, match="flat"):
            layout.range_bytes("u", "p", 0, wrong)
    for start in (-1, 91, 101):
        with pytest.raises(InvariantError, match="are not in plane"):
            layout.range_bytes("u", "p", start, np.zeros(10, good[0]))
    with pytest.raises(InvariantError, match="u/q is not in the layout"):
        layout.range_bytes("u", "q", 0, array[0])


def test_pages_compare_by_value() -> None:
    assert Page("u", "p", 3) == Page("u", "p", 3) != Page("u", "p", 4)
