"""Rows of a step: the samples of an epoch, mixed, packed on rows of equal length, the rows shuffled.

Everything is a pure function of (seed, step): there is no position to save, and a resumed run sees the rows
of an unbroken one. In memory is where the samples of an epoch lie (24 bytes each) and the order of its rows,
never the tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.mixture import ROWS, Mixture, draw_order
from tierstream.engine.data.packing import Fit, Layout, Packing, fit, lay_out
from tierstream.engine.data.samples import UNTRAINED
from tierstream.engine.data.shards import TokenStore
from tierstream.io.errors import ConfigError, DataError

#: Label of a position that is not trained on; the default `ignore_index` of torch's cross-entropy.
NOT_TRAINED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step; arrays int64 [rows, seq_len] if nothing else is said.

    Attributes:
        labels: the next token, `NOT_TRAINED` where there is none or it is not trained on; already shifted.
        position_ids: from 0 at every row and, with isolated documents, at every document.
        trained_tokens: labels that count.
        padding: bool [rows, seq_len], positions that hold no token; None: there are none.
        samples: how many begin on these rows.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    trained_tokens: int
    padding: NDArray[np.bool_] | None
    samples: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What samples have on the rows of a step; arrays int64 [pieces], in the order of rows and columns.

    Attributes:
        rows: within the step. samples: their numbers.
        begins, ends: columns of the whole sample; before 0 and beyond the row on other rows.
    """

    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


