"""Encoding in windows gives the ids of the whole text, whatever the tokenizer and the cut."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tierstream.engine.data.encode import cut, encode

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat,",
    "and",
    "then",
    "it",
    "said:",
    "«voilà»",
    "12345",
    "times",
    "你好世界",
    "🙂🙂",
    "\u2028",
    "x_y",
    "=",
    "f(x);",
]


def prose(words: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    separators = [" "] * 12 + ["\n", "\n\n", "  ", "\t", " \n "]
    return "".join(generator.choice(WORDS) + generator.choice(separators) for _ in range(words))


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([prose(2000)], trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2: no pre-tokenisation at all, a space put in front of the text, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([prose(300)], trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([prose(2000)], trainer)
    return tokenizer


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece_like, "unigram": unigram}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def joined(backend: Any, texts: list[list[str]], **sizes: int) -> list[list[int]]:
    """The ids of each document; every document must end with exactly one piece that is last."""
    ids: list[list[int]] = []
    ended = True
    for piece in encode(backend, texts, **sizes):
        if ended:
            assert piece.document == len(ids)
            ids.append([])
        ids[-1] += piece.ids.tolist()
        ended = piece.last
    assert ended
    return ids


@pytest.mark.parametrize(("window", "overlap"), [(400, 200), (1000, 200), (500, 450), (10**6, 8192)])
def test_windows_give_the_ids_of_the_whole_text(tokenizer: Tokenizer, window: int, overlap: int) -> None:
    texts = [prose(3000, seed=1), "", prose(1), "x", prose(500, seed=2)]
    pieces = [[text[i : i + 777] for i in range(0, len(text), 777)] for text in texts]
    got = joined(tokenizer, pieces, window_chars=window, overlap_chars=overlap, batch_chars=5000)
    assert got == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_windows_that_do_not_agree_are_encoded_as_one() -> None:
    """A word without end whose tokens depend on where it begins."""
    tokenizer = byte_level()
    text = "a" * 999 + " " + "abcab" * 400
    tokenizer.add_tokens(["aaaaaaaaaaaaa"])
    got = joined(tokenizer, [[text], ["next"]], window_chars=300, overlap_chars=100)
    assert got == [tokenizer.encode(t, add_special_tokens=False).ids for t in (text, "next")]


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("ab \n\t\r12.é你🙂"), max_size=600),
    st.integers(40, 200),
    st.integers(0, 2**32),
)
def test_any_text_and_any_cut(text: str, window: int, seed: int) -> None:
    generator = random.Random(seed)
    backend = _byte_level()
    ends = sorted(generator.choices(range(len(text) + 1), k=3))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    got = joined(backend, [pieces], window_chars=window, overlap_chars=window // 2, batch_chars=150)
    assert got == [backend.encode(text, add_special_tokens=False).ids]


_CACHE: list[Tokenizer] = []


def _byte_level() -> Tokenizer:
    if not _CACHE:
        _CACHE.append(byte_level())
    return _CACHE[0]


def test_lines_are_those_of_the_document() -> None:
    text = prose(3000, seed=5)
    backend = _byte_level()
    expected = [
        text.count("\n", 0, start) + 1 for start, _ in backend.encode(text, add_special_tokens=False).offsets
    ]
    lines = [
        piece.line_of(i)
        for piece in encode(backend, [[text]], window_chars=1000, overlap_chars=300)
        for i in range(piece.ids.size)
    ]
    assert lines == expected


def test_windows_overlap_and_cover() -> None:
    text = prose(1000)
    windows = list(cut(7, [text[:10], text[10:]], 500, 100))
    assert all(window.document == 7 for window in windows)
    assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
    assert "".join(w.text[100 * bool(i) :] for i, w in enumerate(windows)) == text
    assert np.diff([w.line for w in windows]).tolist() == [w.text.count("\n", 0, 400) for w in windows[:-1]]


def test_truncation_saved_with_a_tokenizer_is_not_applied() -> None:
    backend = Tokenizer.from_str(_byte_level().to_str())
    backend.enable_truncation(5)
    backend.enable_padding(length=8)
    assert joined(backend, [["the cat sat on a mat"]]) == [_byte_level().encode("the cat sat on a mat").ids]
