"""A token store is opened: what is made, when it is reused, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.engine.data.progress import Progress
from tierstream.engine.data.samples import Recipe
from tierstream.engine.data.shards import DOCUMENTS_FILE, JOINED, STORE_FILE, TOKENS_FILE, TokenStore
from tierstream.engine.data.tokenise import Tokeniser
from tierstream.engine.data.tokenizer import load_tokenizer, train_tokenizer
from tierstream.io import seam
from tierstream.io.drives import DirectoryLock
from tierstream.io.errors import DataError, StorageError

TEXTS = ["the cat sat\n", "", "on the mat é🙂", "\ufeff", "x"]


def write(folder: Path, texts: list[str]) -> list[SourceFile]:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return fingerprint_files([folder / f"{number:03}.txt" for number in range(len(texts))])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    return train_tokenizer(write(root / "text", TEXTS), 270, root / "tokenizer")


@pytest.fixture
def tokenizer(trained: Path) -> Any:
    return load_tokenizer(trained)


def open_tokens(
    sources: list[SourceFile], tokenizer: Any, cache: Path, *, vocab_size: int = 270, **keys: Any
) -> TokenStore:
    told: list[Progress] = keys.pop("told", [])
    keys = {"workers": 0, "shard_bytes": 20} | keys
    tokeniser = Tokeniser(
        recipe=Recipe("somewhere"), tokenizer=tokenizer, cache=cache, vocab_size=vocab_size,
        on_progress=told.append, **keys,
    )  # fmt: skip
    return tokeniser.open(sources, "*.txt")


def documents(store: TokenStore) -> list[list[int]]:
    return [
        store.read(number, 0, int(length)).tolist() for number, length in enumerate(store.lengths.tolist())
    ]


def only_store(cache: Path) -> Path:
    (store,) = (cache / "tokens").iterdir()
    return store


def test_every_document_ends_with_end_of_text_and_empty_files_are_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    store = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    expected = [[*tokenizer(TEXTS[i]).input_ids, tokenizer.eos_token_id] for i in (0, 2, 4)]
    assert documents(store) == expected
    assert (store.documents, store.counts.samples, store.counts.empty) == (3, 3, 2)
    assert store.tokens == sum(map(len, expected))
    assert store.origin == f"{store.tokens} tokens of 3 documents made; 2 without text"
    assert store.end_of_text_id == tokenizer.eos_token_id
    assert not store.masked
    assert store.where(1) == f"{tmp_path}/text/002.txt:1"
    assert len(list(only_store(tmp_path).glob("0*"))) > 1


def test_arrays_are_maps_of_files(tmp_path: Path, tokenizer: Any) -> None:
    store = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    for array in (store.lengths, store.first_trained, store.read(0, 0, 3)):
        while isinstance(array.base, np.ndarray) and not isinstance(array, np.memmap):
            array = array.base
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable


def test_prefix_of_the_tokenizer_begins_every_document(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 1)]
    )
    store = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    assert documents(store) == [[*tokenizer(TEXTS[i]).input_ids, tokenizer.eos_token_id] for i in (0, 2, 4)]
    assert all(document[0] == 1 for document in documents(store))


def test_store_is_reused_wherever_the_files_are(tmp_path: Path, tokenizer: Any) -> None:
    first = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    files = [path for path in only_store(tmp_path).rglob("*") if path.is_file()]
    before = {path: path.stat().st_ino for path in files}
    again = open_tokens(write(tmp_path / "elsewhere", TEXTS), tokenizer, tmp_path)
    assert {path: path.stat().st_ino for path in files} == before
    assert "reused" in again.origin
    assert again.fingerprint == first.fingerprint
    assert documents(again) == documents(first)
    assert again.where(0) == f"{tmp_path}/elsewhere/000.txt:1"


CHANGES = {
    "one byte of a text": lambda texts: ["the cat sat!", *texts[1:]],
    "one file more": lambda texts: [*texts, "more"],
    "one file less": lambda texts: texts[:-1],
    "order of the files": lambda texts: texts[::-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_another_store(tmp_path: Path, tokenizer: Any, change: str) -> None:
    before = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    sources = write(tmp_path / "changed", CHANGES[change](TEXTS))
    after = open_tokens(sources, tokenizer, tmp_path)
    assert after.fingerprint != before.fingerprint
    assert "made" in after.origin
    assert documents(after) == documents(open_tokens(sources, tokenizer, tmp_path / "fresh"))
    assert "reused" in open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path).origin


def test_changed_tokenizer_is_another_store(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    before = open_tokens(sources, tokenizer, tmp_path, vocab_size=300)
    tokenizer.add_tokens(["cat sat"])
    after = open_tokens(sources, tokenizer, tmp_path, vocab_size=300)
    assert after.fingerprint != before.fingerprint
    assert 270 in documents(after)[0]


@pytest.mark.parametrize(
    "file", [f"00000/{TOKENS_FILE}", f"{JOINED}/{DOCUMENTS_FILE}", f"{JOINED}/{STORE_FILE}"]
)
def test_damaged_store_is_made_anew_and_says_why(tmp_path: Path, tokenizer: Any, file: str) -> None:
    sources = write(tmp_path / "text", TEXTS)
    expected = documents(open_tokens(sources, tokenizer, tmp_path))
    target = only_store(tmp_path) / file
    target.write_bytes(target.read_bytes()[:-4])
    again = open_tokens(sources, tokenizer, tmp_path)
    assert f"{only_store(tmp_path)} is damaged" in again.origin
    assert "shards were there" in again.origin
    assert documents(again) == expected
    assert "damaged" not in open_tokens(sources, tokenizer, tmp_path).origin


# Ids beyond the embedding (C49)


def test_id_without_a_row_is_named_with_token_file_and_line(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    texts = ["the cat\n" * 3] * 50 + ["the cat\nsat on\n\nthe <two> mat\n"]
    sources = write(tmp_path / "text", texts)
    with pytest.raises(DataError) as caught:
        open_tokens(sources, tokenizer, tmp_path)
    assert str(caught.value).startswith(f"token '<two>' has the id 271 ({sources[50].path}:4), but")
    assert "only 270 rows" in str(caught.value)


def test_unused_ids_beyond_the_embedding_are_fine(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    store = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path)
    assert max(max(document) for document in documents(store)) < 270


def test_reused_store_is_checked_against_the_model_of_today(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    rows = max(max(document) for document in documents(open_tokens(sources, tokenizer, tmp_path)))
    with pytest.raises(DataError, match=rf"has the id {rows} \(.*\.txt:1\).*only {rows} rows"):
        open_tokens(sources, tokenizer, tmp_path, vocab_size=rows)
    open_tokens(sources, tokenizer, tmp_path, vocab_size=rows + 1)


# What cannot be trained on


@pytest.mark.parametrize("texts", [[""], ["", "\ufeff", ""]])
def test_no_text_at_all_is_refused_each_time(tmp_path: Path, tokenizer: Any, texts: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(
            DataError, match=rf"the {len(texts)} files of \*\.txt hold no text.*{len(texts)} with"
        ):
            open_tokens(write(tmp_path / "text", texts), tokenizer, tmp_path)


def test_after_a_bad_file_is_mended_finished_shards_are_of_use(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"file number {i:04}" for i in range(12)]
    sources = write(tmp_path / "text", texts)
    whole = sources[11].path.read_bytes()
    sources[11].path.write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"011\.txt is no UTF-8 text: byte 0xff at offset 3"):
        open_tokens(sources, tokenizer, tmp_path)
    sources[11].path.write_bytes(whole)
    store = open_tokens(sources, tokenizer, tmp_path)
    assert "11 of 12 shards were there" in store.origin
    assert documents(store) == documents(open_tokens(sources, tokenizer, tmp_path / "fresh"))


def test_a_file_that_changes_meanwhile_ends_the_work_and_leaves_no_shard(
    tmp_path: Path, tokenizer: Any
) -> None:
    sources = write(tmp_path / "text", [f"file number {i:04}" for i in range(4)])

    class Changing(list[Progress]):
        def append(self, progress: Progress) -> None:
            sources[2].path.write_text("another text")

    with pytest.raises(DataError, match=r"002\.txt changed while it was tokenised"):
        open_tokens(sources, tokenizer, tmp_path, told=Changing())
    assert [path.name for path in only_store(tmp_path).iterdir()] == [".tierstream.lock"]


# Space, locks, progress


def test_full_drive_is_named_with_a_remedy_and_finished_shards_stay(tmp_path: Path, tokenizer: Any) -> None:
    class Full(seam.Syscalls):
        def pwritev(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
            if "00002.tmp/tokens.u32" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, "")
            return super().pwritev(fd, buffer, offset)

    sources = write(tmp_path / "text", [f"file number {i:04}" for i in range(4)])
    with seam.injected(Full()), pytest.raises(StorageError) as caught:
        open_tokens(sources, tokenizer, tmp_path)
    for words in ("00002.tmp/tokens.u32 at byte 0 failed", "the drive is full", "data.cache_dir"):
        assert words in str(caught.value)
    assert sorted(path.name for path in only_store(tmp_path).glob("0*")) == ["00000", "00001"]
    assert "2 of 4 shards were there" in open_tokens(sources, tokenizer, tmp_path).origin


@pytest.mark.parametrize(("free", "shards_made"), [(10, 0), (35, 1)])
def test_too_little_space_is_refused_before_the_work_or_when_its_rate_is_known(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, free: int, shards_made: int
) -> None:
    class Small(seam.Syscalls):
        def statvfs(self, path: str) -> Any:
            return os.statvfs_result((1, 1, 0, 0, free, 0, 0, 0, 0, 255))

    sources = write(tmp_path / "text", [f"file number {i:04}" for i in range(4)])
    with seam.injected(Small()), pytest.raises(StorageError, match=rf"are needed there, {free} B"):
        open_tokens(sources, tokenizer, tmp_path)
    assert len(list(only_store(tmp_path).glob("0*"))) == shards_made


def test_a_second_run_waits_for_the_first_and_reuses_its_store(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    expected = documents(open_tokens(sources, tokenizer, tmp_path / "first"))
    store = only_store(tmp_path / "first")
    target = tmp_path / "cache" / "tokens" / store.name
    target.mkdir(parents=True)
    told: list[Progress] = []
    with DirectoryLock(target) as lock, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_tokens, sources, tokenizer, tmp_path / "cache", told=told)
        while not told:
            time.sleep(0.01)
        shutil.copytree(store, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".tierstream.lock"))
        fcntl.flock(lock.fileno(), fcntl.LOCK_UN)
        opened = opening.result()
    assert "waiting for another run" in told[0].what
    assert "reused" in opened.origin
    assert documents(opened) == expected


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", [f"file number {i:04}" for i in range(9)])
    told: list[Progress] = []
    open_tokens(sources, tokenizer, tmp_path, told=told)
    total = sum(source.nbytes for source in sources)
    assert told[-1] == Progress("tokenising *.txt", total, total, "bytes")
    assert all(0 <= progress.done <= total for progress in told)
    assert len(told) < 9
