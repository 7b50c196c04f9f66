"""Checkpoints of a run: where they lie, which one a resume takes, which ones are removed, and what must not
have changed.

A checkpoint is a snapshot of the store (tierstream.tiered.snapshot) named `step-<8 digits>`. It is complete
or not there; order is by step, as a number, never by time stamp. `best` is a link to that of the best
evaluation, which is never removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config_tree import differences
from tierstream.io import durable
from tierstream.io.errors import CheckpointError, ConfigError, DamagedPageError, storage_errors
from tierstream.tiered.capture import Capture
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_capture

_NAME = re.compile(r"step-(\d{8,})")
_BEST = "best"

#: Checkpoints (absolute) whose pages were read and are not what was written -> what was found.
Damaged: TypeAlias = Mapping[Path, str]

#: Keys and sections of a run file that may differ on resume: they change no bit of the state. Data and model
#: may lie elsewhere, but must be the same: the token stream is compared by its fingerprint, the architecture
#: key by key.
_FREE = {
    "run_dir",
    "tiers",
    "checkpoint",
    "data.cache_dir",
    "log",
    "data.files",
    "data.tokenizer",
    "data.vocab_size",
    "data.workers",
    "eval",
    "model.path",
    "model.config",
    "model.vocab_size",  # the architecture tells
    "moe.gpu_cache",
    "optimizer.check_finite",
    "optimizer.placement",
    "optimizer.threads",
    "sample",
    "train.log_samples",
    "train.trace_steps",
}
#: Keys that nothing lets change on resume, and why: those of which planes there are, and in which units, and
#: that of what is kept from training.
_FIXED = {
    **dict.fromkeys(
        ("model.freeze", "model.train_only", "moe.stream"),
        "these are other planes, which no setting makes fit",
    ),
    "eval.share": "it says what is not trained on, so the training data would be others",
}


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved and what it continues from."""

    every_steps: int | None = None
    """Steps between checkpoints; null: none because of steps."""
    every_minutes: float | None = None
    """Minutes between checkpoints; null: none because of time."""
    keep: int = 2
    """Complete checkpoints that are kept; older ones are removed once a newer one is durable."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation as well, as `checkpoints/best`, and write one where none is
    due."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    copy_memory: ByteSize | None = None
    """Host memory for pages of the state that change before the checkpoint under way has them; null: a
    quarter of what is free beside `tiers.dram`. Without, updates wait for the drive of the checkpoint."""
    resume: str = "none"
    """none: a new run. auto: the newest complete checkpoint of `run_dir`, or a new run if there is none.
    Else: a checkpoint directory."""
    allow_changed: list[str] | None = None
    """Keys (like optimizer.lr) that may differ from the run that wrote the checkpoint."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"checkpoint.every_steps is {self.every_steps}; it must be >= 1, or null")
        if self.every_minutes is not None and not 0 < self.every_minutes < float("inf"):
            raise ConfigError(f"checkpoint.every_minutes is {self.every_minutes}; it must be > 0, or null")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep is {self.keep}; it must be >= 1")

    @property
    def on_the_way(self) -> bool:
        """Checkpoints are written while training goes on."""
        return self.every_steps is not None or self.every_minutes is not None or self.keep_best

    @property
    def most_at_once(self) -> int:
        """Checkpoints that stand side by side: an old one goes when its successor is durable."""
        return self.keep + 1 + self.keep_best if self.on_the_way else int(self.at_end)


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything in `directory` that has a checkpoint's name, oldest step first."""
    found = [(int(match[1]), path) for path in _entries(directory) if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def find_resume(
    resume: str,
    directory: Path,
    run_id: str | None,
    on_event: Callable[[str], None],
    damaged: Damaged,
) -> Snapshot | None:
    """The snapshot that `checkpoint.resume` asks for.

    Args:
        run_id: identity of the run that owns `directory`; `auto` passes over checkpoints of other runs.
        on_event: is told what `auto` passes over, why, and what it takes.
        damaged: are passed over, too.

    Raises:
        CheckpointError: a named checkpoint is incomplete or damaged, or all of `directory` are.
    """
    if resume == "none":
        return None
    if resume != "auto":
        return Snapshot.open(Path(resume))
    problems = []
    for _, path in reversed(checkpoints(directory)):
        if (found := damaged.get(Path(os.path.abspath(path)))) is not None:
            problems.append(found)
            continue
        try:
            snapshot = Snapshot.open(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if run_id is None or snapshot.state.get("run_id") == run_id:
            for problem in problems:
                on_event(f"warning: not resumed from: {problem}: {path} is taken")
            return snapshot
        problems.append(f"{path} belongs to another run ({snapshot.state.get('run_id')})")
    if problems:
        raise CheckpointError(
            f"no checkpoint in {directory} can be resumed: {'; '.join(problems)}; name one with "
            "checkpoint.resume, or start anew in another run_dir"
        )
    return None


def with_another(error: DamagedPageError) -> CheckpointError:
    """The error of a checkpoint that a run file names, with the newest other one of its run, if any."""
    named = Path(os.path.realpath(error.root))  # `best` is the name of another
    run_id = _run_id(named)
    for _, path in reversed(checkpoints(named.parent)):
        if path != named and run_id is not None and _run_id(path) == run_id:
            return CheckpointError(f"{error}: checkpoint.resume: {path} is the newest other one of its run")
    return error


def write(
    capture: Capture, directory: Path, step: int, state: Mapping[str, object], *, best: bool = False
) -> Path:
    """Write the checkpoint of `step`. One of the same step, of an earlier process, stands until this one
    takes its place.

    Args:
        best: it is that of the best evaluation so far.
    """
    path = checkpoint_path(directory, step)
    write_capture(capture, path, state, replace=True)
    if best:
        durable.write_link(directory / _BEST, path.name)
    return path


def rotate(directory: Path, newest: Path, keep: int, damaged: Collection[str] = ()) -> None:
    """Remove what is beyond `keep` of the checkpoints of a run up to `newest`, but never the best, and what a
    crash left half-written. Those named in `damaged` stay, and take no place of a whole one. Raises
    StorageError.
    """
    with storage_errors("looking at", directory):
        found, leftovers = checkpoints(directory), _entries(directory)
        best = os.readlink(directory / _BEST) if (directory / _BEST).is_symlink() else None
    run_id = _run_id(newest)
    last = next(step for step, path in found if path == newest)
    spared = {best, *damaged}
    due = (path for step, path in found if step <= last and path.name not in spared)
    own = [path for path in due if _run_id(path) == run_id]
    for old in own[:-keep]:
        durable.remove_tree(old)
    for leftover in leftovers:
        if leftover.suffix in (".tmp", ".removing") and not leftover.is_symlink():
            durable.remove_tree(leftover)


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], allowed: list[str] | None) -> None:
    """Refuse a resume whose settings would change the trajectory.

    Args:
        saved, current: nested settings, as in config.yaml, and the model's `architecture`.
        allowed: dotted keys that may differ.

    Raises:
        CheckpointError: lists every key that differs, with both values.
    """
    free = _FREE | set(allowed or ())
    if current["optimizer"]["schedule"] == "constant":
        free |= {"train.steps", "train.epochs"}  # a longer run has the same learning rates
    idle = {settings.get("moe", {}).get("idle") for settings in (saved, current)}
    if idle <= {"dense", "lazy"}:
        free.add("moe.idle")  # the same bits, and no checkpoint holds an update that was put off
    rows = [settings.get("architecture", {}).get("vocab_size") for settings in (saved, current)]
    if rows[0] != rows[1]:
        raise CheckpointError(
            f"the vocabulary has {rows[0]} rows in the checkpoint and {rows[1]} now (model.vocab_size): "
            "these are other planes, which no setting makes fit; set it back, or export the checkpoint and "
            "start a new run from that"
        )
    changed = sorted(differences(saved, current).items())
    for key, (before, now) in changed:
        if key in _FIXED:
            raise CheckpointError(
                f"{key} is {before} in the checkpoint and {now} now: {_FIXED[key]}; set it back, or export "
                "the checkpoint and start a new run from that"
            )
    different = [
        f"{key}: {before!r} in the checkpoint, {now!r} now"
        for key, (before, now) in changed
        if not {key, key.split(".")[0]} & free
    ]
    if different:
        raise CheckpointError(
            "the run differs from the one that wrote the checkpoint:\n  "
            + "\n  ".join(different)
            + "\nset the values back, or list the keys in checkpoint.allow_changed"
        )


def check_same_data(saved: str | None, current: str) -> None:
    """Raises CheckpointError if the token stream is not the one that the checkpoint was trained on."""
    if saved is not None and saved != current:
        raise CheckpointError(
            f"the training data or the tokenizer changed since the checkpoint (fingerprint {saved[:12]} "
            f"then, {current[:12]} now); restore the files, or start a new run from an export of the "
            "checkpoint"
        )


def _run_id(path: Path) -> object:
    try:
        return Snapshot.open(path).state.get("run_id")
    except CheckpointError:
        return None  # a damaged one is left for a person to look at


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
