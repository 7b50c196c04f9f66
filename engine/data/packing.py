"""Samples on rows of equal length: which of them fit, and where each lies."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Packing = Literal["stream", "whole", "none"]
TooLong = Literal["cut", "drop", "error", "split"]

#: Samples that are packed with each other, and rows that they fill, at least: many, so that the last row of
#: them, often half empty, is one of many; and few enough for short searches.
WINDOW_SAMPLES, WINDOW_ROWS = 16384, 256


@dataclass(frozen=True, slots=True)
class Fit:
    """Documents of a store as samples.

    Attributes:
        documents: int64 [samples], those that are kept.
        lengths: int64 [samples], tokens of each on its rows.
        cut, cut_tokens: samples that are shortened, and by how many tokens in all.
        dropped: left out as too long. untrained: left out since no token on their rows is trained on.
    """

    documents: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cut: int
    cut_tokens: int
    dropped: int
    untrained: int


def fit(
    lengths: NDArray[np.int64], first_trained: NDArray[np.int64], seq_len: int, *, cut: bool, drop: bool
) -> Fit:
    """Samples no longer than `seq_len`, if either is asked for, each with at least one token to train on.

    Args:
        first_trained: the first token of each document that is trained on as a label; its length: none is.
        cut: what is too long is cut off. drop: samples that are too long are left out.
    """
    too_long = (lengths > seq_len) if cut or drop else np.zeros(lengths.size, np.bool_)
    kept_lengths = np.minimum(lengths, seq_len) if cut else lengths
    dropped = too_long if drop else np.zeros(lengths.size, np.bool_)
    untrained = ~dropped & (first_trained >= kept_lengths)
    documents = np.flatnonzero(~(dropped | untrained))
    shortened = documents[too_long[documents]]
    return Fit(
        documents,
        np.asarray(kept_lengths[documents], np.int64),
        cut=shortened.size,
        cut_tokens=int(lengths[shortened].sum()) - seq_len * shortened.size,
        dropped=int(dropped.sum()),
        untrained=int(untrained.sum()),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where samples lie on rows that are thought of end to end.

    Attributes:
        samples: int64 [samples], their numbers, in the order of their places.
        begins: int64 [samples], the position of each one's first token, ascending.
        lengths: int64 [samples], tokens of each. The last may lie where the next sample begins: it is then a
            label only.
        rows: rows that hold all of them.
    """

    samples: NDArray[np.int64]
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rows: int


def lay_out(samples: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int, packing: Packing) -> Layout:
    """Place samples, given in the order of an epoch.

    stream: end to end. whole: best fit, so that none lies on two rows. none: each begins a row, and goes on
    in the next ones if it is longer; a last token alone would predict nothing, and has no row of its own.
    """
    if packing == "whole":
        begins, rows = _best_fit(lengths, seq_len)
        order = np.argsort(begins, kind="stable")
        return Layout(samples[order], begins[order], lengths[order], rows)
    room = -(-(lengths - 1) // seq_len) * seq_len if packing == "none" else lengths
    ends = np.cumsum(room)
    total = int(ends[-1]) if ends.size else 0
    return Layout(samples, ends - room, lengths, -(-total // seq_len))


def _best_fit(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], int]:
    """Positions of samples none of which is longer than a row, and the rows.

    Best fit decreasing (Johnson et al., Worst-case performance bounds for simple one-dimensional packing
    algorithms, SIAM J. Comput. 1974) on each window of the order: the longest sample goes first, each to the
    row with the least room that suffices.
    """
    begins, rows = np.empty(lengths.size, np.int64), 0
    samples_of_rows = WINDOW_ROWS * seq_len * lengths.size // max(1, int(lengths.sum()))
    size = max(WINDOW_SAMPLES, samples_of_rows)
    for start in range(0, lengths.size, size):
        window = lengths[start : start + size]
        order = np.argsort(-window, kind="stable")
        placed, used = _place(window[order].tolist(), seq_len)
        begins[start + order] = np.array(placed, np.int64) + rows * seq_len
        rows += used
    return begins, rows


def _place(lengths: list[int], seq_len: int) -> tuple[list[int], int]:
    """Positions of samples of falling length, and the rows that they take."""
    shortest, rows = lengths[-1], 0
    # Rows with room for at least one more: room and number of the row in one integer, the least room first.
    base = len(lengths)
    open_rows: list[int] = []
    begins = []
    for length in lengths:
        best = bisect_left(open_rows, length * base)
        if best < len(open_rows):
            room, row = divmod(open_rows.pop(best), base)
        else:
            room, row = seq_len, rows
            rows += 1
        begins.append((row + 1) * seq_len - room)
        if room - length >= shortest:
            insort(open_rows, (room - length) * base + row)
    return begins, rows
