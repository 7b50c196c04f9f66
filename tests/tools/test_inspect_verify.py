from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.steps import record

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import StepMetrics
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.run.directory import RunDirectory
from tierstream.tiered.layout import Layout, PlaneSpec, pack_unit
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store
from tierstream.tools import cli

Command = Callable[..., tuple[int, str, str]]
UNITS = [
    pack_unit("embed", "bfloat16", [("embed.weight", (50, 40), 0)]),
    pack_unit("layer.0", "bfloat16", [("q.weight", (60, 60), 0), ("norm.weight", (60,), 1)]),
]
DTYPES = {"weight": "bfloat16", "master_low": "uint16", "exp_avg": "float32", "exp_avg_sq": "float32"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "80")

    def run_here(*args: str) -> tuple[int, str, str]:
        status = cli.main(args)
        out, err = capsys.readouterr()
        return status, "\n".join(line.rstrip() for line in out.splitlines()), err

    return run_here


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(config="tiny"),
        data=DataConfig(files=["a.txt"], seq_len=64),
        tiers=TiersConfig(dram=ByteSize("8MiB")),
        train=TrainConfig(steps=7),
    )


def checkpoint(directory: RunDirectory, config: RunConfig, step: int) -> Path:
    planes = [
        PlaneSpec(unit.name, plane, dtype, unit.numel, True, unit.tensors if plane == "weight" else ())
        for unit in UNITS
        for plane, dtype in DTYPES.items()
    ]
    layout = Layout(4096, {(spec.unit, spec.plane): spec for spec in planes})
    path = directory.checkpoints / f"step-{step:08d}"
    store = Store(layout, dram_bytes=1 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0)
    try:
        for spec in planes:
            values = np.random.default_rng(step).integers(0, 256, spec.nbytes, np.uint8)
            store.write_range(
                spec.unit, spec.plane, 0, values.view({2: np.uint16, 4: np.float32}[spec.item_bytes])
            )
        state = {
            "step": step,
            "applied_updates": step - 1,
            "skipped_total": 1,
            "settings": dataclasses.asdict(config)
            | {"architecture": {"model_type": "llama", "hidden_size": 60}},
        }
        write_snapshot(store, path, state)
    finally:
        store.close()
    return path


@pytest.fixture
def directory(config: RunConfig) -> RunDirectory:
    """A run that wrote checkpoints at steps 2 and 5 and got as far as step 6."""
    directory = RunDirectory(config.run_dir, resume=False)
    directory.write_config(config)
    with RecordWriter(directory.metrics_path, StepMetrics, last_step=0) as writer:
        for step in range(1, 7):
            writer.write(record(step, skipped_total=int(step > 3)))
    for step in (2, 5):
        checkpoint(directory, config, step)
    return directory


CHECKPOINT_TEXT = """\
checkpoint {path}
step 5, 4 updates, 1 skipped steps
Planes

 plane        dtype      units       bytes
 ─────────────────────────────────────────
 weight       bfloat16       2   12.00 KiB
 master_low   uint16         2   12.00 KiB
 exp_avg      float32        2   24.00 KiB
 exp_avg_sq   float32        2   24.00 KiB

llama, 5.66k parameters, 72.00 KiB in pages of 4.00 KiB
"""


def test_inspect_a_checkpoint(run: Command, directory: RunDirectory) -> None:
    path = directory.checkpoints / "step-00000005"
    status, out, err = run("inspect", str(path))
    assert (status, err) == (0, "")
    assert CHECKPOINT_TEXT.format(path=path) in out
    assert (
        out[out.index("settings that") :]
        == f"""\
settings that are not the defaults:
  run_dir: {directory.path}
  model.config: tiny  (default null)
  data.files: a.txt
  data.seq_len: 64  (default 1024)
  tiers.dram: 8 MiB  (default null)
  train.steps: 7  (default null)"""
    )


def test_inspect_a_run(run: Command, directory: RunDirectory) -> None:
    status, out, err = run("inspect", str(directory.path))
    assert (status, err) == (0, "")
    assert out.splitlines()[:3] == [
        f"run {directory.path}",
        "step 6, 1 skipped: loss 1.6667, 256 tok/s",
        "checkpoints of steps 2, 5",
    ]
    assert CHECKPOINT_TEXT.format(path=directory.checkpoints / "step-00000005") in out
    assert "changed since" not in out


def test_inspect_tells_what_has_changed_since(
    run: Command, directory: RunDirectory, config: RunConfig
) -> None:
    changed = dataclasses.replace(config, tiers=TiersConfig(dram=ByteSize("16MiB")))
    directory.write_config(changed)
    _, out, _ = run("inspect", str(directory.path))
    assert out.endswith("\nchanged since, in config.yaml:\n  tiers.dram: 8 MiB -> 16 MiB")


def test_inspect_a_run_that_has_just_begun(run: Command, config: RunConfig) -> None:
    RunDirectory(config.run_dir, resume=False).write_config(config)
    assert run("inspect", config.run_dir) == (0, f"run {config.run_dir}\nno step yet\nno checkpoint yet", "")


def test_verify_reads_every_page(run: Command, directory: RunDirectory) -> None:
    path = directory.checkpoints / "step-00000005"
    said = f"{path}: step 5, 8 planes, 72.00 KiB: every checksum is right"
    assert run("verify", str(path)) == (0, said, "")
    assert run("verify", str(directory.path)) == (0, said, "")


@pytest.mark.parametrize("plane", DTYPES)
def test_verify_finds_one_flipped_bit(run: Command, directory: RunDirectory, plane: str) -> None:
    path = directory.checkpoints / "step-00000005"
    page = path / "layer.0" / plane / "c" / "1"
    content = bytearray(page.read_bytes())
    content[-7] ^= 0x10
    page.write_bytes(content)
    status, out, err = run("verify", str(path))
    assert (status, out) == (2, "")
    assert err.startswith("tierstream: error: ")
    assert f"layer.0/{plane}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_missing_page_is_named(run: Command, directory: RunDirectory, command: str) -> None:
    path = directory.checkpoints / "step-00000005"
    (path / "embed" / "weight" / "c" / "0").unlink()
    status, _, err = run(command, str(path))
    assert status == 2
    assert "embed/weight/c/0" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_directories_that_hold_no_checkpoint(run: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, message in (
        ("empty", "{} is no checkpoint (no manifest.json) and no run directory (no checkpoints/)"),
        ("run", "run directory {} holds no checkpoint yet ({}/checkpoints is empty)"),
        ("file", "{} is not a directory"),
    ):
        path = tmp_path / name
        said = message.format(path, path)
        assert run(command, str(path)) == (2, "", f"tierstream: error: {said}\n")


def test_a_run_whose_newest_checkpoint_is_incomplete_shows_the_one_before(
    run: Command, directory: RunDirectory
) -> None:
    """And says so; `verify` is asked about the newest, whatever it is."""
    newest, older = (directory.checkpoints / f"step-{step:08d}" for step in (5, 2))
    (newest / "manifest.json").unlink()
    status, out, err = run("inspect", str(directory.path))
    assert (status, f"checkpoint {older}" in out) == (0, True)
    assert err.startswith(f"tierstream: warning: checkpoint {newest} is incomplete")
    assert err.endswith(f"; taking {older} instead\n")
    status, _, err = run("verify", str(directory.path))
    assert (status, f"checkpoint {newest} is incomplete" in err) == (2, True)
    (older / "manifest.json").unlink()
    status, _, err = run("inspect", str(directory.path))
    assert (status, f"error: checkpoint {newest} is incomplete" in err) == (2, True)
