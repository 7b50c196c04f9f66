"""Resume equals the uninterrupted run to the bit: after every step, with other budgets, and after `kill -9`
at any instant.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from support.children import FORKS
from support.command import told, use_drive
from support.runs import dump, final_planes, make_run, records, snapshot_planes, train, train_file

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import checkpoints
from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import StepMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import CheckpointError, ConfigError
from tierstream.tiered.manifest import decode, encode
from tierstream.tiered.snapshot import Snapshot

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, list[dict]]:
    """(run directory with a checkpoint after every step, planes after the last step, records)."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = make_run(folder, steps=STEPS)
    config.checkpoint.every_steps, config.checkpoint.keep = 1, STEPS
    train(config)
    return Path(config.run_dir), final_planes(config), records(config)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def trajectory(found: list[dict]) -> list[tuple]:
    return [
        (m["step"], m["loss"], m["grad_norm"], m["lr"], m["optimizer_step"], m["trained_tokens"])
        for m in found
    ]


@pytest.mark.parametrize("k", range(1, STEPS))
def test_resume_after_every_step(
    tmp_path: Path, uninterrupted: tuple[Path, dict, list[dict]], k: int
) -> None:
    """Alternately with the state in DRAM, on one drive with little DRAM, on two drives with other pages and
    another policy; updated by other threads.
    """
    run_dir, planes, expected = uninterrupted
    config = make_run(tmp_path, steps=STEPS)
    config.optimizer.placement, config.optimizer.threads = "cpu", 1 + k % 2
    drives = [tmp_path / "one", tmp_path / "two"][: k % 3]
    for drive in drives:
        drive.mkdir()
    if drives:
        config.tiers.nvme_dirs = [str(drive) for drive in drives]
        config.tiers.page = ByteSize(4096 * (1 + k % 3))
        config.tiers.dram = ByteSize(24 * config.tiers.page)
        config.tiers.policy = "lru" if k % 2 else "lookahead"
    config.checkpoint.resume = str(run_dir / "checkpoints" / f"step-{k:08d}")
    train(config)
    assert trajectory(records(config)) == trajectory(expected[k:])
    assert same(final_planes(config), planes)


