"""The one tree of errors.

Everything that a user can cause (a bad file, a full disk, a wrong key, too small a budget) is raised as a subclass of
`TierstreamError` whose text names the file or key, the value, the limit and the remedy. The command line prints that text
without a traceback and exits with `exit_status`. A broken promise inside the program is an `InvariantError`: a bug, shown with
its traceback.
"""

from __future__ import annotations

import os


class TierstreamError(Exception):
    """Base of all errors that a user can cause; `str(error)` is the whole message for the screen."""

    exit_status = 2


class ConfigError(TierstreamError):
    """A key, value or option that the run file or the command line got wrong."""


class BudgetError(TierstreamError):
    """A byte budget that cannot hold what must be in the tier at once."""


class ModelSourceError(TierstreamError):
    """A model directory that cannot be loaded: a missing shard, a truncated file, NaN weights, a missing key."""


class DataError(TierstreamError):
    """Training data or a tokenizer that cannot be used."""


class CheckpointError(TierstreamError):
    """A checkpoint that is incomplete, damaged or does not fit the run."""


class StorageError(TierstreamError):
    """A system call on a file failed.

    Args:
        action: what was being done, e.g. "reading".
        path: the file or directory.
        cause: the operating system's error, or None for a short file.
        offset: byte offset of the failed transfer, if it was one.
        detail: extra facts (bytes wanted, bytes free) and the remedy.
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
        why = f": {os.strerror(cause.errno)} (errno {cause.errno})" if cause is not None and cause.errno else ""
        extra = f"; {detail}" if detail else ""
        super().__init__(f"{action} {self.path}{at} failed{why}{extra}")


class TrainingStopped(TierstreamError):
    """The run ended itself, e.g. after too many skipped steps in a row; nothing was lost."""

    exit_status = 3


class InvariantError(RuntimeError):
    """A promise between two parts of tierstream was broken: a bug in the program, never the user's fault."""
