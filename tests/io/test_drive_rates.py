"""Measuring a drive: what is asked of it, to the byte; what is said of it; which tuning is chosen."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import FaultySyscalls, fail, refuse_direct_open

from tierstream.io import drive_rates, seam
from tierstream.io.drive_rates import DriveTarget, Setting, Tuning, best_tuning
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import Case, Measurement, Sample, measure, timed
from tierstream.io.posix import PosixBackend, probe
from tierstream.io.scratch import ScratchFolder
from tierstream.io.transfer import Direction
from tierstream.io.workload import Access, blocks, cached_note, run_requests, storage_bytes

MIB = 1 << 20


@given(
    access=st.sampled_from(["read", "write", "mixed"]),
    per_file=st.integers(1, 20),
    half=st.integers(0, 30),
    start=st.integers(0, 100),
)
def test_blocks_go_through_the_file_in_order(access: Access, per_file: int, half: int, start: int) -> None:
    count = 2 * half
    found = list(blocks(access, 1, per_file * 4096 + 100, 4096, count, start=start))
    assert [request.offset for request in found] == [(start + i) % per_file * 4096 for i in range(count)]
    assert all(request.nbytes == 4096 for request in found)
    writes = sum(request.direction is Direction.WRITE for request in found)
    assert writes == {"read": 0, "write": count, "mixed": half}[access]


def test_mixed_orders_differ_from_run_to_run() -> None:
    orders = {
        tuple(request.direction for request in blocks("mixed", 1, 1 << 20, 4096, 64, seed=seed))
        for seed in range(8)
    }
    assert len(orders) == 8


def test_requests_move_what_they_say_and_no_more_are_under_way_than_shall_be(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        path = folder.new_file("file", MIB)
        backend = PosixBackend(threads=8, task_bytes=4096)
        file = backend.open(path, writable=True)
        watched = Watched(file)
        requests = list(blocks("mixed", 1, MIB, 65536, 32))
        buffers = [np.zeros(65536, np.uint8) for _ in range(5)]
        run_requests([watched], requests, buffers, 3, lambda buffer: buffer.fill(7))
        assert watched.most <= 3
        assert watched.seen == [(r.direction, r.offset, r.nbytes) for r in requests]
        backend.close()
        after = np.fromfile(path, np.uint8)
    # A block that is read and written has been written at the end.
    writes = {request.offset for request in requests if request.direction is Direction.WRITE}
    assert {start for start in range(0, MIB, 65536) if (after[start : start + 65536] == 7).all()} == writes


class Watched:
    """A file that counts its requests under way."""

    def __init__(self, file: object) -> None:
        self.file = file
        self.seen: list[tuple[Direction, int, int]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    def _move(self, direction: Direction, name: str, buffer: np.ndarray, offset: int) -> object:
        with self.lock:
            self.seen.append((direction, offset, buffer.nbytes))
            self.now += 1
            self.most = max(self.most, self.now)
        future = getattr(self.file, name)(buffer, offset)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: object) -> None:
        with self.lock:
            self.now -= 1

    def read_into(self, buffer: np.ndarray, offset: int) -> object:
        return self._move(Direction.READ, "read_into", buffer, offset)

    def write_from(self, buffer: np.ndarray, offset: int) -> object:
        return self._move(Direction.WRITE, "write_from", buffer, offset)


def test_a_failing_request_is_raised_when_none_is_under_way(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        target = DriveTarget([folder.new_file("file", MIB)], MIB)
        setting = Setting(access="read", tuning=Tuning(threads=4, task_bytes=65536, queue_depth=8))
        with (
            seam.injected(FaultySyscalls(fail(5, on="preadv", at=9))),
            pytest.raises(StorageError, match="Input/output error"),
        ):
            target.run(setting, MIB)
        assert target.run(setting, MIB).amount == 16 * 65536


@pytest.mark.parametrize("access", ["read", "write", "mixed"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_run_moves_what_it_counts(tmp_path: Path, access: Access, direct: bool) -> None:
    with ScratchFolder(tmp_path) as folder:
        path = folder.new_file("file", 4 * MIB)
        target = DriveTarget([path], 4 * MIB)
        setting = Setting(
            access=access, tuning=Tuning(threads=2, task_bytes=65536, queue_depth=4), direct=direct
        )
        assert target.path_taken(setting).direct == direct
        watched = FaultySyscalls()
        with seam.injected(watched):
            sample = target.run(setting, 2 * MIB)
        moved = [call for call in watched.calls if call.name in ("preadv", "pwritev")]
        assert sum(call.nbytes for call in moved) == sample.amount == 2 * MIB
        reads = sum(call.nbytes for call in moved if call.name == "preadv")
        assert reads == {"read": 2 * MIB, "write": 0, "mixed": MIB}[access]
        assert {call.direct for call in moved} == {direct}
        assert watched.names().count("fsync") == {True: 0, False: 1 if access == "read" else 2}[direct]
        assert not watched.open_descriptors


@pytest.mark.parametrize("access", ["read", "write"])
def test_where_direct_io_is_refused_the_page_cache_is_neither_read_nor_left_unwritten(
    tmp_path: Path, access: Access
) -> None:
    """The rate is that of the drive all the same."""
    with ScratchFolder(tmp_path) as folder, seam.injected(FaultySyscalls(refuse_direct_open())):
        target = DriveTarget([folder.new_file("file", 2 * MIB)], 2 * MIB)
        setting = Setting(access=access, tuning=Tuning(threads=2, task_bytes=65536, queue_depth=4))
        assert target.path_taken(setting).name == "posix-buffered"
        watched = FaultySyscalls(refuse_direct_open())
        with seam.injected(watched):
            sample = target.run(setting, 2 * MIB)
    assert sample.note == ""
    last_write = max((i for i, name in enumerate(watched.names()) if name == "pwritev"), default=-1)
    assert "fsync" in watched.names()[last_write + 1 :]


def test_an_interrupt_at_any_line_is_raised_and_leaves_a_backend_that_closes(tmp_path: Path) -> None:
    """Ctrl-C: never a wait without end. Lines are those of our modules that the main thread runs."""
    ours = str(Path(seam.__file__).parent)

    def run(path: str, stop_at: int) -> int:
        """Lines that were begun."""
        begun = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal begun
            if not frame.f_code.co_filename.startswith(ours):
                return None
            if event == "line":
                begun += 1
                if begun == stop_at:
                    raise KeyboardInterrupt
            return trace

        backend = PosixBackend(threads=2, task_bytes=8192, queue_depth=2)
        file, before = backend.open(path, writable=False), sys.gettrace()
        requests = list(blocks("read", 1, MIB, 65536, 6))
        buffers = [np.zeros(65536, np.uint8) for _ in range(3)]
        sys.settrace(trace)
        try:
            run_requests([file], requests, buffers, 3)
        finally:
            sys.settrace(before)
            file.close()
            backend.close()
        return begun

    with ScratchFolder(tmp_path) as folder:
        path, threads = folder.new_file("file", MIB), set(threading.enumerate())
        lines = run(path, stop_at=0)
        assert lines >= 4
        for stop_at in range(1, lines + 1):
            with pytest.raises(KeyboardInterrupt):
                run(path, stop_at)
        # One that was interrupted while it let go of its thread leaves that to the garbage collector.
        give_up = time.monotonic() + 5
        while set(threading.enumerate()) != threads and time.monotonic() < give_up:
            gc.collect()
            time.sleep(0.01)
        assert set(threading.enumerate()) == threads


def test_runs_go_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        target = DriveTarget([folder.new_file("file", MIB)], MIB)
        setting = Setting(access="read", tuning=Tuning(threads=1, task_bytes=65536, queue_depth=1))
        assert target.path_taken(setting).direct
        offsets = []
        for _ in range(3):
            watched = FaultySyscalls()
            with seam.injected(watched):
                target.run(setting, 6 * 65536)
            offsets += [call.offset for call in watched.calls if call.name == "preadv"]
        assert offsets == [i % 16 * 65536 for i in range(18)]


def test_memory_is_taken_in_turn_from_run_to_run_unless_it_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a processor's cache holds makes a drive look faster than training finds it."""
    seen: list[list[int]] = []

    def spy(files: Any, requests: Sequence[Any], buffers: list[np.ndarray], *more: Any) -> None:
        seen.append([buffer.ctypes.data for buffer in buffers[: len(requests)]])
        run_requests(files, requests, buffers, *more)

    monkeypatch.setattr(drive_rates, "run_requests", spy)
    setting = Setting(access="mixed", tuning=Tuning(threads=1, task_bytes=65536, queue_depth=2))
    with ScratchFolder(tmp_path) as folder:
        target = DriveTarget([folder.new_file("file", MIB)], MIB)
        for _ in range(16):
            target.run(setting, MIB)
        target.run(replace(setting, reused=True), MIB)
    every = [address for used in seen[:8] for address in used]
    assert len(every) == len(set(every)) == 8 * MIB // 65536
    assert seen[8:16] == seen[:8]
    assert sorted(seen[16]) == sorted(every)[:2]