def test_a_run_whose_state_was_on_a_drive_that_has_gone_goes_on(
    tmp_path: Path, uninterrupted: tuple[Path, dict, list[dict]]
) -> None:
    """C57: masters and moments are in the checkpoint of step 3; nothing else of the state is needed."""
    _, planes, expected = uninterrupted
    config = make_run(tmp_path, steps=STEPS)
    drive = use_drive(config, tmp_path / "drive")
    config.checkpoint.every_steps = 3

    class Fall(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step == 5:
                raise RuntimeError("fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        Trainer(config, [Fall()]).run()
    assert [step for step, _ in checkpoints(Path(config.run_dir) / "checkpoints")] == [3]
    shutil.rmtree(drive)
    drive.mkdir()
    config.checkpoint.resume = "auto"
    train(config)
    assert trajectory(records(config)) == trajectory(expected)
    assert same(final_planes(config), planes)


class Log(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, text: str) -> None:
        self.events.append(text)


def test_auto_takes_the_newest_complete_checkpoint_of_this_run(
    tmp_path: Path, uninterrupted: tuple[Path, dict, list[dict]]
) -> None:
    """C51, C53: a half-written directory, a damaged one and another run's later step are passed over; order
    is by number; which one is taken is said, and why not the others.
    """
    run_dir, planes, expected = uninterrupted
    config = make_run(tmp_path, steps=STEPS)
    shutil.copytree(run_dir, config.run_dir, dirs_exist_ok=True)
    kept = Path(config.run_dir) / "checkpoints"
    for step in (7, 8):
        (kept / f"step-{step:08d}" / "manifest.json").unlink()
    shutil.copytree(kept / "step-00000003", kept / "step-00009999")
    theirs = kept / "step-00009999" / "manifest.json"
    manifest = decode(theirs.read_bytes(), str(theirs))
    manifest.state["run_id"] = "0" * 32
    theirs.write_bytes(encode(manifest))
    (kept / "step-00000012.tmp").mkdir()
    config.checkpoint.resume = "auto"
    log = Log()
    Trainer(config, [log]).run()
    warnings = [event for event in log.events if event.startswith("warning: not resumed from: ")]
    assert [re.findall(r"step-(\d+)", event)[0] for event in warnings] == ["00009999", "00000008", "00000007"]
    assert "belongs to another run" in warnings[0]
    assert "manifest.json" in warnings[1]
    assert f"state: the checkpoint of step 6, {kept / 'step-00000006'}" in log.events
    assert trajectory(records(config)) == trajectory(expected)
    assert same(final_planes(config), planes)
    assert not (kept / "step-00000012.tmp").exists()
    assert (kept / "step-00009999").exists()


def test_a_run_directory_is_not_overwritten(
    uninterrupted: tuple[Path, dict, list[dict]], tmp_path: Path
) -> None:
    config = make_run(tmp_path, steps=STEPS)
    config.run_dir = str(uninterrupted[0])
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config)


def test_a_resume_with_other_settings_lists_them_with_both_values(
    uninterrupted: tuple[Path, dict, list[dict]], tmp_path: Path
) -> None:
    config = make_run(tmp_path, steps=STEPS)
    config.checkpoint.resume = str(uninterrupted[0] / "checkpoints" / "step-00000004")
    config.optimizer.lr = 0.5
    config.train.rows_per_step = 5
    config.train.seed = 99
    with pytest.raises(CheckpointError) as error:
        train(config)
    for text in (
        "optimizer.lr: 0.01 in the checkpoint, 0.5 now",
        "train.rows_per_step: 4",
        "train.seed: 0 in the checkpoint",
    ):
        assert text in str(error.value)
    config = make_run(tmp_path / "allowed", steps=STEPS)
    config.checkpoint.resume = str(uninterrupted[0] / "checkpoints" / "step-00000007")
    config.optimizer.lr = 0.5
    config.checkpoint.allow_changed = ["optimizer.lr"]
    train(config)


def test_other_data_is_refused(uninterrupted: tuple[Path, dict, list[dict]], tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=STEPS)
    text = Path(config.data.files[0])
    text.write_text(text.read_text() + "one more line\n")
    config.checkpoint.resume = str(uninterrupted[0] / "checkpoints" / "step-00000004")
    with pytest.raises(CheckpointError, match="training data or the tokenizer changed"):
        train(config)


def make_unclipped(folder: Path, *, early: bool) -> RunConfig:
    """A run whose updates are deferred, or, to the same bits, carried out during backward; every step is
    saved.
    """
    config = make_run(folder, steps=STEPS)
    config.optimizer.clip_norm, config.optimizer.check_finite = None, not early
    config.checkpoint.every_steps, config.checkpoint.keep = 1, STEPS
    return config


@pytest.mark.parametrize("drive", [False, True], ids=["dram", "nvme"])
def test_every_checkpoint_holds_the_finished_update(tmp_path: Path, drive: bool) -> None:
    """Also where the last updates of backward have just begun; so does an export of it."""
    files, planes = [], []
    for early in (False, True):
        config = make_unclipped(tmp_path / str(early), early=early)
        if drive and early:
            use_drive(config, tmp_path / "drive")
        train(config)
        found = checkpoints(Path(config.run_dir) / "checkpoints")
        assert [step for step, _ in found] == list(range(1, STEPS + 1))
        planes.append([snapshot_planes(Snapshot.open(path)) for _, path in found])
        exported = tmp_path / f"exported-{early}"
        assert told(["export", str(found[2][1]), str(exported)])[0] == 0
        files.append((exported / "model.safetensors").read_bytes())
    assert all(same(deferred, early) for deferred, early in zip(*planes, strict=True))
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("instants", "early"), [(6, False), (3, True)], ids=["deferred", "in-backward"])
def test_kill_at_random_instants(
    tmp_path: Path, uninterrupted: tuple[Path, dict, list[dict]], instants: int, early: bool
) -> None:
    """Training and checkpointing are killed again and again; every resume starts from a complete checkpoint,
    none is lost.
    """
    _, planes, expected = uninterrupted
    config = make_run(tmp_path / "killed", steps=STEPS)
    if early:
        whole, config = make_unclipped(tmp_path, early=False), make_unclipped(tmp_path / "killed", early=True)
        train(whole)
        planes, expected = final_planes(whole), records(whole)
    use_drive(config, tmp_path / "drive")
    config.checkpoint.every_steps, config.checkpoint.keep, config.checkpoint.resume = 1, 2, "auto"
    path = dump(config, tmp_path / "killed.json")
    chance = random.Random(4)
    kills = 0
    while kills < instants:
        process = FORKS.Process(target=train_file, args=(str(path),))
        begin = time.time()
        process.start()
        _wait_for_training(process, Path(config.run_dir), begin)
        time.sleep(chance.random() * 0.3)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode == -signal.SIGKILL
        for snapshot in _complete_checkpoints(Path(config.run_dir)):
            snapshot.verify()
        if process.exitcode == 0:
            shutil.rmtree(config.run_dir)  # it came to its end before the signal: begin again
    train(config)
    assert trajectory(records(config)) == trajectory(expected)
    assert same(final_planes(config), planes)


def _wait_for_training(process: BaseProcess, run_dir: Path, begin: float) -> None:
    """Until the process has opened its metrics, so that the signal falls into training or saving, or has
    ended.
    """
    watched = run_dir / "metrics.jsonl"
    while process.is_alive() and time.time() - begin < 60:
        if watched.exists() and watched.stat().st_mtime >= begin:
            return
        time.sleep(0.005)


def _complete_checkpoints(run_dir: Path) -> list[Snapshot]:
    """Everything that has a checkpoint's name must open as one."""
    return [Snapshot.open(path) for _, path in checkpoints(run_dir / "checkpoints")]


def test_records_never_hold_a_step_twice(uninterrupted: tuple[Path, dict, list[dict]]) -> None:
    lines = (uninterrupted[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert np.isfinite([json.loads(line)["loss"] for line in lines]).all()
