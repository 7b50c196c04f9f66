"""The token store of one entry of `data.files`: documents tokenised once, in files that are mapped.

<cache_dir>/tokens/<fingerprint>/
    00000/ 00001/ ...   shards, each complete or not there
        tokens.u32      ids, little-endian uint32, document after document; the highest bit (`UNTRAINED`)
                        marks one that is not trained on
        documents.i64   little-endian int64 [3, documents]: length, first trained token, line
        shard.json      `ShardIndex`
    documents.i64       int64 [4, documents], the same of all shards, and where each document begins
    index.json          `StoreIndex`; written last: without it the store is not finished
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FORMAT = 2
#: Shards that are mapped at once; each map takes an open file.
MAPPED_SHARDS = 64


@dataclass(kw_only=True, slots=True)
class StoreIndex:
    """What `index.json` holds. `shards`: documents of each shard."""

    fingerprint: str
    end_of_text_id: int
    masked: bool
    documents: int
    tokens: int
    shards: list[int] = field(default_factory=list)


class TokenStore:
    """The documents of one entry of `data.files`, in the order of its files.

    Args:
        table: int64 [4, documents]: first token in its shard, length, first trained token, line.
        open_shard: maps the tokens of a shard, uint32.
        places: files that documents come from, each with the number of its first document, ascending.

    Attributes:
        fingerprint: changes with the tokens; not with the place of the files.
        masked: some token is not trained on.
        lengths: int64 [documents], tokens of each with its end-of-text token.
        first_trained: int64 [documents], the first token of each that is trained on as a label, so at least
            1; its length if there is none.
        origin: in words, how the store came about.
    """

    def __init__(
        self,
        index: StoreIndex,
        table: NDArray[np.int64],
        open_shard: Callable[[int], NDArray[np.uint32]],
        places: Sequence[tuple[int, str]],
        origin: str = "",
    ) -> None:
        self.fingerprint, self.end_of_text_id, self.masked = (
            index.fingerprint,
            index.end_of_text_id,
            index.masked,
        )
        self.documents, self.tokens, self.origin = index.documents, index.tokens, origin
        self._begins, self.lengths, self.first_trained, self._lines = table
        self._shard_ends = np.cumsum(index.shards, dtype=np.int64)
        self._shard = lru_cache(MAPPED_SHARDS)(open_shard)
        self._place_begins = np.array([begin for begin, _ in places], np.int64)
        self._paths = [path for _, path in places]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.uint32]:
        """Tokens `[start, stop)` of a document, with the bit `UNTRAINED`; a view, not to be written to."""
        shard = self._shard(int(np.searchsorted(self._shard_ends, document, "right")))
        begin = int(self._begins[document])
        return shard[begin + start : begin + min(stop, int(self.lengths[document]))]

    def where(self, document: int) -> str:
        """The document's place for a message: file:line."""
        place = int(np.searchsorted(self._place_begins, document, "right")) - 1
        return f"{self._paths[place]}:{self._lines[document]}"
