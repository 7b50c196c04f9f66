"""The token store: what it reads."""

from __future__ import annotations

import numpy as np
from support.token_stores import UNTRAINED, store_of

DOCUMENTS = [[5, 6, 0], [7 | UNTRAINED, 8 | UNTRAINED, 9, 0], [1, 2 | UNTRAINED], [3, 0], [4, 4, 0]]


def test_documents_are_read_over_shards() -> None:
    store = store_of(DOCUMENTS, shard_documents=2)
    for number, document in enumerate(DOCUMENTS):
        assert store.read(number, 0, 99).tolist() == document
        assert store.read(number, 1, 2).tolist() == document[1:2]
    assert store.lengths.tolist() == [3, 4, 2, 2, 3]
    assert store.first_trained.tolist() == [1, 2, 2, 1, 1]
    assert (store.documents, store.tokens, store.masked) == (5, 14, True)
    assert store.read(0, 0, 2).dtype == np.uint32


def test_a_document_is_named_by_file_and_line() -> None:
    assert store_of(DOCUMENTS, name="a.jsonl").where(3) == "a.jsonl:4"
