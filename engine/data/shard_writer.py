"""Shards of a token store are written, and at the end joined. Knows nothing of processes."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.files import Job, SourceFile, cut_jobs
from tierstream.engine.data.samples import UNTRAINED, Counts, SampleMaker, TokenPiece
from tierstream.engine.data.shards import (
    DOCUMENTS_FILE,
    JOINED,
    SHARD_FILE,
    STORE_FILE,
    TOKENS_FILE,
    ShardIndex,
    StoreIndex,
    map_file,
    read_shard,
    shard_directory,
)
from tierstream.engine.export.new_file import NewFile
from tierstream.io import durable
from tierstream.io.errors import DataError, StorageError

#: Bytes of source files in a shard; what an interruption costs at most, for each worker.
SHARD_BYTES = 32 << 20
#: Tokens that are written at once.
BUFFER_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The jobs of a shard, each with the number of its file, and about how many bytes of files they read."""

    number: int
    jobs: tuple[tuple[int, Job], ...]
    nbytes: int


def plan_shards(files: Sequence[SourceFile], shard_bytes: int = SHARD_BYTES) -> list[ShardPlan]:
    """Cut files into shards: small ones share a shard, large ones have several. The same files give the same
    plan.

    Raises:
        DataError: a file that is damaged or cannot be read.
    """
    plans: list[ShardPlan] = []
    jobs: list[tuple[int, Job]] = []
    nbytes = 0
    for number, job, job_bytes in _sized_jobs(files, shard_bytes):
        if jobs and nbytes + job_bytes > shard_bytes:
            plans.append(ShardPlan(len(plans), tuple(jobs), nbytes))
            jobs, nbytes = [], 0
        jobs.append((number, job))
        nbytes += job_bytes
    return [*plans, ShardPlan(len(plans), tuple(jobs), nbytes)]


def _sized_jobs(files: Sequence[SourceFile], shard_bytes: int) -> Iterator[tuple[int, Job, int]]:
    """Every job with its share of the bytes of its file; `start` and `stop` count rows in some kinds."""
    for number, file in enumerate(files):
        jobs = cut_jobs(file, shard_bytes)
        whole = max(1, *(job.stop for job in jobs))
        for job in jobs:
            yield number, job, file.nbytes * (job.stop - job.start) // whole


