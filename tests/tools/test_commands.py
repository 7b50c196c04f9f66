"""One tiny run through all commands, as a user would type them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.runs import make_run

from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import dump, load
from tierstream.engine.metrics import read_metrics
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools import cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def run_here(*args: str) -> tuple[int, str, str]:
        status = cli.main(args)
        return status, *capsys.readouterr()

    return run_here


def test_a_run_from_its_file_to_its_export(run: Command, tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=4)
    file = tmp_path / "run.yaml"
    file.write_text(dump(config))
    run_dir = Path(config.run_dir)

    status, out, err = run("train", "run.yaml", "--train.steps", "2", "--optimizer.schedule", "constant")
    assert (status, err) == (0, "")
    for text in (
        "Plan",
        "steps 1 to 2",
        "A step takes at least",
        "step 2/2",
        "checkpoint ",
        "Traffic",
        "Waiting",
    ):
        assert text in out
    config.train.steps, config.optimizer.schedule = 2, "constant"
    assert load(RunConfig, run_dir / "config.yaml") == config
    assert [metrics.step for metrics in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]
    assert json.loads((run_dir / "result.json").read_text())["last_step"] == 2

    status, out, err = run("train", "run.yaml")
    assert (status, out) == (2, "")
    assert err.startswith(
        f"tierstream: error: run_dir {run_dir} already holds a run (metrics.jsonl, result.json, "
    )

    resume = ["train", "run.yaml", "--optimizer.schedule", "constant", "--checkpoint.resume", "auto"]
    status, out, err = run(*resume, "--train.seed", "3")
    assert (status, out) == (2, "")
    assert "\n  train.seed: 0 in the checkpoint, 3 now\n" in err
    status, out, err = run(*resume)  # more steps at a constant learning rate change nothing of what was
    assert (status, err) == (0, "")
    assert "steps 3 to 4" in out
    assert [metrics.step for metrics in read_metrics(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]

    status, out, err = run("inspect", "run")
    assert (status, err) == (0, "")
    assert "checkpoints of steps 2, 4\n" in out
    assert "  train.steps: 4  (default null)\n" in out
    status, out, err = run("verify", "run")
    assert (status, err) == (0, "")
    assert out.endswith(": every checksum is right\n")

    (tmp_path / "run").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "model")
    status, out, err = run("export", "moved", "exported")
    assert (status, err) == (0, "")
    assert out.startswith("exported: step 4, ")
    status, out, err = run("export", "moved", "exported")
    assert (status, out) == (2, "")
    assert err == "tierstream: error: export directory exported exists; name a new one, or remove it\n"
    status, out, err = run("export", "moved", "again", "--tokenizer", "model")
    assert (status, out) == (2, "")
    tokenizer = tmp_path / "model"
    assert err == f"tierstream: error: {tokenizer} holds no tokenizer; name its directory with --tokenizer\n"
    assert not (tmp_path / "again").exists()
    _assert_exported(tmp_path / "exported", tmp_path / "moved" / "checkpoints" / "step-00000004")


def _assert_exported(directory: Path, checkpoint: Path) -> None:
    """transformers loads it, and its weights are the checkpoint's to the bit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto")
    assert (
        transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True).eos_token_id is not None
    )
    snapshot = Snapshot.open(checkpoint)
    compared = set()
    for (unit, plane), spec in snapshot.planes.items():
        if plane == "weight":
            bits = np.empty(spec.numel, np.uint16)
            snapshot.read_range(unit, plane, 0, bits)
            for tensor in spec.tensors:
                got = model.get_parameter(tensor.name).detach().view(torch.uint16).numpy()
                np.testing.assert_array_equal(got.reshape(-1), bits[tensor.offset : tensor.end])
                compared.add(tensor.name)
    assert compared == dict(model.named_parameters()).keys()
