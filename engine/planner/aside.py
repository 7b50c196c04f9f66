"""Work in a second process, on a core that would be idle."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

#: Of prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_Begun = TypeVar("_Begun")
_Given = TypeVar("_Given")
_Value = TypeVar("_Value")


@contextmanager
def aside(work: Callable[[], _Value]) -> Iterator[Callable[[], _Value]]:
    """Begins `work` in a copy of this process, and yields what waits for its value. See `companion`."""
    with companion(work, _as_it_is) as give:
        yield give(None)


def _as_it_is(value: _Value, _: None) -> _Value:
    return value


@contextmanager
def companion(
    begin: Callable[[], _Begun], finish: Callable[[_Begun, _Given], _Value]
) -> Iterator[Callable[[_Given], Callable[[], _Value]]]:
    """Does `begin` in a copy of this process, and yields what gives it a value once, to `finish` with; that
    returns what waits for what comes out. The copy ends with the `with` block, and with this process, even if
    that is killed. Where no second core is allowed, or other threads may hold locks that a copy would wait
    for for ever, and where the copy fails, both are done here when what comes out is waited for: errors are
    raised as ever.

    Args:
        begin, finish: in plain Python; torch's threads are not in the copy. What is given, and the value, can
            be pickled.
    """
    if len(os.sched_getaffinity(0)) < 2 or threading.active_count() > 1:
        yield lambda given: lambda: finish(begin(), given)
        return
    parent = os.getpid()
    (asked, asking), (reading, writing) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns wherever a library has threads, though they hold no lock while they have no work.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = os.fork()
    if not copy:
        _end_with(parent)
        os.close(asking)
        _do(begin, finish, asked, writing)
    os.close(asked)
    os.close(writing)

    def give(given: _Given) -> Callable[[], _Value]:
        with suppress(BrokenPipeError), open(asking, "wb", closefd=False) as file:
            pickle.dump(given, file)
        return lambda: wait(given)

    def wait(given: _Given) -> _Value:
        with suppress(EOFError, pickle.UnpicklingError), open(reading, "rb", closefd=False) as file:
            found: _Value = pickle.load(file)
            return found
        return finish(begin(), given)

    try:
        yield give
    finally:
        os.close(asking)
        os.close(reading)
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored
            os.kill(copy, signal.SIGKILL)
            os.waitpid(copy, 0)


def _end_with(parent: int) -> None:
    """In the copy: the kernel kills it when the thread that made it ends; that may have been before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _do(
    begin: Callable[[], _Begun], finish: Callable[[_Begun, _Given], object], asked: int, writing: int
) -> NoReturn:
    """In the copy, which leaves nothing of its own behind: no traceback, and no output of this process that
    had not been written yet.
    """
    try:
        begun = begin()
        with open(asked, "rb") as file:
            data = pickle.dumps(finish(begun, pickle.load(file)))
        with open(writing, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)
