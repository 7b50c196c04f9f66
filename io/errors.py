"""The one tree of errors.

Everything that a user can cause (a bad file, a full disk, a wrong key, too small a budget) is raised as a
subclass of `TierstreamError` whose text names the file or key, the value, the limit and the remedy. The
command line prints that text without a traceback and exits with `exit_status`. A broken promise inside the
program is an `InvariantError`: a bug, shown with its traceback.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager


class TierstreamError(Exception):
    """Base of all errors that a user can cause; `str(error)` is the whole message for the screen."""

    exit_status = 2


class ConfigError(TierstreamError):
    """A key, value or option that the run file or the command line got wrong."""


class BudgetError(TierstreamError):
    """A byte budget that cannot hold what must be in the tier at once.

    Args:
        message: the text, which a number of missing bytes follows.
        need_bytes, limit_bytes: what must be in the tier, and what it may hold; None: not known.
        key: of the setting that must be `need_bytes` at least; None: that would not do, or is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        need_bytes: int | None = None,
        limit_bytes: int | None = None,
        key: str | None = None,
    ) -> None:
        self.need_bytes, self.limit_bytes, self.key = need_bytes, limit_bytes, key
        if need_bytes is not None and limit_bytes is not None:
            message += f" ({need_bytes - limit_bytes:,} bytes are missing)"
        super().__init__(message)


class ModelSourceError(TierstreamError):
    """A model directory that cannot be loaded: a missing shard or key, a truncated file, NaN weights."""


class DataError(TierstreamError):
    """Training data or a tokenizer that cannot be used."""


class CheckpointError(TierstreamError):
    """A checkpoint that is incomplete, damaged or does not fit the run."""


class DamagedPageError(CheckpointError):
    """What was read of a checkpoint is not what was written.

    Attributes:
        root: directory of the checkpoint.
    """

    def __init__(self, message: str, root: str) -> None:
        super().__init__(message)
        self.root = root


_REMEDIES = {
    errno.ENOSPC: "the drive is full: free space there or choose a directory on another drive",
    errno.EDQUOT: "the disk quota is used up: free space there or choose a directory on another drive",
    errno.EACCES: "the user who runs tierstream needs access to it",
    errno.EPERM: "the user who runs tierstream needs access to it",
    errno.EROFS: "the file system is mounted read-only: choose another directory",
    errno.EMFILE: "too many files are open in this process: raise `ulimit -n`",
    errno.ELOOP: "its symbolic links lead in a circle",
    errno.ENOTDIR: "a part of this path is a file: name another",
    errno.EIO: "the drive failed or was taken away: see `dmesg`",
}


class StorageError(TierstreamError):
    """A system call on a file failed.

    Args:
        action: what was being done, e.g. "reading".
        path: the file or directory.
        cause: the operating system's error, or None for a short file.
        offset: byte offset of the failed transfer, if it was one.
        detail: extra facts (bytes wanted, bytes free) and the remedy; a general remedy where empty.
    """

    def __init__(
        self,
        action: str,
        path: str | os.PathLike[str],
        cause: OSError | None = None,
        *,
        offset: int | None = None,
        detail: str = "",
    ) -> None:
        self.path = os.fspath(path)
        self.errno = cause.errno if cause is not None else None
        self.offset = offset
        at = f" at byte {offset}" if offset is not None else ""
        why = f": {os.strerror(self.errno)} (errno {self.errno})" if self.errno else ""
        remedy = detail or _REMEDIES.get(self.errno or 0, "")
        super().__init__(f"{action} {self.path}{at} failed{why}{f'; {remedy}' if remedy else ''}")


class CorruptionError(StorageError):
    """A drive gave back other bytes than were written to it, and said nothing."""


@contextmanager
def storage_errors(action: str, path: str | os.PathLike[str], *, detail: str = "") -> Iterator[None]:
    """Raises an `OSError` of the `with` block as the `StorageError` that names action and path."""
    try:
        yield
    except OSError as cause:
        raise StorageError(action, path, cause, detail=detail) from cause


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Within, the text of a `StorageError` begins with the setting that the path is of."""
    try:
        yield
    except StorageError as error:
        error.args = (f"{key}: {error}",)
        raise


class TrainingStopped(TierstreamError):
    """The run ended itself, e.g. after too many skipped steps in a row. Its checkpoints are good."""

    exit_status = 3


class InvariantError(RuntimeError):
    """A promise between two parts of tierstream was broken: a bug in the program, never the user's fault."""
