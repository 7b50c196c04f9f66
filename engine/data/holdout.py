"""Samples that are kept apart from training, to evaluate on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.mixture import HELD_OUT, draw_order
from tierstream.engine.data.shards import TokenStore
from tierstream.io.errors import DataError


def hold_out(
    stores: Sequence[TokenStore], share: float, seed: int
) -> tuple[list[TokenStore], list[TokenStore]]:
    """Each store in two: what is trained on, and what is not. A store keeps at least one sample to train on,
    and so may have none that is held out.

    Raises:
        DataError: nothing is held out at all.
    """
    trained_on: list[TokenStore] = []
    held: list[TokenStore] = []
    for entry, store in enumerate(stores):
        count = max(0, min(round(share * store.documents), store.documents - 1))
        order = draw_order(seed, 0, store.documents, stream=HELD_OUT, entry=entry)
        held.append(_Part(store, np.sort(order[:count])))
        trained_on.append(_Part(store, np.sort(order[count:])) if count else store)
    if not any(part.documents for part in held):
        samples = sum(store.documents for store in stores)
        raise DataError(
            f"eval.share is {share}, and of {samples} samples in data.files that leaves none to evaluate on "
            "(a plain text file is one sample); raise it, or name eval.files"
        )
    return trained_on, held


class _Part(TokenStore):
    """Some documents of a store, as a store of their own."""

    def __init__(self, whole: TokenStore, documents: NDArray[np.int64]) -> None:
        self._whole, self._chosen = whole, documents
        parts = whole.fingerprint.encode() + documents.astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(parts).hexdigest()
        self.end_of_text_id, self.masked, self.counts = whole.end_of_text_id, whole.masked, whole.counts
        self.lengths, self.first_trained = whole.lengths[documents], whole.first_trained[documents]
        self.documents, self.tokens = documents.size, int(self.lengths.sum())
        self.origin = f"{self.documents} of {whole.documents} samples: {whole.origin}"

    def read(self, document: int, start: int, stop: int) -> NDArray[np.uint32]:
        return self._whole.read(int(self._chosen[document]), start, stop)

    def where(self, document: int) -> str:
        return self._whole.where(int(self._chosen[document]))
