"""The published runs are runs: their options are understood, and what they write is ready to be published."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tierstream.tools.bench.train_options import TrainBenchOptions
from tierstream.tools.options import parse_options


@pytest.fixture(scope="module")
def executor() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "executor.py"
    spec = importlib.util.spec_from_file_location("executor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_run_is_understood(executor: ModuleType, tmp_path: Path) -> None:
    for name, options in executor.RUNS.items():
        args = [option.format(nvme=tmp_path) for option in options]
        parsed = parse_options(TrainBenchOptions, args, prog="bench", description="")
        parsed.run_config(str(tmp_path), parsed.nvme_dirs)
        assert parsed.device == "cuda", name


def test_results_are_marked_with_the_commit_and_failures_are_told(
    executor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        file = Path(command[command.index("--json") + 1])
        if file.stem == "7b":
            return SimpleNamespace(returncode=1)
        file.write_text(json.dumps({"command": command}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(executor.subprocess, "run", run)
    assert executor.main([str(tmp_path / "out"), "7b", "depth", "--commit", "abc"]) == 1
    assert capsys.readouterr().err == "failed: 7b\n"
    (file,) = (tmp_path / "out").iterdir()
    result = json.loads(file.read_text())
    assert (file.name, result["publish"]) == ("depth.json", {"commit": "abc"})
    assert result["command"][:3] == ["tierstream", "bench", "train"]
