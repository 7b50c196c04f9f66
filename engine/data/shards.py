"""The token store of one entry of `data.files`: documents tokenised once, in files that are mapped.

<cache_dir>/tokens/<fingerprint>/
    00000/ 00001/ ...   shards, each complete or not there
        tokens.u32      ids, little-endian uint32, document after document; the highest bit (`UNTRAINED`)
                        marks one that is not trained on
        documents.i64   little-endian int64 [3, documents]: length, first trained token, line
        shard.json      `ShardIndex`
    joined/             complete or not there; made last: without it the store is not finished
        documents.i64   of all shards, int64 [4, documents]: first token in its shard, then as above
        store.json      `StoreIndex`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.files import Job
from tierstream.engine.data.samples import Counts

FORMAT = 2
TOKENS_FILE, DOCUMENTS_FILE, SHARD_FILE = "tokens.u32", "documents.i64", "shard.json"
JOINED, STORE_FILE = "joined", "store.json"
#: Shards that are mapped at once; each map takes an open file.
MAPPED_SHARDS = 64


@dataclass(kw_only=True, slots=True)
class ShardIndex:
    """What `shard.json` holds.

    Attributes:
        jobs: number of the file, kind, start, stop and documents of each job.
        masked: some token is not trained on.
        largest_id: and number of the file and line of a document that has it; -1: there is no document.
        counts: `Counts` of these jobs.
    """

    jobs: list[tuple[int, str, int, int, int]]
    documents: int = 0
    tokens: int = 0
    masked: bool = False
    largest_id: int = -1
    largest_at: tuple[int, int] = (0, 0)
    counts: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(kw_only=True, slots=True)
class StoreIndex:
    """What `store.json` holds, as `ShardIndex` for all shards.

    Attributes:
        shards: documents and tokens of each.
        places: first document, and number of the file, of every run of documents from one file.
    """

    fingerprint: str
    end_of_text_id: int
    masked: bool
    documents: int
    tokens: int
    shards: list[tuple[int, int]]
    places: list[tuple[int, int]]
    largest_id: int = -1
    largest_at: tuple[int, int] = (0, 0)
    counts: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


class TokenStore:
    """The documents of one entry of `data.files`, in the order of its files.

    Args:
        table: int64 [4, documents]: first token in its shard, length, first trained token, line.
        open_shard: maps the tokens of a shard, uint32.
        files: paths, by their numbers.

    Attributes:
        fingerprint: changes with the tokens; not with the place of the files.
        masked: some token is not trained on.
        lengths: int64 [documents], tokens of each with its end-of-text token.
        first_trained: int64 [documents], the first token of each that is trained on as a label, so at least
            1; its length if there is none.
        counts: what became of the records.
        origin: in words, how the store came about.
    """

    def __init__(
        self,
        index: StoreIndex,
        table: NDArray[np.int64],
        open_shard: Callable[[int], NDArray[np.uint32]],
        files: Sequence[str],
        origin: str,
    ) -> None:
        self.fingerprint, self.end_of_text_id = index.fingerprint, index.end_of_text_id
        self.masked = index.masked
        self.documents, self.tokens, self.origin = index.documents, index.tokens, origin
        self.counts = Counts(**index.counts)
        self._begins, self.lengths, self.first_trained, self._lines = table
        self._shard_ends = np.cumsum([documents for documents, _ in index.shards], dtype=np.int64)
        self._shard = lru_cache(MAPPED_SHARDS)(open_shard)
        self._places = np.array(index.places, np.int64).reshape(-1, 2)
        self._files = files

    def read(self, document: int, start: int, stop: int) -> NDArray[np.uint32]:
        """Tokens `[start, stop)` of a document, with the bit `UNTRAINED`; a view, not to be written to."""
        shard = self._shard(int(np.searchsorted(self._shard_ends, document, "right")))
        begin = int(self._begins[document])
        return shard[begin + start : begin + min(stop, int(self.lengths[document]))]

    def where(self, document: int) -> str:
        """The document's place for a message: file:line."""
        place = int(np.searchsorted(self._places[:, 0], document, "right")) - 1
        return f"{self._files[self._places[place, 1]]}:{self._lines[document]}"


def shard_directory(store: Path, number: int) -> Path:
    return store / f"{number:05}"


def read_shard(directory: Path, jobs: Sequence[tuple[int, Job]]) -> tuple[ShardIndex | None, str]:
    """The index of a complete shard of these jobs, each with the number of its file, or why there is none
    (empty: nothing was there).
    """
    if not directory.exists():
        return None, ""
    try:
        index = ShardIndex(**json.loads((directory / SHARD_FILE).read_text()))
        sizes = [(directory / name).stat().st_size for name in (TOKENS_FILE, DOCUMENTS_FILE)]
    except (OSError, ValueError, TypeError) as error:
        return None, f"{directory} is damaged ({error})"
    expected = [(file, job.kind, job.start, job.stop) for file, job in jobs]
    same_jobs = [tuple(job[:4]) for job in index.jobs] == expected
    if index.format != FORMAT or not same_jobs or sizes != [4 * index.tokens, 24 * index.documents]:
        return None, f"{directory} is damaged or of another version"
    return index, ""


def read_store(store: Path) -> tuple[StoreIndex | None, str]:
    """The index of a finished store, or why there is none (empty: it was not finished)."""
    joined = store / JOINED
    if not joined.exists():
        return None, ""
    try:
        index = StoreIndex(**json.loads((joined / STORE_FILE).read_text()))
        table = (joined / DOCUMENTS_FILE).stat().st_size
        shards = range(len(index.shards))
        sizes = [(shard_directory(store, number) / TOKENS_FILE).stat().st_size for number in shards]
    except (OSError, ValueError, TypeError) as error:
        return None, f"{store} is damaged ({error})"
    expected = [4 * tokens for _, tokens in index.shards]
    if index.format != FORMAT or table != 32 * index.documents or sizes != expected:
        return None, f"{store} is damaged or of another version"
    return index, ""


def map_store(store: Path, index: StoreIndex, files: Sequence[str], origin: str) -> TokenStore:
    """A finished store. `files`: the paths of today."""
    table = map_file(store / JOINED / DOCUMENTS_FILE, "<i8").reshape(4, index.documents)

    def open_shard(number: int) -> NDArray[np.uint32]:
        return map_file(shard_directory(store, number) / TOKENS_FILE, "<u4")

    return TokenStore(index, table, open_shard, files, origin)


def map_file(path: Path, dtype: str) -> NDArray[Any]:
    """A file as a plain array over its pages; an empty one cannot be mapped."""
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))