@pytest.mark.parametrize(("available", "buffers"), [(1 << 20, 2), (16 * MIB, 16), (1 << 40, 128)])
def test_little_memory_is_not_filled_for_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, buffers: int
) -> None:
    monkeypatch.setattr(drive_rates, "memory_budget", lambda: SimpleNamespace(available_bytes=available))
    counts: list[int] = []
    monkeypatch.setattr(drive_rates, "run_requests", lambda *args: counts.append(len(args[2])))
    with ScratchFolder(tmp_path) as folder:
        target = DriveTarget([folder.new_file("file", MIB)], MIB)
        target.run(Setting(access="read", tuning=Tuning(threads=1, task_bytes=65536, queue_depth=2)), MIB)
    assert counts == [buffers]


def test_a_file_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        target = DriveTarget([folder.new_file("file", 65536)], 65536)
        setting = Setting(access="read", tuning=Tuning(threads=1, task_bytes=MIB, queue_depth=1))
        with pytest.raises(ConfigError, match="has 65536 bytes, less than one block of 1048576"):
            target.run(setting, MIB)


@pytest.mark.parametrize("way", ["direct", "page cache", "refused direct"])
def test_a_second_reading_comes_from_the_drive_or_is_called_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """C91: 64 MiB, read twice, each by a benchmark of its own. The clock of a shared machine proves nothing:
    what the kernel has fetched does.
    """
    if not probe(tmp_path).direct:
        pytest.skip(f"{tmp_path} does not take direct I/O")
    tuning = Tuning(threads=2, task_bytes=MIB, queue_depth=4)
    setting = Setting(access="read", tuning=tuning, direct=way != "page cache")
    faults = [refuse_direct_open()] if way == "refused direct" else []
    with ScratchFolder(tmp_path) as folder, seam.injected(FaultySyscalls(*faults)):
        path = folder.new_file("file", 64 * MIB)
        for _ in range(2):
            target = DriveTarget([path], 64 * MIB)
            before = storage_bytes()
            sample = target.run(setting, 64 * MIB)
            after = storage_bytes()
            if before is None or after is None:
                pytest.skip("this kernel does not count what it fetches")
            assert after[0] - before[0] >= 64 * MIB
            assert (sample.amount, sample.note) == (64 * MIB, "")
        if not target.path_taken(setting).direct:
            Path(path).read_bytes()
            monkeypatch.setattr(drive_rates, "forget_cached", lambda path: None)
            # Beside other work the kernel dropped 1 % of it once.
            said = target.run(setting, 64 * MIB).note
            assert re.match(r"cached: the kernel fetched only [0-4] % of what was read", said), said


