"""Rows that are too many or too long: said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.command import Command, nothing_is_locked
from support.runs import make_run

from tierstream.engine.run.run import Run


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


def test_full_memory_in_a_step(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than any machine has, as a mask of long rows may be."""
    config = make_run(tmp_path, steps=1)
    monkeypatch.setattr(Run, "train_step", lambda run: torch.empty(1 << 57, dtype=torch.uint8))
    said = ["host memory is full", f"{1 << 57:,} bytes", "data.seq_len", "train.rows_per_chunk"]
    command.refused_train(config, said)
    nothing_is_locked(config)


def test_steps_with_more_rows_than_an_epoch_are_warned_of(command: Command, tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=1)
    assert "rows of padding" not in command.train(config)[1]
    config.run_dir, config.train.rows_per_step = str(tmp_path / "padded"), 1000
    status, out, _ = command.train(config)
    assert status == 0
    assert "warning: train.rows_per_step is 1000, and an epoch has " in out
