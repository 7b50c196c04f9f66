"""Throttled drives: their pace on a clock of our own, and that bytes and errors pass through."""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.io.backend import open_backend
from tierstream.io.errors import InvariantError, StorageError
from tierstream.io.throttle import Clock, Limits, Pace, ThrottledBackend
from tierstream.io.transfer import Direction

READ, WRITE = Direction.READ, Direction.WRITE
MB = 1_000_000


def closed_loop(
    limits: Limits, depths: dict[Direction, int], nbytes: int, seconds: float
) -> Counter[Direction]:
    """Bytes moved by each direction in so many seconds, with so many requests under way all the time."""
    pace: Pace[Direction] = Pace(limits)
    for direction, depth in depths.items():
        for _ in range(depth):
            pace.submit(0.0, direction, nbytes, direction)
    moved: Counter[Direction] = Counter()
    while (now := pace.next_s()) is not None and now <= seconds:
        for direction in pace.ended(now):
            moved[direction] += nbytes
            pace.submit(now, direction, nbytes, direction)
    return moved


@pytest.mark.parametrize("nbytes", [1 << 18, 16 * MB])
def test_each_direction_gets_its_rate(nbytes: int) -> None:
    moved = closed_loop(Limits(read=2e9, write=1e9), {READ: 4, WRITE: 4}, nbytes, 1.0)
    assert moved[READ] == pytest.approx(2e9, rel=0.02)
    assert moved[WRITE] == pytest.approx(1e9, rel=0.02)


def test_what_both_share_is_shared_evenly() -> None:
    limits = Limits(read=2e9, write=1e9, total=1.5e9)
    assert closed_loop(limits, {READ: 4}, MB, 1.0)[READ] == pytest.approx(1.5e9, rel=0.01)
    moved = closed_loop(limits, {READ: 64, WRITE: 4}, MB, 1.0)
    assert moved[READ] == pytest.approx(0.75e9, rel=0.02)
    assert moved[WRITE] == pytest.approx(0.75e9, rel=0.02)


@pytest.mark.parametrize(("depth", "rate"), [(1, 0.5e9), (2, 1e9), (8, 1e9)])
def test_latency_counts_where_few_are_under_way(depth: int, rate: float) -> None:
    """A request of 1 ms of bytes with 1 ms of latency."""
    moved = closed_loop(Limits(read=1e9, latency_s=1e-3), {READ: depth}, MB, 1.0)
    assert moved[READ] == pytest.approx(rate, rel=0.02)


def test_an_idle_drive_saves_nothing_up() -> None:
    pace: Pace[str] = Pace(Limits(read=1e6))
    pace.submit(100.0, READ, 1_000_000, "first")
    pace.submit(100.0, READ, 1_000_000, "second")
    assert pace.ended(100.99) == []
    assert pace.ended(101.0) == ["first"]
    assert pace.next_s() == 102.0


def test_who_looks_late_finds_the_same_ends() -> None:
    pace: Pace[int] = Pace(Limits(read=1e6, latency_s=0.5))
    for number in range(4):
        pace.submit(0.0, READ, 1_000_000, number)
    assert pace.ended(3.7) == [0, 1, 2]
    assert pace.ended(4.49) == []
    assert pace.ended(4.5) == [3]


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(Direction), st.integers(0, 10 * MB), st.floats(0, 0.01)), max_size=40
    ),
    total=st.sampled_from([float("inf"), 1.5e9]),
)
def test_no_rate_is_exceeded_and_no_order_changed(
    requests: list[tuple[Direction, int, float]], total: float
) -> None:
    limits = Limits(read=2e9, write=1e9, total=total, latency_s=1e-4)
    pace: Pace[tuple[Direction, int]] = Pace(limits)
    now, ends = 0.0, []
    arrivals = deque(enumerate(requests))
    while arrivals or pace.next_s() is not None:
        following, arrival_s = pace.next_s(), now + arrivals[0][1][2] if arrivals else None
        if arrival_s is not None and (following is None or arrival_s <= following):
            number, (direction, nbytes, _) = arrivals.popleft()
            now = arrival_s
            pace.submit(now, direction, nbytes, (direction, number))
        else:
            assert following is not None
            now = max(now, following)
            ends += [(now, item) for item in pace.ended(now)]
    assert sorted(number for _, (_, number) in ends) == list(range(len(requests)))
    for way, rate in ((READ, 2e9), (WRITE, 1e9)):
        own = [number for _, (direction, number) in ends if direction is way]
        assert own == sorted(own)
        moved = sum(requests[number][1] for number in own)
        assert not own or now >= moved / rate * (1 - 1e-9)
    assert now >= sum(nbytes for _, nbytes, _ in requests) / total * (1 - 1e-9)


class OwnClock(Clock):
    """Time that passes only while the backend waits for it."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        if seconds is None:
            changed.wait()
        else:
            self.time_s += max(0.0, seconds)


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    return path


def test_threads_share_a_throttled_drive(page_file: Path) -> None:
    """As much time as the bytes of all threads take, and the bytes are right."""
    clock = OwnClock()
    backend = ThrottledBackend(open_backend("posix", threads=2), Limits(read=1e8, latency_s=0.0), clock)
    file, content = backend.open(page_file, writable=False), page_file.read_bytes()
    wrong: list[int] = []

    def read(start: int) -> None:
        for offset in range(start, 1 << 20, 1 << 18):
            out = np.empty(1 << 16, np.uint8)
            file.read_into(out, offset).result()
            if out.tobytes() != content[offset : offset + (1 << 16)]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(index << 16,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.close()
    assert wrong == []
    assert clock.time_s == pytest.approx((1 << 20) / 1e8)


def test_the_buffer_itself_goes_to_the_backend_and_its_errors_come_back(page_file: Path) -> None:
    seen = []

    class OneFile:
        path = str(page_file)

        def read_into(self, buffer: np.ndarray, offset: int) -> Future[int]:
            seen.append(buffer)
            future: Future[int] = Future()
            future.set_exception(StorageError("reading", self.path, offset=offset))
            return future

    class OneFileBackend:
        name = "one file"

        def open(self, path: object, *, writable: bool) -> OneFile:
            return OneFile()

        def close(self) -> None:
            seen.append("closed")

    backend = ThrottledBackend(OneFileBackend(), Limits(read=1e12))  # type: ignore[arg-type]
    buffer = np.empty(16, np.uint8)
    future = backend.open(page_file, writable=False).read_into(buffer, 5)
    with pytest.raises(StorageError, match="byte 5"):
        future.result()
    backend.close()
    assert seen[0] is buffer
    assert seen[1:] == ["closed"]


def test_limits_that_no_drive_has() -> None:
    for limits in ({"read": 0.0}, {"total": -1.0}, {"latency_s": -1e-3}):
        with pytest.raises(InvariantError, match="is no drive"):
            Limits(**limits)
