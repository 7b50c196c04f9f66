"""Samples on rows: which fit, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstream.engine.data import packing
from tierstream.engine.data.packing import fit, lay_out


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=60), window=st.integers(1, 70))
def test_whole_samples_share_rows_and_none_is_cut(lengths: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_SAMPLES", window)
        patch.setattr(packing, "WINDOW_ROWS", 1)
        found = lay_out(np.arange(len(lengths)), np.array(lengths), 20, "whole")
    assert sorted(found.samples.tolist()) == list(range(len(lengths)))
    assert found.lengths.tolist() == [lengths[sample] for sample in found.samples]
    rows = found.begins // 20
    assert ((found.begins + found.lengths - 1) // 20 == rows).all()
    assert set(rows.tolist()) == set(range(found.rows))
    ends = found.begins + found.lengths
    same_row = rows[1:] == rows[:-1]
    assert (found.begins[1:][same_row] == ends[:-1][same_row]).all()  # no gap within a row
    assert (found.begins[np.append(True, ~same_row)] % 20 == 0).all()


def test_best_fit_by_hand() -> None:
    """The longest first, each where least room is left."""
    found = lay_out(np.arange(5), int64(3, 7, 5, 2, 3), 10, "whole")
    assert dict(zip(found.samples.tolist(), found.begins.tolist(), strict=True)) == {
        1: 0, 0: 7, 2: 10, 4: 15, 3: 18,
    }  # fmt: skip
    assert found.rows == 2


def test_windows_are_packed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW_SAMPLES", 2)
    monkeypatch.setattr(packing, "WINDOW_ROWS", 1)
    found = lay_out(np.arange(4), int64(6, 7, 4, 3), 10, "whole")
    assert found.samples.tolist() == [1, 0, 2, 3]
    assert found.begins.tolist() == [0, 10, 20, 24]


def test_many_samples_are_packed_nearly_without_padding() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1, 100_000).astype(np.int64) + 2, 4096)
    found = lay_out(np.arange(lengths.size), lengths, 4096, "whole")
    assert lengths.sum() / (4096 * found.rows) > 0.999


def test_short_samples_fill_long_rows() -> None:
    """However many it takes."""
    found = lay_out(np.arange(200_000), np.full(200_000, 20), 1 << 17, "whole")
    assert found.rows == -(-200_000 // ((1 << 17) // 20))


def test_streams_lie_end_to_end() -> None:
    found = lay_out(int64(4, 2), int64(7, 6), 10, "stream")
    assert (found.samples.tolist(), found.begins.tolist(), found.rows) == ([4, 2], [0, 7], 2)


def test_each_begins_a_row_and_its_last_token_needs_none_of_its_own() -> None:
    found = lay_out(np.arange(5), int64(10, 2, 11, 12, 21), 10, "none")
    assert (found.begins.tolist(), found.rows) == ([0, 10, 20, 30, 50], 7)


@pytest.mark.parametrize("kind", ["stream", "whole", "none"])
def test_no_samples_take_no_rows(kind: packing.Packing) -> None:
    assert lay_out(int64(), int64(), 10, kind).rows == 0


@pytest.mark.parametrize(
    ("cut", "drop", "documents", "lengths", "counts"),
    [
        (False, False, [0, 1, 3, 4], [5, 10, 11, 30], (0, 0, 0, 1)),
        (True, False, [0, 1, 3], [5, 10, 10], (1, 1, 0, 2)),
        (False, True, [0, 1], [5, 10], (0, 0, 2, 1)),
    ],
)
def test_what_fits(
    cut: bool, drop: bool, documents: list[int], lengths: list[int], counts: tuple[int, ...]
) -> None:
    """Document 2 has no trained token at all, document 4 none within 10 tokens."""
    found = fit(int64(5, 10, 7, 11, 30), int64(1, 9, 7, 4, 10), 10, cut=cut, drop=drop)
    assert (found.documents.tolist(), found.lengths.tolist()) == (documents, lengths)
    assert (found.cut, found.cut_tokens, found.dropped, found.untrained) == counts