def test_reads_from_memory_are_called_so() -> None:
    assert cached_note("read", 1000, 960) == ""
    assert cached_note("write", 1000, 0) == ""
    assert cached_note("mixed", 1000, 480) == ""
    assert "fetched only 40 % of what was read" in cached_note("read", 1000, 400)
    assert "fetched only 0 %" in cached_note("mixed", 1000, 0)


def test_a_memory_file_system_shows_in_the_note() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    with ScratchFolder(shm) as folder:
        target = DriveTarget([folder.new_file("file", MIB)], MIB)
        setting = Setting(access="read", tuning=Tuning(threads=1, task_bytes=65536, queue_depth=1))
        assert target.path_taken(setting).name == "posix-buffered"
        assert "fetched only 0 %" in target.run(setting, MIB).note


def found(access: str, threads: int, block_bytes: int, depth: int, rate: float) -> Measurement:
    labels = {"access": access, "threads": threads, "block_bytes": block_bytes, "queue_depth": depth}
    return Measurement(labels, "B", (rate,), 0.0)


def test_the_cheapest_of_the_tunings_that_are_as_good_is_taken() -> None:
    measurements = [
        found("read", 1, 4, 2, 60), found("write", 1, 4, 2, 100),
        found("read", 4, 4, 8, 98), found("write", 4, 4, 8, 99),
        found("read", 4, 8, 8, 98), found("write", 4, 8, 8, 99),
        found("read", 8, 8, 16, 100), found("write", 8, 8, 16, 97),
    ]  # fmt: skip
    assert best_tuning(measurements) == Tuning(threads=4, task_bytes=8, queue_depth=8)


