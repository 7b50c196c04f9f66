"""Whole runs through the trainer, small enough for tests: configuration, records, final planes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from support.rig import tiny_config

from tierstream.engine import config_file
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import CheckpointConfig, checkpoint_path
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.measure.machine import DEFAULT_TUNING
from tierstream.engine.metrics import RunSummary
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.parity.gate import pass_gate
from tierstream.engine.plan import TiersConfig
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io import probes
from tierstream.io.backend import resolve_backend
from tierstream.io.profile import DriveProfile, MachineProfile, drive_identity
from tierstream.tiered.snapshot import Snapshot

VOCABULARY = 300

_WORDS = [
    "the",
    "tier",
    "holds",
    "pages",
    "of",
    "every",
    "plane",
    "and",
    "the",
    "step",
    "streams",
    "them",
    "through",
    "one",
    "small",
    "buffer",
]


def make_run(
    folder: Path, *, steps: int = 8, family: str = "qwen3", tied: bool = True, **model: Any
) -> RunConfig:
    """A run of a tiny model on text that is the same every time; everything lies under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(" ".join(_WORDS[i % 7 :] + _WORDS[: i % 11]) for i in range(120)) + "\n")
    second = folder / "corpus-2.txt"
    second.write_text("\n".join(" ".join(_WORDS[i % 5 : 12]) for i in range(90)) + "\n")
    architecture = folder / "model"
    tiny_config(family, tied=tied, vocab_size=VOCABULARY, **model).save_pretrained(architecture)
    config = RunConfig(
        run_dir=str(folder / "run"),
        model=ModelConfig(config=str(architecture)),
        data=DataConfig(files=[str(corpus), str(second)], vocab_size=VOCABULARY, seq_len=16),
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2),
        tiers=TiersConfig(page=ByteSize(8192), profile=str(made_up_profile(folder))),
        train=TrainConfig(steps=steps, rows_per_step=4, rows_per_chunk=2, loss_chunk_tokens=48),
        checkpoint=CheckpointConfig(),
    )
    # Known from now on: what a test does to the engine is not meant for the comparison of twins.
    pass_gate(config.model, lambda text: None)
    return config


def with_tokenizer(config: RunConfig, directory: Path) -> Path:
    """A directory for a model, with a tokenizer of the run's texts."""
    return train_tokenizer(fingerprint_files([Path(config.data.files[0])]), VOCABULARY, directory)


def made_up_profile(folder: Path) -> Path:
    """Rates that spare a run the seconds in which it would measure this machine."""
    device, filesystem = drive_identity(folder)
    backend = resolve_backend("auto")
    drive = DriveProfile(
        directory=str(folder), device=device, filesystem=filesystem, backend=backend, tuning=DEFAULT_TUNING,
        read=2e9, write=1e9, mixed=1.5e9,
    )  # fmt: skip
    rates = {str(threads): 1e9 for threads in range(1, 257)}
    compute = {f"{kind} {dtype}": 1e11 for kind in ("cpu", "cuda") for dtype in ("bfloat16", "float32")}
    path = folder / "machine.json"
    profile = MachineProfile(cpu=probes.cpu_model(), drives=(drive,), update=rates, compute=compute)
    profile.save(path)
    return path


def train(config: RunConfig) -> RunSummary:
    from tierstream.engine.trainer import Trainer

    return Trainer(config).run()


def train_file(path: str) -> None:
    """Entry of a process of its own: the run that `dump` wrote to `path`."""
    train(config_file.load(RunConfig, Path(path)))


def train_and_be_killed(path: str, step: int) -> None:
    """As `train_file`, until the record of `step` is written; its checkpoint is not."""
    from tierstream.engine.metrics import StepMetrics
    from tierstream.engine.run.callbacks import Callback
    from tierstream.engine.trainer import Trainer

    class Kill(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    Trainer(config_file.load(RunConfig, Path(path)), [Kill()]).run()


def records(config: RunConfig) -> list[dict]:
    return [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]


def final_planes(config: RunConfig) -> dict[tuple[str, str], np.ndarray]:
    """Durable planes of the checkpoint of this run's last step."""
    last = records(config)[-1]["step"]
    return snapshot_planes(Snapshot.open(checkpoint_path(Path(config.run_dir) / "checkpoints", last)))


#: Planes after the last step, and records, of a run that nothing happened to.
Unharmed = tuple[dict[tuple[str, str], np.ndarray], list[dict]]


def unharmed_run(folder: Path, steps: int) -> Unharmed:
    """The run of `make_run`, from its beginning to its end."""
    config = make_run(folder, steps=steps)
    train(config)
    return final_planes(config), records(config)


def assert_ended_like(config: RunConfig, unharmed: Unharmed) -> None:
    """Steps, losses, norms and planes are those of the other run, to the bit."""
    planes, expected = unharmed
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in records(config)] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in expected
    ]
    ours = final_planes(config)
    assert ours.keys() == planes.keys()
    assert [key for key in planes if ours[key].tobytes() != planes[key].tobytes()] == []


def snapshot_planes(snapshot: Snapshot) -> dict[tuple[str, str], np.ndarray]:
    planes = {}
    for (unit, plane), spec in snapshot.planes.items():
        planes[unit, plane] = np.empty(spec.numel, {2: np.uint16, 4: np.float32}[spec.item_bytes])
        snapshot.read_range(unit, plane, 0, planes[unit, plane])
    return planes


def dump(config: RunConfig, path: Path) -> Path:
    path.write_text(config_file.dump(config))
    return path
