"""Finding the checkpoint that a command line means."""

from __future__ import annotations

import sys
from pathlib import Path

from tierstream.engine.checkpoint import checkpoints
from tierstream.io.errors import CheckpointError
from tierstream.tiered.snapshot import Snapshot


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run directory `path`, complete or not.

    Raises:
        CheckpointError: it is neither, or a run without a checkpoint.
    """
    return _candidates(path)[-1]


def find_complete_checkpoint(path: Path) -> Path:
    """As `find_checkpoint`, but of a run the newest that opens; what is passed over is said on stderr.

    Raises:
        CheckpointError: there is none; the newest's reason.
    """
    *older, newest = _candidates(path)
    if not older:
        return newest
    try:
        return Snapshot.open(newest).path
    except CheckpointError as error:
        for other in reversed(older):
            try:
                found = Snapshot.open(other).path
            except CheckpointError:
                continue
            print(f"tierstream: warning: {error}; taking {found} instead", file=sys.stderr)
            return found
        raise


def _candidates(path: Path) -> list[Path]:
    """Oldest step first."""
    if (path / "manifest.json").is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    directory = path / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(
            f"{path} is no checkpoint (no manifest.json) and no run directory (no checkpoints/)"
        )
    found = [checkpoint for _, checkpoint in checkpoints(directory)]
    if not found:
        raise CheckpointError(f"run directory {path} holds no checkpoint yet ({directory} is empty)")
    return found
