"""A token store is opened; what of it is missing is made, by several processes where there is much to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.files import SourceFile
from tierstream.engine.data.hashes import look
from tierstream.engine.data.pool import write_shards
from tierstream.engine.data.progress import OnProgress, Progress
from tierstream.engine.data.samples import Counts, Recipe, SampleMaker
from tierstream.engine.data.shard_writer import SHARD_BYTES, ShardPlan, join_shards, plan_shards, write_shard
from tierstream.engine.data.shards import (
    FORMAT,
    StoreIndex,
    TokenStore,
    map_store,
    read_shard,
    read_store,
    shard_directory,
)
from tierstream.engine.data.worker import Assignment
from tierstream.io import durable
from tierstream.io.drives import DirectoryLock, check_free
from tierstream.io.errors import DataError, StorageError
from tierstream.io.memory import memory_budget

#: Less than this is tokenised in this process, if nothing else is asked for: starting others takes longer.
SMALL_BYTES = 8 << 20
#: Memory that a process may take, at most, if their number is left to us.
WORKER_BYTES = 512 << 20
#: Bytes of tokens for a byte of a file, at least, as long as nothing is measured.
LEAST_EXPANSION = 0.5
#: Seconds between two reports of progress, and between two looks at a lock.
PROGRESS_SECONDS = 0.5
CODEC_FILE = "codec.json"


def store_fingerprint(files: Sequence[SourceFile], recipe: Recipe, tokenizer: Any) -> str:
    """Changes with the content and kind of the files, their order, and what makes ids of them."""
    parts = [FORMAT, [(file.kind, file.sha256) for file in files], recipe.fingerprint(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Tokeniser:
    """Opens the token stores of a run.

    Args:
        cache: `data.cache_dir`.
        vocab_size: rows of the model's embedding.
        workers: `data.workers`.
        shard_bytes: bytes of files in a shard.
    """

    recipe: Recipe
    tokenizer: Any
    cache: Path
    vocab_size: int
    workers: int | None
    on_progress: OnProgress
    shard_bytes: int = SHARD_BYTES

    def open(self, files: Sequence[SourceFile], name: str) -> TokenStore:
        """The tokens of `files`, the entry `name` of `data.files`: those in the cache, else made now.

        Two runs that need the same store make it once: the second waits for the first.

        Raises:
            DataError: a file or record that cannot be used, nothing to train on, an id without a row in the
                embedding, or a process that died.
            StorageError: the tokens cannot be written.
        """
        fingerprint = store_fingerprint(files, self.recipe, self.tokenizer)
        store = self.cache / "tokens" / fingerprint
        how = "reused"
        index, problem = read_store(store)
        if index is None:
            durable.make_directories(store)
            with self._locked(store) as lock:
                index, _ = read_store(store)  # another run may have finished it
                if index is None:
                    with _named_remedy():
                        index, how = self._make(store, fingerprint, files, name, lock)
        _check_counts(index, files, name)
        self._check_largest(index, files)
        parts = [
            f"{index.tokens} tokens of {index.documents} documents {how}",
            *_left_out(index.counts),
            problem,
        ]
        return map_store(store, index, [str(file.path) for file in files], "; ".join(filter(None, parts)))

    def _make(
        self, store: Path, fingerprint: str, files: Sequence[SourceFile], name: str, lock: DirectoryLock
    ) -> tuple[StoreIndex, str]:
        """What is missing, and in words how it came about."""
        looks = [look(file.path) for file in files]
        plans = plan_shards(files, self.shard_bytes)
        found = [read_shard(shard_directory(store, plan.number), plan.jobs) for plan in plans]
        missing = [plan for plan, (index, _) in zip(plans, found, strict=True) if index is None]
        codec = Codec.of(self.tokenizer)
        try:
            self._write(store, missing, codec, name, lock)
        finally:
            changed = [file.path for file, old in zip(files, looks, strict=True) if look(file.path) != old]
            if changed:  # then the name of the store may say what is not true
                for plan in missing:
                    durable.remove_tree(shard_directory(store, plan.number))
        if changed:
            raise DataError(f"{changed[0]} changed while it was tokenised; start again when it is finished")
        index = join_shards(store, fingerprint, codec.end_of_text_id, plans)
        kept = len(plans) - len(missing)
        how = f"made; {kept} of {len(plans)} shards were there" if kept else "made"
        return index, "; ".join([how, *(problem for _, problem in found if problem)])

    def _write(
        self, store: Path, missing: Sequence[ShardPlan], codec: Codec, name: str, lock: DirectoryLock
    ) -> None:
        work = _Work(store, missing, f"tokenising {name}", self.on_progress)
        count = self._count_workers(missing)
        if count < 2:
            maker = SampleMaker(self.recipe, codec, vocab_size=self.vocab_size)
            for plan in missing:
                directory = shard_directory(store, plan.number)
                shard = write_shard(maker, plan.jobs, directory, partial(work.on_tokens, plan))
                work.on_done(plan, shard.tokens)
            return
        codec.save(store / CODEC_FILE)
        assignment = Assignment(self.recipe, str(store / CODEC_FILE), self.vocab_size)
        write_shards(
            missing,
            store,
            assignment,
            workers=count,
            pass_fds=[lock.fileno()],
            on_done=work.on_done,
            on_tokens=work.on_tokens,
        )

    def _count_workers(self, missing: Sequence[ShardPlan]) -> int:
        count = self.workers
        if count is None:
            small = sum(plan.nbytes for plan in missing) < SMALL_BYTES
            fit = memory_budget().tightest.available_bytes // WORKER_BYTES
            count = 0 if small else min(len(os.sched_getaffinity(0)) - 1, fit)
        return min(count, len(missing))

    @contextmanager
    def _locked(self, store: Path) -> Iterator[DirectoryLock]:
        """The lock of a store, waited for."""
        while True:
            try:
                lock = DirectoryLock(store)
                break
            except StorageError as error:
                if error.errno != errno.EAGAIN:
                    raise
            self.on_progress(Progress(f"waiting for another run that makes {store}", 0, None))
            time.sleep(PROGRESS_SECONDS)
        with lock:
            yield lock

    def _check_largest(self, index: StoreIndex, files: Sequence[SourceFile]) -> None:
        """The store may have been made for a model with more rows."""
        if index.largest_id >= self.vocab_size:
            number, line = index.largest_at
            token = self.tokenizer.convert_ids_to_tokens(index.largest_id)
            raise DataError(
                f"token {token!r} has the id {index.largest_id} ({files[number].path}:{line}), but the "
                f"embedding of the model has only {self.vocab_size} rows: give this model's tokenizer "
                "(data.tokenizer), or the model as many rows as this one has tokens (model.vocab_size)"
            )


@dataclass
class _Work:
    """The shards that are to be made: how far they are, and whether there is space for the rest."""

    store: Path
    missing: Sequence[ShardPlan]
    what: str
    on_progress: OnProgress
    bytes_done: int = 0
    tokens_done: int = 0
    _tokens: dict[ShardPlan, int] = field(default_factory=dict)  # of unfinished shards
    _next_report: float = 0.0
    _reported: int = 0

    def __post_init__(self) -> None:
        self.bytes_total = sum(plan.nbytes for plan in self.missing)
        self._check_space()

    def on_done(self, plan: ShardPlan, tokens: int) -> None:
        self._tokens.pop(plan, None)
        self.bytes_done += plan.nbytes
        self.tokens_done += tokens
        self._check_space()
        self._report(now=self.bytes_done == self.bytes_total)

    def on_tokens(self, plan: ShardPlan, tokens: int) -> None:
        self._tokens[plan] = tokens
        self._report()

    def _check_space(self) -> None:
        """How many tokens a byte gives is measured on the way: files may be packed, texts of any language."""
        expansion = 4 * self.tokens_done / self.bytes_done if self.bytes_done else LEAST_EXPANSION
        check_free(str(self.store), int(expansion * (self.bytes_total - self.bytes_done)))

    def _report(self, now: bool = False) -> None:
        """Bytes of unfinished shards are guessed from their tokens."""
        if not now and time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + PROGRESS_SECONDS
        token_bytes = self.bytes_done / self.tokens_done if self.tokens_done else 4.0
        guessed = sum(min(plan.nbytes, int(token_bytes * n)) for plan, n in self._tokens.items())
        self._reported = max(self._reported, self.bytes_done + guessed)
        self.on_progress(Progress(self.what, self._reported, self.bytes_total))


@contextmanager
def _named_remedy() -> Iterator[None]:
    """A drive that is full: which key chooses another."""
    try:
        yield
    except StorageError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.args = (f"{error} (data.cache_dir; finished shards are kept)",)
        raise


def _check_counts(index: StoreIndex, files: Sequence[SourceFile], name: str) -> None:
    if not index.documents:
        why = [*_left_out(index.counts), *Counts(**index.counts).problems[:3]]
        raise DataError(
            f"data.files: the {len(files)} files of {name} hold no text to train on"
            + (f" ({'; '.join(why)})" if why else "")
            + "; name other files, or look at data.format and data.text_field"
        )


def _left_out(counts: dict[str, Any]) -> list[str]:
    """In words, of what there is any."""
    words = {
        "empty": "without text",
        "bad_records": "bad records skipped",
        "untrained": "samples without a token to train on left out",
        "rewritten": "conversations whose template renders earlier turns anew",
    }
    return [f"{counts[key]} {text}" for key, text in words.items() if counts[key]]