def write_shard(
    maker: SampleMaker,
    jobs: Iterable[tuple[int, Job]],
    directory: Path,
    on_tokens: Callable[[int], object],
) -> ShardIndex:
    """Tokenise the jobs of a shard into `directory`: it is there afterwards, or nothing of it is.

    Args:
        jobs: each with the number of its file.
        on_tokens: told how many there are so far, at every sample.

    Raises:
        DataError: a record that cannot be used, or an id without a row in the embedding.
        StorageError: the shard cannot be written.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    durable.remove_tree(temporary)
    durable.make_directories(temporary)
    counts = Counts()
    try:
        with NewFile(temporary / TOKENS_FILE) as file:
            documents = _Documents(file)
            for number, job in jobs:
                documents.begin_job(number, job)
                for piece in maker.make(job):
                    documents.add(piece)
                    on_tokens(documents.index.tokens)
                counts.add(maker.counts)
            index = documents.finish(counts)
        with NewFile(temporary / DOCUMENTS_FILE) as file:
            for column in documents.columns():
                file.append(column)
        with NewFile(temporary / SHARD_FILE) as file:
            file.append(_json_bytes(index))
        durable.remove_tree(directory)
        durable.publish_directory(temporary, directory)
    except BaseException:
        with suppress(StorageError):
            durable.remove_tree(temporary)
        raise
    return index


class _Documents:
    """Pieces of documents on their way to a file, counted into the index of the shard."""

    def __init__(self, file: NewFile) -> None:
        self.file = file
        self.index = ShardIndex(jobs=[])
        self._lengths, self._first_trained, self._lines = array("q"), array("q"), array("q")
        self._line = 0  # where the document begins
        self._length = 0  # of it so far
        self._first = 0  # its first trained token; 0: none so far
        self._pieces: list[NDArray[np.uint32]] = []
        self._piece_places: list[tuple[int, int]] = []  # number of the file, and line
        self._buffered = 0

    def begin_job(self, number: int, job: Job) -> None:
        self.index.jobs.append((number, job.kind, job.start, job.stop, 0))

    def add(self, piece: TokenPiece) -> None:
        if not self._length:
            self._line = piece.line
        if not self._first:
            skipped = 0 if self._length else 1  # the first token is no label
            trained = piece.ids[skipped:] < UNTRAINED
            if trained.any():
                self._first = self._length + skipped + int(trained.argmax())
        self._length += piece.ids.size
        self._pieces.append(piece.ids)
        self._piece_places.append((self.index.jobs[-1][0], piece.line))
        self._buffered += piece.ids.size
        self.index.tokens += piece.ids.size
        if piece.last:
            self._end_document()
        if self._buffered >= BUFFER_TOKENS:
            self._flush()

    def finish(self, counts: Counts) -> ShardIndex:
        self._flush()
        self.index.documents = len(self._lengths)
        self.index.counts = dataclasses.asdict(counts)
        return self.index

    def columns(self) -> list[NDArray[np.int64]]:
        """Length, first trained token and line of every document."""
        return [np.array(column) for column in (self._lengths, self._first_trained, self._lines)]

    def _end_document(self) -> None:
        self._lengths.append(self._length)
        self._first_trained.append(self._first or self._length)
        self._lines.append(self._line)
        self._length = self._first = 0
        number, kind, start, stop, documents = self.index.jobs[-1]
        self.index.jobs[-1] = number, kind, start, stop, documents + 1

    def _flush(self) -> None:
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        ids = tokens & ~UNTRAINED
        self.index.masked |= bool((ids != tokens).any())
        at = int(ids.argmax())
        if ids[at] > self.index.largest_id:
            ends = np.cumsum([piece.size for piece in self._pieces])
            self.index.largest_id = int(ids[at])
            self.index.largest_at = self._piece_places[int(np.searchsorted(ends, at, "right"))]
        self.file.append(tokens)
        self._pieces, self._piece_places, self._buffered = [], [], 0


def join_shards(store: Path, fingerprint: str, end_of_text_id: int, plans: Sequence[ShardPlan]) -> StoreIndex:
    """Finish a store whose shards are all there. In memory are the documents of one of them.

    Raises:
        DataError: a shard is damaged.
        StorageError: the store cannot be written.
    """
    shards: list[ShardIndex] = []
    for plan in plans:
        shard, problem = read_shard(shard_directory(store, plan.number), plan.jobs)
        if shard is None:
            raise DataError(problem or f"shard {plan.number} of {store} has gone; start again")
        shards.append(shard)
    counts = Counts()
    places: list[tuple[int, int]] = []
    begin = 0
    for shard in shards:
        counts.add(Counts(**shard.counts))
        for number, _, _, _, documents in shard.jobs:
            if documents and (not places or places[-1][1] != number):
                places.append((begin, number))
            begin += documents
    largest = max(shards, key=lambda shard: shard.largest_id)
    index = StoreIndex(
        fingerprint=fingerprint,
        end_of_text_id=end_of_text_id,
        masked=any(shard.masked for shard in shards),
        documents=begin,
        tokens=sum(shard.tokens for shard in shards),
        shards=[(shard.documents, shard.tokens) for shard in shards],
        places=places,
        largest_id=largest.largest_id,
        largest_at=largest.largest_at,
        counts=dataclasses.asdict(counts),
    )
    temporary = store / (JOINED + ".tmp")
    durable.remove_tree(temporary)
    durable.make_directories(temporary)
    with NewFile(temporary / DOCUMENTS_FILE) as file:
        for row in (None, 0, 1, 2):
            for number, shard in enumerate(shards):
                table = map_file(shard_directory(store, number) / DOCUMENTS_FILE, "<i8")
                lengths = table[: shard.documents]
                column = np.cumsum(lengths) - lengths if row is None else table.reshape(3, -1)[row]
                file.append(column)
    with NewFile(temporary / STORE_FILE) as file:
        file.append(_json_bytes(index))
    durable.remove_tree(store / JOINED)
    durable.publish_directory(temporary, store / JOINED)
    return index


def _json_bytes(index: ShardIndex | StoreIndex) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(dataclasses.asdict(index)).encode(), np.uint8)
