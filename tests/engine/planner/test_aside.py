"""Work in a copy of this process: the same values and errors as here, and nothing is left of the copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tierstream.engine.planner.aside import aside, companion

HERE = os.getpid()


@pytest.fixture(autouse=True)
def copies(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Those that were made, none of which is left, nor waits for somebody to ask how it ended."""
    made, fork = list[int](), os.fork

    def noted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", noted)
    yield made
    for copy in made:
        with pytest.raises(ProcessLookupError):
            os.kill(copy, 0)


def asked(work: Callable[[], object]) -> object:
    with aside(work) as value:
        return value()


def test_the_value_is_that_of_another_process() -> None:
    assert asked(lambda: (os.getpid() != HERE, "x" * 1_000_000)) == (True, "x" * 1_000_000)


@pytest.mark.parametrize(
    "end",
    [
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: os.kill(os.getpid(), signal.SIGINT),
        lambda: (_ for _ in ()).throw(ValueError("in the copy")),
        lambda: None,  # but its value cannot be pickled
    ],
)
def test_what_fails_in_the_copy_is_done_here(
    end: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> object:
        if os.getpid() != HERE:
            end()
            return lambda: None
        return "here"

    print("not written yet", end="")
    assert asked(work) == "here"
    assert capfd.readouterr() == ("not written yet", "")


def test_a_companion_begins_before_it_is_asked() -> None:
    """What it is given and what comes out may be larger than a pipe holds."""
    begun, times = os.pipe(), 1_000_000

    def begin() -> str:
        os.write(begun[1], b"x")
        return "a"

    def finish(what: str, given: str) -> tuple[bool, str]:
        return os.getpid() != HERE, what + given

    with companion(begin, finish) as give:
        assert os.read(begun[0], 1) == b"x"
        assert give("b" * times)() == (True, "a" + "b" * times)
    for end in begun:
        os.close(end)


def test_a_companion_works_on_what_it_is_given_before_that_is_waited_for() -> None:
    reading, writing = os.pipe()

    def finish(begun: None, given: bytes) -> int:
        os.write(writing, given)
        return os.getpid()

    with companion(lambda: None, finish) as give:
        wait = give(b"x")
        assert os.read(reading, 1) == b"x"
        assert wait() != HERE
    for end in (reading, writing):
        os.close(end)


@pytest.mark.parametrize("place", ["begin", "finish"])
def test_what_fails_in_a_companion_is_done_here(place: str) -> None:
    def step(name: str) -> str:
        if name == place and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    with companion(lambda: step("begin"), lambda begun, given: begun + step("finish") + given) as give:
        assert give("x" * 1_000_000)() == "beginfinish" + "x" * 1_000_000


def test_an_error_is_raised_as_ever() -> None:
    def work() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        asked(work)


def test_the_copy_ends_with_the_block(copies: list[int]) -> None:
    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt), aside(lambda: time.sleep(60)):
        raise KeyboardInterrupt
    assert time.monotonic() - since < 30
    assert len(copies) == 1


def test_the_copy_ends_with_a_killed_process() -> None:
    """Standard output, which both hold, ends when both have."""
    script = """
import os, time
from tierstream.engine.planner.aside import aside
os.sched_getaffinity = lambda pid: {0, 1}
def work():
    print(os.getpid(), flush=True)
    time.sleep(600)
with aside(work):
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        copy = int(process.stdout.readline())
        assert copy != process.pid
        process.kill()
        try:
            assert process.communicate(timeout=60) == ("", None)
        except subprocess.TimeoutExpired:
            os.kill(copy, signal.SIGKILL)
            raise


def test_nothing_is_copied_where_that_helps_nobody_or_is_not_safe(
    copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert asked(os.getpid) == HERE
    stop.set()
    thread.join()
    assert asked(os.getpid) == copies[0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert asked(os.getpid) == HERE
    assert len(copies) == 1
