"""The entries of `data.files` as token stores, and the cache that runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.prepare import open_data
from tierstream.engine.data.progress import Progress
from tierstream.engine.data.shards import TokenStore
from tierstream.engine.model.config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

MODEL = ModelConfig(config="none")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * (number + 1))
    return tmp_path


def opened(corpus: Path, names: list[str], run: str = "run", **keys: Any) -> list[TokenStore]:
    told = keys.pop("on_progress", lambda progress: None)
    data = DataConfig(files=[str(corpus / name) for name in names], vocab_size=270, **keys)
    return open_data(data, MODEL, corpus / run, vocab_size=270, on_progress=told)


def test_each_entry_has_a_store_and_no_file_is_in_two(corpus: Path) -> None:
    stores = opened(corpus, ["3.txt", "*.txt"])
    assert [store.documents for store in stores] == [1, 5]
    assert stores[0].where(0) == f"{corpus}/3.txt:1"
    names = [Path(stores[1].where(number)).name for number in range(5)]
    assert names == ["0.txt:1", "1.txt:1", "2.txt:1", "4.txt:1", "5.txt:1"]
    with pytest.raises(DataError, match=r"entries before '.*/3\.txt' have all of its files; leave it out"):
        opened(corpus, ["*.txt", "3.txt"])


def test_runs_share_a_cache(corpus: Path) -> None:
    first = opened(corpus, ["*.txt"], cache_dir=str(corpus / "cache"))
    second = opened(corpus, ["*.txt"], run="other", cache_dir=str(corpus / "cache"))
    assert "made" in first[0].origin
    assert "reused" in second[0].origin
    assert second[0].fingerprint == first[0].fingerprint
    assert sorted(path.name for path in (corpus / "other").iterdir()) == ["tokenizer"]
    assert "made" in opened(corpus, ["*.txt"], run="third")[0].origin


def test_progress_is_told(corpus: Path) -> None:
    told: list[Progress] = []
    opened(corpus, ["*.txt"], on_progress=told.append)
    total = sum(path.stat().st_size for path in corpus.glob("*.txt"))
    assert told[0] == Progress("hashing data.files", 0, total)
    assert told[-1] == Progress(f"tokenising {corpus}/*.txt", total, total)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"workers": -1}, r"data\.workers is -1; it must be at least 0"),
        ({"cache_dir": ""}, r"data\.cache_dir is empty"),
    ],
)
def test_configuration_is_checked(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(files=["a"], **keys)


def test_a_tokenizer_that_is_named_is_never_trained_anew(corpus: Path) -> None:
    opened(corpus, ["*.txt"])
    origin = corpus / "run" / "tokenizer" / "trained_from.json"
    before = origin.read_text()
    (corpus / "0.txt").write_text("another text")
    opened(corpus, ["*.txt"], tokenizer=str(corpus / "run" / "tokenizer"))
    assert origin.read_text() == before
    opened(corpus, ["*.txt"])
    assert origin.read_text() != before
