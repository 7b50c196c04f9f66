"""Files that a command leaves where an option says."""

from __future__ import annotations

import os
from pathlib import Path

from tierstream.io.durable import write_file
from tierstream.io.errors import ConfigError, StorageError


def check_file(option: str, path: str) -> None:
    """Finds before long work what would make it useless after.

    Raises:
        ConfigError: no file can be written there.
    """
    parent = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file in it")
    if not parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {parent}; make it first")
    if _is_stream(path):
        return
    check_writable(option, parent)


def check_writable(option: str, directory: Path) -> None:
    """Raises ConfigError: this user cannot make files in the existing directory."""
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{option}: {directory} is on a read-only file system; choose another place")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: no permission to write in {directory}; choose another place")


def write_output(path: str, data: bytes) -> None:
    """A regular file is replaced as a whole; a pipe or a device, as in `--json >(jq .)`, is written to.

    Raises:
        StorageError: the file could not be written; what was there before stays.
    """
    if _is_stream(path):
        with open(path, "wb") as stream:
            stream.write(data)
        return
    try:
        write_file(path, data)
    except StorageError as error:
        if error.errno is None:
            raise
        cause = OSError(error.errno, os.strerror(error.errno))  # of a temporary file that nobody knows
        raise StorageError("writing", path, cause, detail="choose another place") from error


def _is_stream(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)
