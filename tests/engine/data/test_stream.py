"""Rows of texts that are tokenised meanwhile: everything once an epoch, and a resume at any step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstream.engine.data import stream
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.stream import StreamedRows, open_stream
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

LINES = [7, 1, 12]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 20 short texts in all, and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, lines in enumerate(LINES):
        texts = [f"{number}-{line} " * (1 + line % 3) for line in range(lines)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "a.txt").write_text("abc")
    train_tokenizer(fingerprint_files([folder / "a.txt"]), 258, folder / "tokenizer")
    return folder


@contextmanager
def opened(corpus: Path, cursor: dict[str, Any] | None = None, **keys: Any) -> Iterator[StreamedRows]:
    data = DataConfig(
        **{
            "files": [str(corpus / "*.jsonl")], "tokenizer": str(corpus / "tokenizer"), "seq_len": 24,
            "packing": "none", "streaming": True, "shuffle_window": 5, **keys,
        }
    )  # fmt: skip
    rows = open_stream(
        data, ModelConfig(config="none"), corpus, vocab_size=258, rows_per_step=2, seed=3, cursor=cursor
    )
    try:
        yield rows
    finally:
        rows.close()


def steps_of(rows: StreamedRows, first: int, last: int) -> list[tuple]:
    found = []
    for step in range(first, last):
        batch = rows.batch(step)
        names = [Path(name).name for name in rows.where(step)]
        arrays = (batch.input_ids, batch.labels, batch.position_ids)
        found.append((names, batch.samples, rows.epochs(step + 1), *(a.tobytes() for a in arrays)))
    return found


def test_every_sample_once_an_epoch(corpus: Path) -> None:
    """Blocks of 5, 5, 5, 5 samples: 3 steps each."""
    with opened(corpus) as rows:
        found = steps_of(rows, 0, 36)
    everything = sorted(f"{n}.jsonl:{line + 1}" for n, lines in enumerate(LINES) for line in range(lines))
    epochs = [[name for names, *_ in found[e : e + 12] for name in names] for e in (0, 12, 24)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [samples for _, samples, *_ in found[:6]] == [2, 2, 1, 2, 2, 1]
    progress = [epochs for _, _, epochs, *_ in found]
    assert progress == sorted(progress)
    assert [int(done) for done in progress] == [0] * 12 + [1] * 12 + [2] * 12


@pytest.mark.parametrize("packing", ["none", "whole", "stream"])
def test_resume_after_every_step(corpus: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a file that is cut into jobs."""
    monkeypatch.setattr(stream, "JOB_BYTES", 64)
    steps, cursors = 14, []
    with opened(corpus, packing=packing) as rows:
        expected = []
        for step in range(steps):
            cursors.append(json.loads(json.dumps(rows.cursor(step))))
            expected += steps_of(rows, step, step + 1)
    assert len({json.dumps(cursor) for cursor in cursors}) > 3
    for step, cursor in enumerate(cursors):
        with opened(corpus, cursor, packing=packing) as rows:
            assert rows.cursor(step) == cursor
            assert steps_of(rows, step, steps) == expected[step:]


def test_a_long_document_is_cut_into_samples(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_TOKENS", 16)
    (corpus / "long").write_text("x" * 100)
    with opened(corpus, files=[str(corpus / "long")], packing="stream", isolate_documents=False) as rows:
        ids = np.concatenate([rows.batch(step).input_ids.ravel() for step in range(3)])
        assert Counter(ids.tolist()).most_common(1)[0][1] >= 70
        assert all(rows.batch(step).input_ids.shape == (2, 24) for step in range(3, 5))


def test_samples_without_a_trained_token_are_passed_over(corpus: Path) -> None:
    records = [{"prompt": "p" * 30, "completion": "c"}] * 8 + [{"prompt": "p", "completion": "ccc"}]
    path = corpus / "masked.json"
    path.write_text(json.dumps(records))
    with opened(corpus, files=[str(path)], packing="auto") as rows:
        batches = [rows.batch(step) for step in range(3)]
        assert [batch.samples for batch in batches] == [1, 1, 1]
        assert [batch.trained_tokens for batch in batches] == [4, 4, 4]
    path.write_text(json.dumps(records[:8]))
    with (
        opened(corpus, files=[str(path)]) as rows,
        pytest.raises(DataError, match="0 trainable tokens: in no sample of an epoch"),
    ):
        rows.batch(0)


def test_errors_name_file_and_line(corpus: Path) -> None:
    (corpus / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with (
        opened(corpus, files=[str(corpus / "bad.jsonl")]) as rows,
        pytest.raises(DataError, match=r"bad\.jsonl:2"),
    ):
        rows.batch(0)
    (corpus / "empty").write_text("")
    with (
        opened(corpus, files=[str(corpus / "empty")]) as rows,
        pytest.raises(DataError, match="hold nothing"),
    ):
        rows.batch(0)


def test_the_fingerprint_is_of_names_and_sizes(corpus: Path) -> None:
    path = corpus / "changing.jsonl"
    prints = []
    for text in ("aa", "bb", "ccc"):
        path.write_text(json.dumps({"text": text}))
        with opened(corpus, files=[str(path)]) as rows:
            prints.append(rows.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_what_streaming_needs(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tokenizer; name one"), opened(corpus, tokenizer=None):
        pass
    with pytest.raises(ConfigError, match=r"data\.weights is set"), opened(corpus, weights=[1.0]):
        pass
    with pytest.raises(ConfigError, match=r"data\.shuffle_window is 0"), opened(corpus, shuffle_window=0):
        pass
