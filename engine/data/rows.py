"""Training rows: documents shuffled anew every epoch, put end to end, cut into rows of equal length; the rows
are shuffled.

Everything is a pure function of (seed, step): there is no position to save, and a resumed run sees the rows
of an unbroken one. In memory are the order of the documents and where each begins (16 bytes each and epoch)
and the order of the rows (8 bytes each and epoch), never the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.tokens import TokenStore

#: Label of a position that is not trained on; the default `ignore_index` of torch's cross-entropy.
NOT_TRAINED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step; arrays int64 [rows, seq_len] if nothing else is said.

    Attributes:
        labels: the next token, `NOT_TRAINED` where there is none; already shifted.
        position_ids: from 0 at every row and, with isolated documents, at every document.
        trained_tokens: labels that count.
        padding: bool [rows, seq_len], positions that hold no token; None: there are none.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    trained_tokens: int
    padding: NDArray[np.bool_] | None


class PackedRows:
    """The rows of a token store.

    An epoch is all documents in an order drawn from (seed, epoch), end to end, cut into rows of `seq_len`.
    The rows are trained on in an order of their own, so that a step does not hold neighbouring pieces of one
    document. No token is left out, so the last row of an epoch ends in padding that is not trained on. A
    document that does not fit goes on in the next row, without what came before. The label after a row's last
    token is the first token of the row that follows in the stream. Without `pack` each document is cut by
    itself, and its last row ends in padding.

    Args:
        isolate_documents: no label is predicted across a document's end (the end-of-text token predicts
            nothing), and positions restart, which is how the attention masks of transformers recognise packed
            documents.
    """

    def __init__(
        self, store: TokenStore, *, seq_len: int, seed: int, isolate_documents: bool, pack: bool = True
    ) -> None:
        self.store, self.seq_len, self.seed, self.isolate_documents = store, seq_len, seed, isolate_documents
        self.pack = pack
        self._lengths = np.diff(store.offsets)  # of the documents, on the rows of an epoch
        if not pack:
            self._lengths = -(-self._lengths // seq_len) * seq_len
        self.rows_per_epoch = -(-int(self._lengths.sum()) // seq_len)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)  # a step may lie across the end of an epoch
        self._row_order = lru_cache(maxsize=2)(self._draw_rows)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokens of the documents; neither with `seq_len` nor with the seed."""
        return self.store.index.fingerprint

    def row_ids(self, step: int, rows: int) -> NDArray[np.int64]:
        """int64 [rows, 2]: epoch, and row within it, of each row of a step."""
        numbers = np.arange(step * rows, (step + 1) * rows, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.rows_per_epoch)
        drawn = [self._row_order(epoch)[place] for epoch, place in zip(epochs.tolist(), places, strict=True)]
        return np.stack([epochs, np.array(drawn, np.int64)], axis=1)

    def batch(self, step: int, rows: int) -> Batch:
        """Rows `step * rows` to `(step + 1) * rows` of the endless sequence of epochs."""
        shape = (rows, self.seq_len)
        input_ids = np.full(shape, self.store.index.end_of_text_id, np.int64)
        labels = np.full(shape, NOT_TRAINED, np.int64)
        position_ids = np.empty(shape, np.int64)
        padding = np.zeros(shape, np.bool_)
        for i, (epoch, row) in enumerate(self.row_ids(step, rows).tolist()):
            stream, begins = self._read(epoch, row)
            length = min(self.seq_len, stream.size)
            input_ids[i, :length] = stream[:length]
            labels[i, : stream.size - 1] = stream[1:]
            padding[i, length:] = True
            position_ids[i] = np.arange(self.seq_len)
            if self.isolate_documents:
                labels[i, begins[begins > 0] - 1] = NOT_TRAINED
                restarts = np.append(begins[begins < length], length)  # padding is a document of its own
                position_ids[i] -= _last_restart(restarts, self.seq_len)
        trained_tokens = int(np.count_nonzero(labels != NOT_TRAINED))
        return Batch(input_ids, labels, position_ids, trained_tokens, padding if padding.any() else None)

    def documents(self, epoch: int) -> NDArray[np.int64]:
        """The documents in the order of an epoch."""
        return self._epoch(epoch)[0]

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Documents in order, and where each begins in the epoch's stream of tokens.

        Sorting the raw output of the generator gives the same order with every version of numpy; it promises
        that for `random_raw`, not for `permutation` (NEP 19).
        """
        order = self._permutation(epoch, self.store.index.documents, stream=0)
        lengths = self._lengths[order]
        begins = np.zeros(lengths.size, np.int64)
        np.cumsum(lengths[:-1], out=begins[1:])
        return order, begins

    def _draw_rows(self, epoch: int) -> NDArray[np.int64]:
        """The rows of an epoch in the order in which they are trained on."""
        return self._permutation(epoch, self.rows_per_epoch, stream=1)

    def _permutation(self, epoch: int, count: int, stream: int) -> NDArray[np.int64]:
        """An order of `count` things, drawn from (seed, epoch, stream).

        Sorting the raw output of the generator gives the same order with every version of numpy; it promises
        that for `random_raw`, not for `permutation` (NEP 19).
        """
        generator = np.random.Philox(key=np.array([self.seed, epoch], np.uint64), counter=stream << 192)
        return np.argsort(generator.random_raw(count), kind="stable")

    def _read(self, epoch: int, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens of a row and the one after it, and the positions among them where documents begin."""
        order, begins = self._epoch(epoch)
        start = row * self.seq_len
        if not self.pack:
            return self._read_document(order, begins, start)
        stop = min(start + self.seq_len + 1, self.store.index.tokens)
        stream = np.empty(stop - start, np.int64)
        first = int(np.searchsorted(begins, start, "right")) - 1
        last = int(np.searchsorted(begins, stop, "left"))
        for document, begin in zip(order[first:last].tolist(), begins[first:last].tolist(), strict=True):
            source, end = self.store.offsets[document : document + 2].tolist()
            low, high = max(begin, start), min(begin + end - source, stop)
            stream[low - start : high - start] = self.store.tokens[
                source + low - begin : source + high - begin
            ]
        inside = begins[first:last] - start
        return stream, inside[inside >= 0]

    def _read_document(
        self, order: NDArray[np.int64], begins: NDArray[np.int64], start: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `_read`, of the one document that has the row that begins at `start`."""
        at = int(np.searchsorted(begins, start, "right")) - 1
        source, end = self.store.offsets[order[at] : order[at] + 2].tolist()
        inside = start - int(begins[at])
        stream = self.store.tokens[source + inside : min(source + inside + self.seq_len + 1, end)]
        return stream.astype(np.int64), np.zeros(int(inside == 0), np.int64)


def _last_restart(restarts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """For each position the nearest restart at or before it (0 if none)."""
    found = np.zeros(length, np.int64)
    inside = restarts[restarts < length]
    found[inside] = inside
    return np.maximum.accumulate(found)
