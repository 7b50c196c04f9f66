"""Token stores of given documents, in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstream.engine.data.shards import StoreIndex, TokenStore

UNTRAINED = 1 << 31


def store_of(
    documents: Sequence[Sequence[int]],
    *,
    shard_documents: int = 3,
    end_of_text_id: int = 0,
    name: str = "made-up",
) -> TokenStore:
    """Documents as ids, with the bit `UNTRAINED` where wanted; the first is in line 1 of the file `name`, the
    second in line 2.
    """
    shards = [documents[at : at + shard_documents] for at in range(0, len(documents), shard_documents)]
    tokens = [np.array([i for document in shard for i in document], np.uint32) for shard in shards]
    table = np.empty((4, len(documents)), np.int64)
    for number, document in enumerate(documents):
        begin = sum(map(len, documents[number - number % shard_documents : number]))
        trained = (at for at, i in enumerate(document) if at and not i & UNTRAINED)
        table[:, number] = begin, len(document), next(trained, len(document)), number + 1
    index = StoreIndex(
        fingerprint=name,
        end_of_text_id=end_of_text_id,
        masked=any(i & UNTRAINED for document in documents for i in document),
        documents=len(documents),
        tokens=sum(map(len, documents)),
        shards=[(len(shard), sum(map(len, shard))) for shard in shards],
        places=[(0, 0)],
    )
    return TokenStore(index, table, tokens.__getitem__, [name], origin="made up")
