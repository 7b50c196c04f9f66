"""Limits of this process on open files and on locked memory (getrlimit(2))."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import NamedTuple

#: More open files than tierstream ever has; some systems grant thousands of millions.
_OPEN_FILES_MAX = 1_048_576


class Limit(NamedTuple):
    """The limit in force, and the one up to which the process may raise it itself; None: unlimited."""

    soft: int | None
    hard: int | None


def open_files() -> Limit:
    """Descriptors that this process may have open: `ulimit -n`."""
    return _limit(resource.RLIMIT_NOFILE)


def locked_memory() -> Limit:
    """Bytes that this process may lock in memory: `ulimit -l`, which shows KiB."""
    return _limit(resource.RLIMIT_MEMLOCK)


def raise_open_files() -> int | None:
    """Raises the soft limit of open files to the hard one, at most to 1,048,576; never lowers it.

    Returns:
        The soft limit now in force; None: unlimited. It is the old one where the system refuses.
    """
    soft, hard = open_files()
    wanted = _OPEN_FILES_MAX if hard is None else min(hard, _OPEN_FILES_MAX)
    if soft is not None and soft < wanted:
        unchanged = resource.RLIM_INFINITY if hard is None else hard
        # A sandbox may forbid the call, or grant less than the hard limit says.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, unchanged))
    return open_files().soft


def _limit(kind: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return Limit(soft, hard)
