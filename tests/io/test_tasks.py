"""Requests cut into tasks: coverage of the range, the queue, and what waits at the end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.io.errors import InvariantError
from tierstream.io.tasks import TaskPool


@given(
    offset=st.integers(0, 20_000),
    nbytes=st.integers(0, 50_000),
    task_bytes=st.integers(1, 20_000),
    align_bytes=st.sampled_from([1, 512, 4096]),
)
def test_tasks_cover_the_range_once_and_are_cut_at_aligned_offsets(
    offset: int, nbytes: int, task_bytes: int, align_bytes: int
) -> None:
    pool = TaskPool("test", 2, task_bytes)
    ranges: list[tuple[int, int]] = []
    future = pool.submit(
        lambda start, stop: ranges.append((start, stop)),
        offset,
        nbytes,
        align_bytes=align_bytes,
        on_end=lambda: None,
    )
    assert future.result() == nbytes
    pool.close()
    ranges.sort()
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start
        assert (offset + start) % align_bytes == 0
    assert all(stop - start <= max(task_bytes, align_bytes) for start, stop in ranges)


@pytest.mark.parametrize(("depth", "threads"), [(1, 4), (3, 4), (8, 2)])
def test_no_more_requests_than_the_queue_depth_are_begun(depth: int, threads: int) -> None:
    pool = TaskPool("test", threads, 1, queue_depth=depth)
    lock = threading.Lock()
    now: set[int] = set()
    most = 0
    order: list[int] = []

    def submit(number: int) -> Future[int]:
        def move(start: int, stop: int) -> None:
            nonlocal most
            with lock:
                if number not in now:
                    order.append(number)
                now.add(number)
                most = max(most, len(now))
            time.sleep(0.001)

        def end() -> None:
            with lock:
                now.remove(number)

        return pool.submit(move, 0, 4, align_bytes=1, on_end=end)

    futures = [submit(number) for number in range(20)]
    assert [future.result() for future in futures] == [4] * 20
    pool.close()
    # One request may begin its tasks while its predecessor is being reported.
    assert most <= depth + 1
    assert sorted(order) == list(range(20))
    if depth == 1:
        assert order == list(range(20))


def test_closing_waits_for_requests_that_have_not_begun() -> None:
    pool = TaskPool("test", 1, 1, queue_depth=1)
    done: list[int] = []

    def move(start: int, stop: int) -> None:
        time.sleep(0.002)
        done.append(start)

    futures = [pool.submit(move, 0, 3, align_bytes=1, on_end=lambda: None) for _ in range(5)]
    pool.close()
    assert len(done) == 15
    assert all(future.done() for future in futures)


def test_a_request_from_within_a_callback_has_its_turn() -> None:
    pool = TaskPool("test", 1, 4, queue_depth=1)
    again: list[Future[int]] = []
    seen = threading.Event()

    def submit() -> Future[int]:
        return pool.submit(lambda start, stop: None, 0, 4, align_bytes=1, on_end=lambda: None)

    def next_one(future: Future[int]) -> None:
        again.append(submit())
        seen.set()

    first = pool.submit(lambda start, stop: time.sleep(0.05), 0, 4, align_bytes=1, on_end=lambda: None)
    first.add_done_callback(next_one)
    assert seen.wait(10)
    assert again[0].result(timeout=10) == 4
    pool.close()


@pytest.mark.parametrize("bad", [{"threads": 0}, {"task_bytes": 0}, {"queue_depth": 0}])
def test_numbers_below_one_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(InvariantError, match="must be positive"):
        TaskPool("test", **({"threads": 1, "task_bytes": 1, "queue_depth": 1} | bad))


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_an_interrupt_while_a_request_is_begun_ends_it(monkeypatch: pytest.MonkeyPatch, begun: int) -> None:
    """Ctrl-C comes at any moment; a backend that is closed after it must not wait for tasks nobody began."""
    pool = TaskPool("test", 2, 1)
    done: list[int] = []
    submit, calls = pool._executor.submit, []

    def interrupted(*args: object) -> object:
        if len(calls) == begun:
            raise KeyboardInterrupt
        calls.append(args)
        return submit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pool._executor, "submit", interrupted)
    ended = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda start, stop: done.append(start), 0, 4, align_bytes=1, on_end=ended.set)
    pool.close()
    assert ended.is_set()
    assert len(done) <= begun
