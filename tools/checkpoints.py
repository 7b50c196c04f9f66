"""Finding the checkpoint that a command line means."""

from __future__ import annotations

from pathlib import Path

from tierstream.engine.checkpoint import checkpoints
from tierstream.io.errors import CheckpointError


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest checkpoint of the run directory `path`.

    Raises:
        CheckpointError: it is neither, or a run without a checkpoint.
    """
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    directory = path / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(
            f"{path} is no checkpoint (no manifest.json) and no run directory (no checkpoints/)"
        )
    found = checkpoints(directory)
    if not found:
        raise CheckpointError(f"run directory {path} holds no checkpoint yet ({directory} is empty)")
    return found[-1][1]
