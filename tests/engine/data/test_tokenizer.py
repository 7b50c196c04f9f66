"""Tokenizers from a directory or trained: deterministic, loaded by transformers, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from support.models import edit_json
from tokenizers import processors

from tierstream.engine.data import tokenizer as module
from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.engine.data.tokenizer import (
    document_prefix,
    load_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from tierstream.io.errors import DataError


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceFile]:
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the hat. " * 50 + "<|endoftext|>")
    (tmp_path / "b.txt").write_text("é你🙂 naïve café\n" * 50)
    return fingerprint_files([tmp_path / "a.txt", tmp_path / "b.txt"])


def test_training_is_deterministic_and_transformers_loads_it(
    tmp_path: Path, sources: list[SourceFile]
) -> None:
    first, second = (train_tokenizer(sources, 300, tmp_path / name) for name in ("one", "two"))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(first)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 1)
    assert len(tokenizer) == 300
    for text in ("the cat", " ünseen\t\n\x00 텍스트", "<|pad|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(" the").input_ids) == 1


def test_trained_tokenizer_is_reused_until_files_or_size_change(
    tmp_path: Path, sources: list[SourceFile]
) -> None:
    directory = train_tokenizer(sources, 300, tmp_path / "tokenizer")
    inode = directory.stat().st_ino
    assert train_tokenizer(sources, 300, directory).stat().st_ino == inode
    assert train_tokenizer(sources, 301, directory).stat().st_ino != inode
    assert len(load_tokenizer(directory)) == 301
    train_tokenizer(sources[:1], 280, directory)
    assert len(load_tokenizer(directory)) == 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "tokenizer"]


def test_large_files_give_a_bounded_share(
    tmp_path: Path, sources: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRAINING_BYTES_MAX", sum(source.nbytes for source in sources) // 4)
    read = ["".join(module._head(source, 0.25)) for source in sources]
    for text, source in zip(read, sources, strict=True):
        assert len(text) == -(-source.nbytes // 4)
        assert source.path.read_text().startswith(text)
    assert len(load_tokenizer(train_tokenizer(sources, 258, tmp_path / "t"))) == 258


def test_begin_of_text_that_the_tokenizer_adds_is_the_prefix(
    tmp_path: Path, sources: list[SourceFile]
) -> None:
    directory = train_tokenizer(sources, 300, tmp_path / "t")
    tokenizer = load_tokenizer(directory)
    assert document_prefix(tokenizer) == []
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=[("<|pad|>", 1), ("<|endoftext|>", 0)]
    )
    assert document_prefix(tokenizer) == [1]
    assert tokenizer_fingerprint(tokenizer) != before


def test_fingerprint_is_that_of_the_ids_alone(tmp_path: Path, sources: list[SourceFile]) -> None:
    directory = train_tokenizer(sources, 300, tmp_path / "t")
    before = tokenizer_fingerprint(load_tokenizer(directory))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_fingerprint(load_tokenizer(directory)) == before
    tokenizer = load_tokenizer(directory)
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != before


def _without_eos(directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", lambda config: config.pop("eos_token"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: [f.unlink() for f in d.iterdir()], "holds no tokenizer: none of tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "transformers cannot load the tokenizer in"),
        (lambda d: (d / "tokenizer.json").unlink(), "transformers cannot load the tokenizer in"),
        (_without_eos, "has no eos_token"),
    ],
)
def test_unusable_directories_are_refused(
    tmp_path: Path, sources: list[SourceFile], damage: object, words: str
) -> None:
    directory = train_tokenizer(sources, 300, tmp_path / "t")
    damage(directory)  # type: ignore[operator]
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_directory_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(DataError, match="gpt2 does not exist"):
        load_tokenizer(Path("gpt2"))


def test_origin_is_written_beside_the_tokenizer(tmp_path: Path, sources: list[SourceFile]) -> None:
    """A damaged record means a new training, not an error."""
    directory = train_tokenizer(sources, 300, tmp_path / "t")
    for text in ("", "[]", "{}", json.dumps({"fingerprint": "other"})):
        (directory / module.ORIGIN_FILE).write_text(text)
        train_tokenizer(sources, 300, directory)
        assert len(json.loads((directory / module.ORIGIN_FILE).read_text())["fingerprint"]) == 64


def test_of_records_the_strings_are_trained_on(tmp_path: Path) -> None:
    lines = [
        '{"messages": [{"role": "user", "content": "zebra zebra"}], "n": 1}',
        "no JSON, which is named later",
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines * 50))
    (tmp_path / "a.txt").write_bytes((tmp_path / "a.jsonl").read_bytes())
    as_records, as_text = (fingerprint_files([tmp_path / f"a.{name}"]) for name in ("jsonl", "txt"))
    directory = train_tokenizer(as_records, 280, tmp_path / "tokenizer")
    tokens = set(load_tokenizer(directory).get_vocab())
    assert "Ġzebra" in tokens
    assert not any("JSON" in token for token in tokens)
    before = directory.stat().st_ino
    assert train_tokenizer(as_text, 280, directory).stat().st_ino != before
