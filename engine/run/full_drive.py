"""Drives that are full: which setting names the directory, and what would take less there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstream.engine.config import RunConfig
from tierstream.io.errors import StorageError


@contextmanager
def full_drive_errors(config: RunConfig) -> Iterator[None]:
    """Within, the text of a `StorageError` of a full drive ends with the keys of the run."""
    try:
        yield
    except StorageError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and (keys := _keys(config, error.path)):
            error.args = (f"{error} ({keys})",)
        raise


def _keys(config: RunConfig, path: str) -> str:
    """Of the setting that names the directory of `path`; empty: it is none of the run's."""
    place = Path(path.partition(", ")[0]).resolve()  # the first of several drives
    if any(place.is_relative_to(Path(own).resolve()) for own in config.tiers.nvme_dirs or []):
        return "tiers.nvme_dirs"
    run_dir = Path(config.run_dir).resolve()
    if place.is_relative_to(run_dir) and not place.is_relative_to(run_dir / "data"):
        return "run_dir; a lower checkpoint.keep needs less there"
    return ""  # of prepared data it is said where that is written
