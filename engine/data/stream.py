"""Rows without a token store: texts are tokenised while the run trains, and nothing is kept.

Samples come in blocks of `data.shuffle_window`, one file after another, the files in an order of their own in
each epoch. A block is a small epoch: mixed, packed and trained on by itself (`rows.Rows`), while a thread
tokenises the next one. A checkpoint holds where the block of its next step begins; a resume tokenises that
job anew up to there, and then has the bits of the unbroken run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import Job, SourceFile, each_job, find_files
from tierstream.engine.data.mixture import SAMPLES, draw_order
from tierstream.engine.data.prepare import tokenizer_directory
from tierstream.engine.data.rows import Batch, Rows, choose_packing, fit_samples
from tierstream.engine.data.samples import UNTRAINED, Recipe, SampleMaker
from tierstream.engine.data.shards import StoreIndex, TokenStore
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

#: Bytes of a job: what a resume tokenises anew, at most, in kinds of files that can be cut.
JOB_BYTES = 8 << 20
#: A block that has so many tokens ends before it has its samples; a longer document is cut there.
BLOCK_TOKENS = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Of a sample: epoch, file in the epoch's order, job of the file, sample of the job."""

    epoch: int = 0
    file: int = 0
    job: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a block begins: how many were before it, its first step, the place of its first sample."""

    block: int = 0
    step: int = 0
    place: Place = Place()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cursor:
        return cls(values["block"], values["step"], Place(**values["place"]))


@dataclass(frozen=True, slots=True)
class _Sample:
    """`formats`: of the records of its job, as far as they were read."""

    place: Place
    file: int
    line: int
    ids: NDArray[np.uint32]
    formats: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Block:
    """`epochs`: that were done when it began, to the nearest job."""

    begin: Cursor
    end: Cursor
    rows: Rows
    epochs: float


class StreamedRows:
    """The rows of a run, as `Rows`, of steps that follow each other.

    Args:
        files: in the order of `data.files`; they are not read before they are due.
        fingerprint: of what can be known of them.
        end_of_text_id: of the tokenizer.
        cursor: of the checkpoint that the run resumes from.

    Raises (from `batch`):
        DataError: a record that cannot be used, or an epoch without a token to train on.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        maker: SampleMaker,
        data: DataConfig,
        *,
        fingerprint: str,
        end_of_text_id: int,
        rows_per_step: int,
        seed: int,
        cursor: Mapping[str, Any] | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self._files, self._maker, self._data = files, maker, data
        self._end_of_text_id, self._rows_per_step, self._seed = end_of_text_id, rows_per_step, seed
        self._paths = [str(file.path) for file in files]
        self._first = Cursor() if cursor is None else Cursor.from_json(cursor)
        self._samples = self._read(self._first.place)
        self._held: _Sample | None = None  # read, and of the block after that of the thread
        self._closed = False
        self._block: _Block | None = None
        self._thread = ThreadPoolExecutor(1, "tokenise")
        self._coming: Future[_Block] = self._thread.submit(self._make_block, self._first)

    def batch(self, step: int) -> Batch:
        """The rows of a step: of the block of the last call, or of the one after it."""
        block = self._block_of(step)
        return block.rows.batch(step - block.begin.step)

    def block(self, step: int) -> Rows:
        """The rows of the block that a step is in; their steps begin with 0."""
        return self._block_of(step).rows

    def where(self, step: int) -> list[str]:
        """file:line of all samples that have tokens on the rows of a step."""
        block = self._block_of(step)
        return block.rows.where(step - block.begin.step)

    def epochs(self, steps: int) -> float:
        """Epochs that were done when the block of the last of so many steps began, to the nearest job."""
        return self._block_of(steps - 1).epochs

    def cursor(self, steps: int) -> dict[str, Any]:
        """What a checkpoint must hold of the rows after so many steps, as JSON values."""
        block, cursor = self._block, self._first
        if block is not None:
            cursor = block.begin if steps < block.end.step else block.end
        return dataclasses.asdict(cursor)

    def describe(self) -> list[str]:
        """For the user."""
        return [
            f"{len(self._files)} files of {sum(file.nbytes for file in self._files)} bytes are tokenised "
            f"while the run trains, in blocks of {self._data.shuffle_window} samples; a resume compares "
            "their names and sizes, not their contents"
        ]

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.shutdown()

    def _block_of(self, step: int) -> _Block:
        while self._block is None or step >= self._block.end.step:
            self._block = self._coming.result()
            self._coming = self._thread.submit(self._make_block, self._block.end)
        return self._block

    def _make_block(self, begin: Cursor) -> _Block:
        """In the thread: the next block; those without a token to train on are passed over."""
        samples = self._take()
        while not self._trainable(store := self._as_store(samples)):
            samples = self._take()
            if samples[0].place.epoch > begin.place.epoch + 1:
                raise DataError(
                    "0 trainable tokens: in no sample of an epoch a token to train on fits on a row of "
                    f"{self._data.seq_len} tokens; raise data.seq_len, or look at what is trained on"
                )
        rows = Rows(
            [store], self._data, rows_per_step=self._rows_per_step, seed=_block_seed(self._seed, begin.block)
        )
        end = Cursor(begin.block + 1, begin.step + rows.total_steps(1), self._first_held().place)
        place = samples[0].place
        return _Block(dataclasses.replace(begin, place=place), end, rows, self._epochs_before(place))

    def _trainable(self, store: TokenStore) -> bool:
        packing = choose_packing(self._data, [store])
        return fit_samples(store, self._data, packing).documents.size > 0

    def _take(self) -> list[_Sample]:
        """The samples of a block, all of one epoch."""
        samples: list[_Sample] = []
        tokens = 0
        while len(samples) < self._data.shuffle_window and tokens < BLOCK_TOKENS:
            sample = self._first_held()
            if samples and sample.place.epoch != samples[0].place.epoch:
                break
            samples.append(sample)
            tokens += sample.ids.size
            self._held = None
        return samples

    def _first_held(self) -> _Sample:
        if self._closed:
            raise CancelledError
        if self._held is None:
            self._held = next(self._samples)
        return self._held

    def _read(self, start: Place) -> Iterator[_Sample]:
        """All samples from a place on, without end."""
        for epoch in count(start.epoch):
            empty = True
            for at, number in enumerate(self._order(epoch)):
                if Place(epoch, at + 1) <= start:
                    continue
                for job_number, job in enumerate(each_job(self._files[number], JOB_BYTES)):
                    if Place(epoch, at, job_number + 1) <= start:
                        continue
                    for sample, (ids, line) in enumerate(self._documents(job)):
                        place, empty = Place(epoch, at, job_number, sample), False
                        if place >= start:
                            formats = frozenset(self._maker.counts.by_format)
                            yield _Sample(place, number, line, ids, formats)
            if empty and Place(epoch) >= start:
                raise DataError(f"the {len(self._files)} files of data.files hold nothing to train on")

    def _documents(self, job: Job) -> Iterator[tuple[NDArray[np.uint32], int]]:
        parts: list[NDArray[np.uint32]] = []
        for piece in self._maker.make(job):
            parts.append(piece.ids)
            if piece.last or sum(part.size for part in parts) >= BLOCK_TOKENS:
                yield np.concatenate(parts), piece.line
                parts = []

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = draw_order(self._seed, epoch, len(self._files), stream=SAMPLES).tolist()
        return order

    def _epochs_before(self, place: Place) -> float:
        order = self._order(place.epoch)
        done = sum(self._files[number].nbytes for number in order[: place.file])
        done += min(place.job * JOB_BYTES, self._files[order[place.file]].nbytes)
        return place.epoch + done / sum(file.nbytes for file in self._files)

    def _as_store(self, samples: Sequence[_Sample]) -> TokenStore:
        tokens = np.concatenate([sample.ids for sample in samples])
        lengths = np.array([sample.ids.size for sample in samples], np.int64)
        trained = [np.flatnonzero(sample.ids[1:] < UNTRAINED)[:1] + 1 for sample in samples]
        first = [
            int(own[0]) if own.size else sample.ids.size for own, sample in zip(trained, samples, strict=True)
        ]
        lines = [sample.line for sample in samples]
        index = StoreIndex(
            fingerprint="",
            end_of_text_id=self._end_of_text_id,
            masked=bool((tokens >= UNTRAINED).any()),
            documents=len(samples),
            tokens=tokens.size,
            shards=[(len(samples), tokens.size)],
            places=[(number, sample.file) for number, sample in enumerate(samples)],
            counts={
                "by_format": dict.fromkeys(frozenset().union(*(sample.formats for sample in samples)), 1)
            },
        )
        table = np.array([np.cumsum(lengths) - lengths, lengths, first, lines], np.int64)
        return TokenStore(index, table, lambda _: tokens, self._paths, "")


