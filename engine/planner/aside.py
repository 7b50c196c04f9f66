"""Work in a second process, on a core that would be idle."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

_Value = TypeVar("_Value")


@contextmanager
def aside(work: Callable[[], _Value]) -> Iterator[Callable[[], _Value]]:
    """Begins `work` in a copy of this process, and yields what waits for its value; the copy ends with the
    `with` block. Where no second core is allowed, or other threads may hold locks that a copy would wait for
    for ever, and where the copy fails, the work is done here when its value is asked for: errors are raised
    as ever.

    Args:
        work: in plain Python; torch's threads are not in the copy. Its value can be pickled.
    """
    if len(os.sched_getaffinity(0)) < 2 or threading.active_count() > 1:
        yield work
        return
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns wherever a library has threads, though they hold no lock while they have no work.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = os.fork()
    if not copy:
        _do(work, writing)
    os.close(writing)

    def value() -> _Value:
        with open(reading, "rb", closefd=False) as file, suppress(EOFError, pickle.UnpicklingError):
            found: _Value = pickle.load(file)
            return found
        return work()

    try:
        yield value
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored
            os.kill(copy, signal.SIGKILL)
            os.waitpid(copy, 0)


def _do(work: Callable[[], object], writing: int) -> NoReturn:
    """In the copy, which leaves nothing of its own behind: no traceback, and no output of this process that
    had not been written yet.
    """
    try:
        data = pickle.dumps(work())
        with open(writing, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)
