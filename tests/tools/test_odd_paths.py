"""C93: every path with a space, an apostrophe, a $, a colon and an accent in it, through every command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.command import Command, use_drive
from support.exports import stored
from support.models import different
from support.rig import reference_model, tiny_config
from support.runs import VOCABULARY, dump, make_run, records, with_tokenizer
from support.storage_bench import TINY, rows

from tierstream.engine.config import RunConfig
from tierstream.engine.model.config import ModelConfig

NAME = "a b'c$HOME:é"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of that name; afterwards nothing may lie anywhere else: neither beside it, nor in the
    current directory, nor at home.
    """
    for name in (NAME, "home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / NAME / "matplotlib"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / NAME
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "home", "here"}
    assert [*os.listdir(tmp_path / "home"), *os.listdir(tmp_path / "here")] == []


def make(folder: Path) -> RunConfig:
    """A model directory, data by a pattern and as records, held-out data, and the state on a drive."""
    config = make_run(folder, steps=2)
    model = reference_model(tiny_config("qwen3", tied=True, vocab_size=VOCABULARY), torch.float32)
    model.save_pretrained(with_tokenizer(config, folder / "weights"))
    config.model = ModelConfig(path=str(folder / "weights"))
    for name in ("rows", "held"):
        lines = (json.dumps({"text": f"{name} {number} of it"}) for number in range(9))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config.data.files = [str(folder / "corpus*.txt"), str(folder / "rows.jsonl")]
    config.eval.files = [str(folder / "held.jsonl")]
    config.checkpoint.every_steps = 1
    use_drive(config, folder / "drive")
    return config


def test_a_run_from_its_data_to_its_export(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed on the way; the export is moved and loads from its new place."""
    command, config = Command(capsys, odd), make(odd)
    run_file, run_dir = str(dump(config, odd / "run.yaml")), config.run_dir
    for args in (
        ["data", "preview", run_file], ["train", run_file, "--train.steps", "1"],
        ["train", run_file, "--resume", "auto", "--checkpoint.allow_changed", "train.steps"],
        ["inspect", run_dir], ["verify", run_dir], ["report", run_dir], ["doctor", str(odd / "drive")],
        ["export", run_dir, str(odd / "out")],
    ):  # fmt: skip
        status, _, err = command.run(*args)
        assert (status, err) == (0, ""), args
    assert [record["step"] for record in records(config)] == [1, 2]
    assert (Path(run_dir) / "report.html").stat().st_size > 10_000
    assert os.listdir(odd / "drive") == ["tierstream-state"]
    shutil.move(odd / "out", odd / "moved:$1")
    exported = transformers.AutoModelForCausalLM.from_pretrained(odd / "moved:$1")
    begun = load_file(odd / "weights" / "model.safetensors")
    changed = different(stored(odd / "moved:$1"), begun)
    assert sorted(changed) == sorted(begun)
    assert exported.num_parameters() == sum(value.numel() for value in begun.values())


@pytest.mark.parametrize(
    "compare",
    [
        pytest.param([], id="alone"),
        pytest.param(
            ["--compare", "fio"],
            marks=pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed"),
            id="fio",
        ),
    ],
)
def test_a_drive_is_measured(
    odd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compare: list[str]
) -> None:
    """fio takes `:` for the end of a name; its links lie under an odd name too."""
    drive = odd / "drive"
    for folder in (drive, odd / "tmp"):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd / "tmp"))
    options = [*TINY, "--access", "read", "--json", str(odd / "a.json"), "--report", str(odd / "report")]
    status, _, err = Command(capsys, odd).run("bench", "storage", str(drive), *options, *compare)
    assert status == 0, err
    result = json.loads((odd / "a.json").read_text())
    assert result["title"] == f"Storage at {drive}"
    assert f"{drive}, posix to host memory: " in result["notes"][0]
    assert any(entry["backend"].startswith("fio ") for entry in rows(result, "best")) == bool(compare)
    assert (odd / "report" / "report.html").exists()
    assert os.listdir(drive) == os.listdir(odd / "tmp") == []
