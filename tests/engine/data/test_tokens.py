"""The token store: what is written, when it is reused, and what is refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.engine.data.tokenizer import load_tokenizer, train_tokenizer
from tierstream.engine.data.tokens import DOCUMENTS_FILE, INDEX_FILE, TOKENS_FILE, TokenStore, open_tokens
from tierstream.io import seam
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


def documents(store: TokenStore) -> list[list[int]]:
    return [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]


def test_every_document_ends_with_end_of_text_and_empty_files_are_counted(
    tmp_path: Path, tokenizer: Any
) -> None:
    sources = write(tmp_path / "text", TEXTS)
    store = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    expected = [[*tokenizer(TEXTS[i]).input_ids, tokenizer.eos_token_id] for i in (0, 2, 4)]
    assert documents(store) == expected
    assert (store.index.documents, store.index.empty_files) == (3, 2)
    assert store.index.tokens == sum(map(len, expected))
    assert store.origin == f"{store.index.tokens} tokens of 3 documents made, 2 empty files skipped"
    assert store.tokens.dtype == np.uint32
    assert isinstance(store.tokens, np.memmap)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        DOCUMENTS_FILE,
        INDEX_FILE,
        TOKENS_FILE,
    ]


def test_prefix_of_the_tokenizer_begins_every_document(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 1)]
    )
    sources = write(tmp_path / "text", TEXTS)
    store = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    assert documents(store) == [[*tokenizer(TEXTS[i]).input_ids, tokenizer.eos_token_id] for i in (0, 2, 4)]
    assert all(document[0] == 1 for document in documents(store))


def test_store_is_reused_wherever_the_files_are(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    first = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    inode = (tmp_path / "tokens" / TOKENS_FILE).stat().st_ino
    moved = write(tmp_path / "elsewhere", TEXTS)
    again = open_tokens(moved, tokenizer, tmp_path / "tokens", vocab_size=270)
    assert (tmp_path / "tokens" / TOKENS_FILE).stat().st_ino == inode
    assert again.index == first.index
    assert "reused" in again.origin
    assert documents(again) == documents(first)


CHANGES = {
    "one byte of a text": lambda texts: ["the cat sat!", *texts[1:]],
    "one file more": lambda texts: [*texts, "more"],
    "one file less": lambda texts: texts[:-1],
    "order of the files": lambda texts: texts[::-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_tokenised_anew_and_it_is_said(tmp_path: Path, tokenizer: Any, change: str) -> None:
    directory = tmp_path / "tokens"
    before = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, directory, vocab_size=270)
    old = before.index.fingerprint
    sources = write(tmp_path / "changed", CHANGES[change](TEXTS))
    after = open_tokens(sources, tokenizer, directory, vocab_size=270)
    new = after.index.fingerprint
    assert new != old
    assert f"changed (fingerprint {old[:12]} before, {new[:12]} now)" in after.origin
    fresh = open_tokens(sources, tokenizer, tmp_path / "fresh", vocab_size=270)
    assert documents(after) == documents(fresh)


def test_changed_tokenizer_is_another_fingerprint(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    before = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=300)
    tokenizer.add_tokens(["cat sat"])
    after = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=300)
    assert after.index.fingerprint != before.index.fingerprint
    assert 270 in documents(after)[0]


@pytest.mark.parametrize("file", [TOKENS_FILE, DOCUMENTS_FILE, INDEX_FILE])
def test_damaged_store_is_made_anew(tmp_path: Path, tokenizer: Any, file: str) -> None:
    sources = write(tmp_path / "text", TEXTS)
    expected = documents(open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270))
    target = tmp_path / "tokens" / file
    target.write_bytes(target.read_bytes()[:-4])
    again = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    assert "damaged" in again.origin
    assert documents(again) == expected


# Ids beyond the embedding (C49)


def test_id_without_a_row_is_named_with_token_file_and_line(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    texts = ["the cat\n" * 3] * 50 + ["the cat\nsat on\n\nthe <two> mat\n"]
    sources = write(tmp_path / "text", texts)
    with pytest.raises(DataError) as caught:
        open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    assert str(caught.value).startswith(f"token '<two>' has the id 271 ({sources[50].path}:4), but")
    assert "only 270 rows" in str(caught.value)
    assert not (tmp_path / "tokens").exists()


def test_unused_ids_beyond_the_embedding_are_fine(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    store = open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path / "tokens", vocab_size=270)
    assert store.index.largest_id == max(max(document) for document in documents(store)) < 270


def test_reused_store_is_checked_against_the_model_of_today(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    store = open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    rows = store.index.largest_id
    with pytest.raises(DataError, match=rf"has the id {rows} .*only {rows} rows"):
        open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=rows)
    open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=rows + 1)


# What cannot be trained on


@pytest.mark.parametrize("texts", [[""], ["", "\ufeff", ""]])
def test_no_text_at_all_is_refused(tmp_path: Path, tokenizer: Any, texts: list[str]) -> None:
    with pytest.raises(DataError, match=f"the {len(texts)} files of data.files hold no text"):
        open_tokens(write(tmp_path / "text", texts), tokenizer, tmp_path / "tokens", vocab_size=270)


def test_undecodable_file_leaves_nothing_behind_under_the_name(tmp_path: Path, tokenizer: Any) -> None:
    sources = write(tmp_path / "text", TEXTS)
    sources[2].path.write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"002\.txt is no UTF-8 text: byte 0xff at offset 3"):
        open_tokens(sources, tokenizer, tmp_path / "tokens", vocab_size=270)
    assert not (tmp_path / "tokens").exists()
    open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path / "tokens", vocab_size=270)
    assert not (tmp_path / "tokens.tmp").exists()


def test_full_drive_is_named_and_the_old_store_stays(tmp_path: Path, tokenizer: Any) -> None:
    class Full(seam.Syscalls):
        def pwritev(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, "")

    open_tokens(write(tmp_path / "text", TEXTS), tokenizer, tmp_path / "tokens", vocab_size=270)
    before = shutil.copytree(tmp_path / "tokens", tmp_path / "copy")
    with (
        seam.injected(Full()),
        pytest.raises(StorageError, match=r"writing .*tokens\.tmp/.* at byte 0 failed") as caught,
    ):
        open_tokens(write(tmp_path / "new", ["new text"]), tokenizer, tmp_path / "tokens", vocab_size=270)
    assert caught.value.errno == errno.ENOSPC
    for file in before.iterdir():
        assert (tmp_path / "tokens" / file.name).read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "tokens" / INDEX_FILE).read_text())["documents"] == 3
