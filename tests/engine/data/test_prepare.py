"""From the files of a run to its rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rig import tiny_config
from support.runs import make_run

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.prepare import check_packing, open_data, position_warning, tokenizer_directory
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.parity.verdict import Check, Verdict
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import ConfigError, DataError


def open_text(
    root: Path, model: ModelConfig | None = None, rows: int = 300, rows_per_step: int = 1, **keys: Any
) -> Rows:
    data, model = DataConfig(files=[str(root / "*.txt")], **keys), model or ModelConfig(config="none")
    stores = open_data(data, model, root / "data", vocab_size=rows)
    return Rows(stores, data, rows_per_step=rows_per_step, seed=0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} of the little corpus\n" * (number + 1))
    return tmp_path


def test_end_of_text_is_a_label_even_where_padding_is_the_same_id(tmp_path: Path) -> None:
    """Masks come from lengths, never from an id (C37): "a" + EOS and "a b c" + EOS give 1 + 3 labels."""
    (tmp_path / "0.txt").write_text("a")
    (tmp_path / "1.txt").write_text("abc")
    packed = open_text(tmp_path, vocab_size=258, seq_len=16)
    batch = packed.batch(0)
    assert packed.stores[0].end_of_text_id == 0
    assert batch.trained_tokens == 4
    assert np.count_nonzero(batch.labels == 0) == 2
    assert np.count_nonzero(batch.input_ids == 0) == 2 + 10


def test_end_of_text_inside_a_document_is_an_ordinary_token(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("ab<|endoftext|>cd")
    batch = open_text(tmp_path, vocab_size=258, seq_len=8).batch(0)
    assert batch.trained_tokens == 5
    assert batch.input_ids[0].tolist().count(0) == 2 + 2
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_text_comes_back_from_the_rows(corpus: Path) -> None:
    packed = open_text(corpus, vocab_size=300, seq_len=64, rows_per_step=1000)
    tokenizer = load_tokenizer(corpus / "data" / "tokenizer")
    batch, (_, order) = packed.batch(0), packed.rows_of_step(0)
    in_stream_order = batch.input_ids[np.argsort(order)].ravel()
    text = tokenizer.decode(in_stream_order[: int(packed.stores[0].lengths.sum())])
    documents = packed._epoch(0).samples
    texts = [(corpus / f"{number:02}.txt").read_text() for number in documents]
    assert text == "".join(t + "<|endoftext|>" for t in texts)


def test_second_opening_reuses_tokenizer_and_tokens(corpus: Path) -> None:
    first = open_text(corpus, vocab_size=300, seq_len=64)
    stats = {path: path.stat().st_ino for path in (corpus / "data").rglob("*")}
    again = open_text(corpus, vocab_size=300, seq_len=100)
    assert {path: path.stat().st_ino for path in (corpus / "data").rglob("*")} == stats
    assert again.fingerprint == first.fingerprint
    (corpus / "07.txt").write_text("changed")
    assert open_text(corpus, vocab_size=300, seq_len=64).fingerprint != first.fingerprint


def test_tokenizer_is_the_given_one_else_the_models_else_a_trained_one(corpus: Path) -> None:
    open_text(corpus, vocab_size=280)
    own = corpus / "model"
    load_tokenizer(corpus / "data" / "tokenizer").save_pretrained(own)
    (own / "config.json").write_text("{}")
    data, given = corpus / "data", str(corpus / "given")
    with_own, bare = ModelConfig(path=str(own)), ModelConfig(config="none")
    for config, model, expected in [
        (DataConfig(files=["x"], tokenizer=given), with_own, corpus / "given"),
        (DataConfig(files=["x"]), with_own, own),
        (DataConfig(files=["x"]), ModelConfig(config=str(own)), own),
        (DataConfig(files=["x"]), ModelConfig(config=str(own / "config.json")), own),
        (DataConfig(files=["x"]), bare, data / "tokenizer"),
    ]:
        assert tokenizer_directory(config, model, data) == expected
    assert open_text(corpus, with_own, vocab_size=999, rows=280).batch(0).input_ids.max() < 280


def test_trained_vocabulary_must_fit_the_embedding(corpus: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no tokenizer is given .* data\.vocab_size 301, but the embedding .* 300 rows"
    ):
        open_text(corpus, vocab_size=301)
    assert not (corpus / "data").exists()


def test_weights_are_not_given_the_tokens_of_another_tokenizer(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path .*model holds no tokenizer.*or name its directory in"):
        open_text(corpus, ModelConfig(path=str(corpus / "model")), vocab_size=280)
    assert not (corpus / "data").exists()


def test_nothing_to_train_on_is_refused_before_a_tokenizer_is_trained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"the 1 files of data\.files hold no text"):
        open_text(tmp_path, vocab_size=258)
    data = DataConfig(files=[str(tmp_path / "none*.txt")])
    with pytest.raises(DataError, match=r"'.*none\*\.txt' matches no file"):
        open_data(data, ModelConfig(config="x"), tmp_path, vocab_size=9)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"files": []}, r"data\.files is \[\]"),
        ({"files": ["a", ""]}, "none empty"),
        ({"files": ["a"], "vocab_size": 257}, r"data\.vocab_size is 257; it must be at least 258"),
        ({"files": ["a"], "seq_len": 1}, r"data\.seq_len is 1; it must be at least 2"),
        ({"files": ["a"], "tokenizer": ""}, r"data\.tokenizer is empty"),
        ({"files": ["a"], "weights": [1, 2]}, r"data\.weights has 2 values and data\.files 1 entries"),
        (
            {"files": ["a", "b"], "weights": [1, 0]},
            r"data\.weights is \[1, 0\]; each must be a number above 0",
        ),
        ({"files": ["a"], "too_long": "split"}, r"data\.too_long is split and data\.packing is auto"),
    ],
)
def test_configuration_is_checked(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(**keys)


def test_configuration_module_does_not_import_torch() -> None:
    heavy = "{'torch', 'transformers'}"
    code = f"import sys, tierstream.engine.data.prepare; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_models_that_mix_the_documents_of_a_row_are_refused() -> None:
    data = DataConfig(files=["a"])
    check_packing(data, "auto", Verdict("Model", (Check("packing", True, "they do not see each other"),)))
    recurrent = Verdict("Model", (Check("packing", False, "they see each other"),))
    said = r"packing is auto, and Model does not keep .*\(they see each other\); use data\.packing: none"
    with pytest.raises(ConfigError, match=said):
        check_packing(data, "auto", recurrent)
    check_packing(DataConfig(files=["a"], packing="none"), "auto", recurrent)
    check_packing(DataConfig(files=["a"], isolate_documents=False), "auto", recurrent)
    with pytest.raises(ConfigError, match=r"leave model\.attention \(eager\) to auto, or use data"):
        check_packing(data, "eager", recurrent)


def test_rows_longer_than_the_positions_of_the_model_are_told(tmp_path: Path) -> None:
    """The tiny model has 64."""
    config, told = make_run(tmp_path, steps=1), list[str]()
    assert position_warning(replace(config.data, seq_len=64), tiny_config()) is None
    config.data.seq_len, config.train.rows_per_step, config.train.rows_per_chunk = 65, 1, None

    class Told(Callback):
        def on_event(self, text: str) -> None:
            told.append(text)

    Trainer(config, [Told()]).run()
    assert any(text.startswith("warning: data.seq_len is 65, and the model is made for 64") for text in told)