class Rows:
    """The rows of a run.

    An epoch is the samples that `Mixture` draws for it, laid on rows (`packing.lay_out`), and the rows are
    trained on in an order of their own, so that a step does not hold neighbouring pieces of one document. A
    step never crosses the end of an epoch: the last one of an epoch is filled up with rows of padding.

    On the rows a sample that does not fit goes on in the next one, without what came before; the label of the
    row's last token is then the first token of that row.

    Args:
        stores: one for each entry of `data.files`.
        data: `isolate_documents`: no label is predicted across a document's end (the end-of-text token
            predicts nothing), and positions restart, which is how the attention masks of transformers
            recognise packed documents.

    Raises:
        DataError: there is nothing to train on, or a sample is too long where `data.too_long` is error.
        ConfigError: `data.weights` leave an epoch empty.
    """

    def __init__(
        self, stores: Sequence[TokenStore], data: DataConfig, *, rows_per_step: int, seed: int
    ) -> None:
        self.stores, self.rows_per_step, self.seq_len = stores, rows_per_step, data.seq_len
        self.packing = choose_packing(data, stores)
        self._data, self._seed = data, seed
        self._fits = [fit_samples(store, data, self.packing) for store in stores]
        self._documents = np.concatenate([each.documents for each in self._fits])
        self._lengths = np.concatenate([each.lengths for each in self._fits])
        counts = [each.documents.size for each in self._fits]
        self._entry_ends = np.cumsum(counts)
        self._weights = data.weights or [1.0] * len(stores)
        self._mixture = Mixture(counts, self._weights, seed)
        self._epoch = lru_cache(maxsize=1)(self._lay_out)
        self._order = lru_cache(maxsize=1)(self._draw_rows)
        self._check_not_empty()
        self._first_steps = [0]  # of epochs, as far as they are known

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens of the documents; neither with `seq_len` nor with the seed."""
        return hashlib.sha256(json.dumps([store.fingerprint for store in self.stores]).encode()).hexdigest()

    def total_steps(self, epochs: float) -> int:
        """Steps that so many epochs take, at least 1."""
        whole, rest = int(epochs), epochs - int(epochs)
        steps = self._first_step(whole)
        if rest:
            steps += round(rest * (self._first_step(whole + 1) - steps))
        return max(1, steps)

    def epochs(self, steps: int) -> float:
        """Epochs that are done after so many steps, at least 1."""
        epoch, step = self._locate(steps - 1)
        return epoch + (step + 1) / (self._first_step(epoch + 1) - self._first_step(epoch))

    def rows_of_step(self, step: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch of a step, and its rows there; fewer than `rows_per_step` at the end of the epoch."""
        epoch, number = self._locate(step)
        begin = number * self.rows_per_step
        return epoch, self._order(epoch)[begin : begin + self.rows_per_step]

    def samples(self, step: int) -> list[tuple[int, int]]:
        """(entry, document) of all that have tokens on the rows of a step, in their order."""
        numbers = self._pieces(step).samples
        return list(zip(self._entries(numbers).tolist(), self._documents[numbers].tolist(), strict=True))

    def where(self, step: int) -> list[str]:
        """file:line of `samples`."""
        return [self.stores[entry].where(document) for entry, document in self.samples(step)]

    def batch(self, step: int) -> Batch:
        """The rows of a step, counted from 0 over all epochs."""
        pieces, shape = self._pieces(step), (self.rows_per_step, self.seq_len)
        ids, filled = self._read(pieces)
        following, columns = ids[:, 1:], np.arange(self.seq_len)
        labels = np.where(following & UNTRAINED, NOT_TRAINED, following.astype(np.int64))
        position_ids = np.broadcast_to(columns, shape).copy()
        if self._data.isolate_documents:
            inside = pieces.begins > 0
            labels[pieces.rows[inside], pieces.begins[inside] - 1] = NOT_TRAINED
            restarts = np.zeros((self.rows_per_step, self.seq_len + 1), np.int64)
            restarts[pieces.rows[inside], pieces.begins[inside]] = pieces.begins[inside]
            restarts[np.arange(self.rows_per_step), filled] = filled  # padding is a document of its own
            position_ids -= np.maximum.accumulate(restarts[:, :-1], axis=1)
        padding = columns >= filled[:, np.newaxis]
        return Batch(
            (ids[:, :-1] & ~UNTRAINED).astype(np.int64),
            labels,
            position_ids,
            trained_tokens=int(np.count_nonzero(labels != NOT_TRAINED)),
            padding=padding if padding.any() else None,
            samples=int(np.count_nonzero((pieces.begins >= 0) & (pieces.begins < self.seq_len))),
        )

    def cursor(self, steps: int) -> None:
        """What a checkpoint must hold of the rows after so many steps: nothing."""

    def describe(self) -> list[str]:
        """What the first epoch holds, and what was left out, in lines for the user."""
        layout, steps = self._epoch(0), self.total_steps(1)
        tokens = np.bincount(self._entries(layout.samples), layout.lengths, len(self.stores))
        padding = max(0.0, 1 - tokens.sum() / (layout.rows * self.seq_len))
        lines = [
            f"{layout.samples.size} samples on {layout.rows} rows of {self.seq_len} tokens (packing "
            f"{self.packing}), {steps} steps an epoch; {100 * padding:.1f}% padding"
        ]
        cut, lost, dropped, untrained = self._left_out()
        if cut:
            lines.append(f"{cut} samples are longer than a row and are cut, by {lost} tokens in all")
        if dropped:
            lines.append(f"{dropped} samples are longer than a row and are left out")
        if untrained:
            lines.append(f"{untrained} samples have no token to train on within a row and are left out")
        if len(self.stores) > 1:
            shares = zip(self._data.files, self._weights, tokens / tokens.sum(), strict=True)
            lines += [f"{name}: {100 * share:.1f}% of the tokens, weight {w:g}" for name, w, share in shares]
        return lines

    def padding_warning(self) -> str | None:
        """What to say of steps with more rows than an epoch has: they are computed in full."""
        rows = self._epoch(0).rows
        if rows >= self.rows_per_step:
            return None
        return (
            f"train.rows_per_step is {self.rows_per_step}, and an epoch has {rows} rows: each step is filled "
            f"up with {self.rows_per_step - rows} rows of padding, which are computed like others; lower "
            f"train.rows_per_step to {rows}, give more data, or lower data.seq_len"
        )

    def left_out(self) -> list[str]:
        """file:line of the samples that are never trained on: too long, or without a token to train on."""
        return [
            store.where(document)
            for store, kept in zip(self.stores, self._fits, strict=True)
            for document in np.setdiff1d(np.arange(store.documents), kept.documents).tolist()
        ]

    def _left_out(self) -> tuple[int, int, int, int]:
        """Samples that are cut, tokens they lose, samples that are dropped, those without a trained token."""
        each = [(fit.cut, fit.cut_tokens, fit.dropped, fit.untrained) for fit in self._fits]
        cut, lost, dropped, untrained = map(sum, zip(*each, strict=True))
        return cut, lost, dropped, untrained

    def _check_not_empty(self) -> None:
        if not self._documents.size:
            _, _, dropped, untrained = self._left_out()
            raise DataError(
                f"0 trainable tokens: of {sum(store.documents for store in self.stores)} samples {untrained} "
                f"have no token to train on within a row of {self.seq_len} tokens, and {dropped} are dropped "
                "as longer than that; raise data.seq_len, or look at what is trained on"
            )
        if not self._epoch(0).rows:
            raise ConfigError(
                f"data.weights is {self._weights}, which rounds to no sample at all in the first epoch; "
                "raise them"
            )

    def _lay_out(self, epoch: int) -> Layout:
        samples = self._mixture.samples(epoch)
        return lay_out(samples, self._lengths[samples], self.seq_len, self.packing)

    def _draw_rows(self, epoch: int) -> NDArray[np.int64]:
        """The rows of an epoch in the order in which they are trained on."""
        return draw_order(self._seed, epoch, self._epoch(epoch).rows, stream=ROWS)

    def _first_step(self, epoch: int) -> int:
        """Steps of all epochs before this one; how many an epoch has can depend on its order."""
        while len(self._first_steps) <= epoch:
            rows = self._epoch(len(self._first_steps) - 1).rows
            self._first_steps.append(self._first_steps[-1] + math.ceil(rows / self.rows_per_step))
        return self._first_steps[epoch]

    def _locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the step's number there."""
        while self._first_steps[-1] <= step:
            self._first_step(len(self._first_steps))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def _pieces(self, step: int) -> _Pieces:
        epoch, rows = self.rows_of_step(step)
        layout, starts = self._epoch(epoch), rows * self.seq_len
        first = np.searchsorted(layout.begins, starts, "right") - 1
        # In a stream the first token of the row that follows may be a label, whatever document it begins.
        stops = starts + self.seq_len + (self.packing == "stream")
        counts = np.searchsorted(layout.begins, stops, "left") - first
        row_of = np.repeat(np.arange(rows.size), counts)
        places = np.arange(row_of.size) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begins = layout.begins[places] - starts[row_of]
        return _Pieces(row_of, layout.samples[places], begins, begins + layout.lengths[places])

    def _read(self, pieces: _Pieces) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Tokens [rows_per_step, seq_len + 1] with the bit `UNTRAINED`, the one that follows each row among
        them, and how many of `seq_len` each row has; where there are none, end-of-text with the bit.
        """
        ids = np.full((self.rows_per_step, self.seq_len + 1), self.stores[0].end_of_text_id, np.uint32)
        ids |= UNTRAINED
        low, high = np.maximum(pieces.begins, 0), np.minimum(pieces.ends, self.seq_len + 1)
        columns = (
            self._entries(pieces.samples), self._documents[pieces.samples],
            low - pieces.begins, high - pieces.begins, pieces.rows, low, high,
        )  # fmt: skip
        for entry, document, start, stop, row, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            ids[row, begin:end] = self.stores[entry].read(document, start, stop)
        filled = np.zeros(self.rows_per_step, np.int64)
        np.maximum.at(filled, pieces.rows, np.minimum(high, self.seq_len))
        return ids, filled

    def _entries(self, numbers: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.searchsorted(self._entry_ends, numbers, "right")


def choose_packing(data: DataConfig, stores: Sequence[TokenStore]) -> Packing:
    """`data.packing`, decided."""
    if data.packing != "auto":
        return data.packing
    plain = all(store.counts.by_format.keys() <= {"text"} and not store.masked for store in stores)
    return "stream" if plain else "whole"


def fit_samples(store: TokenStore, data: DataConfig, packing: Packing) -> Fit:
    """The documents of a store that are trained on.

    Raises:
        DataError: one is too long where `data.too_long` is error.
    """
    mode = "split" if packing == "stream" else data.too_long
    if mode == "error":
        too_long = np.flatnonzero(store.lengths > data.seq_len)
        if too_long.size:
            first = int(too_long[0])
            raise DataError(
                f"{store.where(first)}: this sample has {store.lengths[first]} tokens, but a row "
                f"(data.seq_len) only {data.seq_len}, and so it is with {too_long.size} samples; raise "
                "data.seq_len, or set data.too_long to cut or drop"
            )
    return fit(store.lengths, store.first_trained, data.seq_len, cut=mode == "cut", drop=mode == "drop")