def open_stream(
    data: DataConfig,
    model: ModelConfig,
    directory: Path,
    *,
    vocab_size: int,
    rows_per_step: int,
    seed: int,
    cursor: Mapping[str, Any] | None,
) -> StreamedRows:
    """The rows of a run with `data.streaming`; see `prepare.open_data`.

    Raises:
        DataError, ConfigError: files or tokenizer that cannot be used.
    """
    chosen = tokenizer_directory(data, model, directory)
    if data.tokenizer is None and chosen == directory / "tokenizer":
        raise ConfigError(
            "data.streaming is true, and there is no tokenizer; name one (data.tokenizer): to train it, all "
            "texts would have to be read first"
        )
    files = [_unread(path) for path in find_files(data.files)]
    tokenizer = load_tokenizer(chosen)
    codec, recipe = Codec.of(tokenizer), Recipe.of(data, chosen, tokenizer)
    known = [[(file.path.name, file.nbytes) for file in files], recipe.fingerprint(tokenizer)]
    return StreamedRows(
        files,
        SampleMaker(recipe, codec, vocab_size=vocab_size),
        data,
        fingerprint=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        end_of_text_id=codec.end_of_text_id,
        rows_per_step=rows_per_step,
        seed=seed,
        cursor=cursor,
    )


def _unread(path: Path) -> SourceFile:
    try:
        return SourceFile(path, path.stat().st_size, sha256="")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _block_seed(seed: int, block: int) -> int:
    """Another one for each block: they are all the first epoch of their rows."""
    return int.from_bytes(hashlib.sha256(f"{seed} {block}".encode()).digest()[:8])
