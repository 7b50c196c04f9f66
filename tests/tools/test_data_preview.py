"""`tierstream data preview`: what is counted, and which tokens are marked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.chat_templates import byte_tokenizer
from support.command import Command
from support.runs import make_run
from support.token_stores import UNTRAINED, store_of

from tierstream.engine.config_file import dump
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.rows import Rows
from tierstream.tools.data_preview import parts, trained_tokens

PROMPTS = [
    {"prompt": "the tier holds ", "completion": "pages"},
    {"prompt": "every plane streams ", "completion": "through one small buffer of the tier"},
    {"prompt": "of ", "completion": "\x1b[31mred"},
]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return Command(capsys, tmp_path)


def write_run(folder: Path, **data: object) -> None:
    """A run file over two texts and `prompts.jsonl`, with the tokenizer that is trained on them."""
    config = make_run(folder)
    lines = [json.dumps(record) for record in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    for key, value in data.items():
        setattr(config.data, key, value)
    (folder / "run.yaml").write_text(dump(config))


def test_texts_are_counted_and_shown(command: Command, tmp_path: Path) -> None:
    write_run(tmp_path, weights=[1.0, 0.5], packing="stream", seq_len=32)
    status, out, err = command.run("data", "preview", "run.yaml", "--rows", "1", "--train.rows-per-step", "2")
    assert (status, err) == (0, "")
    assert len(re.findall("text 1", out)) == 2
    assert re.search(r"Tokens of a sample: median [\d,]+, longest [\d,]+; a row has 32", out)
    assert re.search(r"\d+ steps an epoch", out)
    assert re.search(r"Row 1: 32 tokens, 3[12] trained\n-- .*corpus", out)
    assert "{+" in out
    assert "Row 2" not in out
    described = out.partition("Row 1")[0].splitlines()
    assert [line for line in described if len(line) > 80 and "corpus" not in line] == []


def test_answers_alone_are_marked(command: Command, tmp_path: Path) -> None:
    write_run(tmp_path, files=["prompts.jsonl"], packing="none", seq_len=64, tokenizer=None)
    status, out, err = command.run("data", "preview", "run.yaml", "--rows", "3", "--train.seed", "3")
    assert (status, err) == (0, "")
    assert "prompt 3" in out
    for record in PROMPTS[:2]:
        assert f"{record['prompt']}{{+{record['completion']}<|endoftext|>+}}" in " ".join(out.split())
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    assert len(re.findall(r"prompts.jsonl:[123]\n", out)) == 3


def test_of_a_stream_the_first_block_is_shown(command: Command, tmp_path: Path) -> None:
    """Nothing is tokenised beyond it, and nothing kept."""
    byte_tokenizer(tmp_path / "tokenizer")
    write_run(tmp_path, files=["prompts.jsonl"], tokenizer="tokenizer", streaming=True, shuffle_window=2)
    status, out, err = command.run("data", "preview", "run.yaml", "--data.seq-len", "128", "--rows", "1")
    assert (status, err) == (0, "")
    assert re.search(r"the first block +prompt \d +2 ", out)
    assert "1 steps a block" in out
    assert "Row 1" in out
    assert not list((tmp_path / "run").glob("data/tokens/*"))


def test_what_is_left_out_is_told_with_its_place(command: Command, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    data = {"files": ["prompts.jsonl"], "tokenizer": "tokenizer", "packing": "whole", "too_long": "drop"}
    write_run(tmp_path, **data, seq_len=40)
    status, out, _ = command.run("data", "preview", "run.yaml", "--rows", "0")
    assert status == 0
    assert re.search(r"left out: .*prompts.jsonl:2\n", out)
    assert "Row 1" not in out


def test_what_is_held_out_is_not_among_the_rows(command: Command, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer")
    write_run(tmp_path, files=["prompts.jsonl"], tokenizer="tokenizer", packing="none", seq_len=128)
    shown = [
        command.run("data", "preview", "run.yaml", "--rows", "9", "--eval.share", share)[1]
        for share in ("null", "0.34")
    ]
    assert [len(re.findall(r"prompts.jsonl:[123]\n", out)) for out in shown] == [3, 2]


def test_errors_are_those_of_training(command: Command, tmp_path: Path) -> None:
    write_run(tmp_path, files=["none.jsonl"])
    command.refused("data", "preview", "run.yaml", said=["'none.jsonl' matches no file"])
    command.refused("data", "preview", "run.yaml", "--rows", "-1", said=["--rows is -1; it must be >= 0"])
    command.refused("data", "preview", "run.yaml", "--dat.files", "a", said=["unknown option --dat.files"])
    command.refused("data", "review", said=["did you mean preview?"])
    command.refused("data", "preview", said=["RUN.yaml is missing"])


def test_long_parts_are_shown_at_their_ends(command: Command, tmp_path: Path) -> None:
    write_run(tmp_path, seq_len=512, packing="stream")
    shortened, whole = (
        command.run("data", "preview", "run.yaml", "--rows", "1", "--whole", value)[1]
        for value in ("false", "true")
    )
    assert re.search(r"\(\.\.\. [\d,]+ characters \.\.\.\)", " ".join(shortened.split()))
    assert "characters ..." not in whole
    assert len(whole) > len(shortened)


def test_marks_are_those_of_the_labels() -> None:
    """The first token of a row or document is no label, whatever its mark."""
    hidden = [UNTRAINED | token for token in (11, 12)]
    store = store_of([[10, *hidden, 13, 14, 0], [20, 21, UNTRAINED | 22, 0]])
    rows = Rows([store], DataConfig(files=["a"], seq_len=12, packing="whole"), rows_per_step=1, seed=0)
    shown = [(ids.tolist(), trained, begins) for ids, trained, begins in parts(rows.batch(0))]
    first = [([10, 11, 12], False, True), ([13, 14, 0], True, False)]
    second = [([20], False, True), ([21], True, False), ([22], False, False), ([0], True, False)]
    assert shown in (first + second, second + first)
    assert trained_tokens(store) == 3 + 2