def test_a_tuning_is_as_good_as_its_worst_access() -> None:
    measurements = [
        found("read", 1, 4, 2, 100), found("write", 1, 4, 2, 50),
        found("read", 8, 4, 2, 80), found("write", 8, 4, 2, 100),
    ]  # fmt: skip
    assert best_tuning(measurements).threads == 8


def test_every_case_is_run_in_every_round_in_changing_order() -> None:
    log: list[int] = []

    def case(index: int) -> Case:
        def run() -> Sample:
            log.append(index)
            return Sample(10.0 * (index + 1), 2.0, 0.5, "odd" if index == 1 else "")

        return Case({"index": index}, "B", run)

    seen: list[Case] = []
    rested: list[int] = []
    measurements = measure(
        [case(i) for i in range(4)],
        rounds=5,
        warmups=1,
        on_run=seen.append,
        on_round=lambda: rested.append(len(log)),
    )
    assert rested == [4, 8, 12, 16, 20, 24]
    rounds: Sequence[list[int]] = [log[i : i + 4] for i in range(0, 24, 4)]
    assert len(log) == len(seen) == 24
    assert all(sorted(order) == [0, 1, 2, 3] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert [m.median for m in measurements] == [5.0, 10.0, 15.0, 20.0]
    assert [len(m.rates) for m in measurements] == [5] * 4
    assert measurements[1].note == "odd"
    assert measurements[0].cpu_s_per_giga == 0.05e9


def test_spread_and_json_say_all() -> None:
    m = Measurement({"access": "read"}, "B", (4.0, 1.0, 2.0), 0.25, "cached")
    assert (m.median, m.spread) == (2.0, 1.5)
    assert m.to_json() == {
        "access": "read", "unit": "B/s", "median": 2.0, "lowest": 1.0, "highest": 4.0,
        "rates": [4.0, 1.0, 2.0], "cpu_s_per_giga": 0.25, "note": "cached",
    }  # fmt: skip


def test_time_is_taken_of_all_threads() -> None:
    spent: list[float] = []

    def spin() -> None:
        end = 0
        for number in range(2_000_000):
            end += number
        spent.append(time.thread_time())

    threads = [threading.Thread(target=spin) for _ in range(2)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    sample = timed(7, run)
    assert sample.amount == 7
    assert sample.cpu_s > 0.99 * sum(spent) > 0
    assert sample.seconds > 0
