"""Shards as they are written and read back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crash import Crash, CrashingSyscalls
from support.token_stores import UNTRAINED, store_of

from tierstream.engine.data import shard_writer
from tierstream.engine.data.files import Job, SourceFile
from tierstream.engine.data.samples import Counts, TokenPiece
from tierstream.engine.data.shard_writer import ShardPlan, join_shards, plan_shards, write_shard
from tierstream.engine.data.shards import (
    DOCUMENTS_FILE,
    SHARD_FILE,
    TOKENS_FILE,
    map_store,
    read_shard,
    read_store,
    shard_directory,
)
from tierstream.io import seam
from tierstream.io.errors import DataError

DOCUMENTS = [[5, 6, 0], [7 | UNTRAINED, 8 | UNTRAINED, 9, 0], [1, 2 | UNTRAINED], [3, 0], [4, 4, 0]]


class FakeMaker:
    """Makes documents that are given by the path of the job; each in pieces of two tokens."""

    def __init__(self, documents: dict[str, list[list[int]]]) -> None:
        self.documents = documents
        self.counts = Counts()

    def make(self, job: Job) -> Iterator[TokenPiece]:
        self.counts = Counts(records=len(self.documents[job.path]), by_format={job.kind: 1})
        for number, document in enumerate(self.documents[job.path]):
            for at in range(0, len(document), 2):
                ids = np.array(document[at : at + 2], np.uint32)
                yield TokenPiece(ids, 10 * number + 1, at + 2 >= len(document))


FILES = {"a": DOCUMENTS[:2], "b": [], "c": DOCUMENTS[2:4], "d": DOCUMENTS[4:]}
JOBS = [(number, Job(path, "text", 0, 1)) for number, path in enumerate(FILES)]


def plans_of(*jobs: list[tuple[int, Job]]) -> list[ShardPlan]:
    return [ShardPlan(number, tuple(each), 0) for number, each in enumerate(jobs)]


def write(store: Path, number: int, jobs: Sequence[tuple[int, Job]]) -> Any:
    maker: Any = FakeMaker(FILES)
    return write_shard(maker, jobs, shard_directory(store, number), lambda tokens: None)


def test_documents_are_read_over_shards() -> None:
    store = store_of(DOCUMENTS, shard_documents=2)
    for number, document in enumerate(DOCUMENTS):
        assert store.read(number, 0, 99).tolist() == document
        assert store.read(number, 1, 2).tolist() == document[1:2]
    assert store.lengths.tolist() == [3, 4, 2, 2, 3]
    assert store.first_trained.tolist() == [1, 2, 2, 1, 1]
    assert (store.documents, store.tokens, store.masked) == (5, 14, True)
    assert store.read(0, 0, 2).dtype == np.uint32
    assert store_of(DOCUMENTS, name="a.jsonl").where(3) == "a.jsonl:4"


@pytest.mark.parametrize("buffer", [1, 3, 100])
def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(shard_writer, "BUFFER_TOKENS", buffer)
    plans = plans_of(JOBS[:1], JOBS[1:2], JOBS[2:])
    shards = [write(tmp_path, plan.number, plan.jobs) for plan in plans]
    assert shards[1].documents == 0
    written = join_shards(tmp_path, "made-up", 0, plans)
    index, problem = read_store(tmp_path)
    assert index is not None
    assert problem == ""
    store = map_store(tmp_path, index, [f"today/{name}" for name in FILES], "origin")
    expected = store_of(DOCUMENTS)
    for name in ("lengths", "first_trained"):
        assert getattr(store, name).tolist() == getattr(expected, name).tolist()
    for number, document in enumerate(DOCUMENTS):
        assert store.read(number, 0, len(document)).tolist() == document
    places = ["today/a:1", "today/a:11", "today/c:1", "today/c:11", "today/d:1"]
    assert [store.where(number) for number in range(5)] == places
    assert (store.masked, store.documents, store.tokens, store.end_of_text_id) == (True, 5, 14, 0)
    assert store.counts == Counts(records=5, by_format={"text": 4})
    assert (written.largest_id, list(written.largest_at)) == (9, [0, 11])


def test_a_shard_of_other_jobs_or_other_sizes_is_none(tmp_path: Path) -> None:
    directory = shard_directory(tmp_path, 0)
    assert read_shard(directory, JOBS) == (None, "")
    index = write(tmp_path, 0, JOBS)
    found, problem = read_shard(directory, JOBS)
    assert found is not None
    assert (found.documents, found.tokens, problem) == (index.documents, index.tokens, "")
    assert "another version" in read_shard(directory, JOBS[:-1])[1]
    for name in (TOKENS_FILE, DOCUMENTS_FILE, SHARD_FILE):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(whole[:-1])
        assert read_shard(directory, JOBS)[0] is None
        (directory / name).write_bytes(whole)
    text = json.loads((directory / SHARD_FILE).read_text())
    (directory / SHARD_FILE).write_text(json.dumps(text | {"format": 1}))
    assert read_shard(directory, JOBS)[0] is None


def test_an_error_leaves_nothing_and_what_is_left_is_replaced(tmp_path: Path) -> None:
    class Failing(FakeMaker):
        def make(self, job: Job) -> Iterator[TokenPiece]:
            yield from super().make(job)
            raise DataError("bad line")

    maker: Any = Failing(FILES)
    with pytest.raises(DataError, match="bad line"):
        write_shard(maker, JOBS, shard_directory(tmp_path, 0), lambda tokens: None)
    assert list(tmp_path.iterdir()) == []
    for left in ("00000", "00000.tmp", "00000.removing"):
        (tmp_path / left).mkdir()
        (tmp_path / left / TOKENS_FILE).write_text("left")
    write(tmp_path, 0, JOBS)
    assert [path.name for path in tmp_path.iterdir()] == ["00000"]
    assert read_shard(shard_directory(tmp_path, 0), JOBS)[0] is not None


def test_a_shard_that_has_gone_is_not_left_out(tmp_path: Path) -> None:
    plans = plans_of(JOBS[:2], JOBS[2:])
    write(tmp_path, 1, JOBS[2:])
    with pytest.raises(DataError, match=r"shard 0 of .* has gone; start again"):
        join_shards(tmp_path, "made-up", 0, plans)


def test_small_files_share_a_shard_and_large_ones_are_cut(tmp_path: Path) -> None:
    texts = {
        "a.txt": "x" * 40,
        "b.txt": "",
        "c.txt": "x" * 60,
        "d.jsonl": '{"text": "x"}\n' * 30,
        "e.txt": "x",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [SourceFile(tmp_path / name, len(text), "") for name, text in texts.items()]
    plans = plan_shards(files, 100)
    assert [plan.number for plan in plans] == list(range(len(plans)))
    assert [[number for number, _ in plan.jobs] for plan in plans][:2] == [[0, 1, 2], [3]]
    assert all(plan.nbytes <= 100 for plan in plans)
    assert sum(plan.nbytes for plan in plans) == sum(map(len, texts.values()))


def test_a_store_is_complete_or_not_there_whenever_the_power_goes(tmp_path: Path) -> None:
    """At every system call; what is there afterwards is right, and the rest is made (C51)."""
    plans = plans_of(JOBS[:2], JOBS[2:])

    def make(store: Path) -> None:
        for plan in plans:
            if read_shard(shard_directory(store, plan.number), plan.jobs)[0] is None:
                write(store, plan.number, plan.jobs)
        join_shards(store, "made-up", 0, plans)

    for stop in itertools.count(1):
        store = tmp_path / str(stop)
        store.mkdir()
        machine = CrashingSyscalls(stop)
        with suppress(Crash), seam.injected(machine):
            make(store)
        machine.lose_unsynced(stop, store)
        if read_store(store)[0] is None:
            make(store)
        index, _ = read_store(store)
        assert index is not None
        opened = map_store(store, index, list(FILES), "")
        assert [opened.read(number, 0, 9).tolist() for number in range(5)] == DOCUMENTS
        assert opened.where(4) == "d:1"
        if not machine.stopped:
            break
    assert stop > 50
