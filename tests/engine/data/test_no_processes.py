"""Little data is prepared without processes (C85): one that is forked cannot use CUDA when its parent has
(and a notebook has for long), and one that is spawned runs a script without a `__main__` guard again.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import VOCABULARY, make_run

from tierstream.engine.data.prepare import open_data


def row_ids(folder: Path) -> np.ndarray:
    config = make_run(folder)
    (first, second) = open_data(config.data, config.model, folder / "data", vocab_size=VOCABULARY)
    return np.concatenate([store.read(0, 0, store.tokens) for store in (first, second)])


def refuse_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process is started")

    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


def test_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = row_ids(tmp_path / "free")
    refuse_processes(monkeypatch)
    assert np.array_equal(row_ids(tmp_path / "alone"), expected)
    assert len(np.unique(expected)) > 20


@pytest.mark.gpu
def test_with_cuda_live_the_ids_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = row_ids(tmp_path / "before")
    torch.cuda.init()
    assert torch.zeros(1, device="cuda").item() == 0
    refuse_processes(monkeypatch)
    assert np.array_equal(row_ids(tmp_path / "after"), expected)
