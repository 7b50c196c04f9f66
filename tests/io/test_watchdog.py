"""Calls that do not come back are reported, once per period, and as soon as they do come back."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.faults import FaultySyscalls

from tierstream.io import seam, watchdog
from tierstream.io.posix import PosixBackend
from tierstream.io.watchdog import Watchdog


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == watchdog.__name__]


def test_a_late_call_is_reported_in_every_period_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    dog = Watchdog(limit_s=0.1)
    with dog.watching("reading /drive/file at byte 4096"):
        deadline = time.monotonic() + 10
        while len(messages(caplog)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    dog.close()
    first, second, *_, last = messages(caplog)
    assert first.startswith("reading /drive/file at byte 4096 has been under way for 0.")
    assert "smartctl" in first
    assert second.startswith("reading /drive/file at byte 4096 has been under way for")
    assert last.startswith("reading /drive/file at byte 4096 came back after")


def test_quick_calls_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    dog = Watchdog(limit_s=0.2)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        with dog.watching("reading"):
            time.sleep(0.01)
    dog.close()
    assert messages(caplog) == []


def test_a_watchdog_without_calls_has_no_thread() -> None:
    before = threading.active_count()
    dog = Watchdog()
    assert threading.active_count() == before
    dog.close()


class StalledReads(seam.Syscalls):
    """Reads wait until they are let go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def preadv(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
        self.go_on.wait()
        return super().preadv(fd, buffer, offset)


def test_a_drive_that_stalls_is_named_and_the_request_ends_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_AFTER_S", 0.1)
    caplog.set_level(logging.WARNING)
    content = np.random.default_rng(0).integers(0, 256, 16384, dtype=np.uint8)
    path = tmp_path / "chunk"
    path.write_bytes(content.tobytes())
    threads_before = threading.active_count()
    backend = PosixBackend(threads=2, task_bytes=8192)
    stalled = StalledReads()
    with seam.injected(stalled):
        read = np.zeros_like(content)
        file = backend.open(path, writable=False)
        future = file.read_into(read, 0)
        deadline = time.monotonic() + 10
        while len(messages(caplog)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not future.done()
        stalled.go_on.set()
        assert future.result(timeout=10) == read.nbytes
    backend.close()
    assert np.array_equal(read, content)
    late = [text for text in messages(caplog) if "has been under way" in text]
    assert {f"reading {path} at byte {offset}" for offset in (0, 8192)} == {
        text.partition(" has")[0] for text in late
    }
    assert threading.active_count() == threads_before


def test_thirty_seconds_is_the_limit() -> None:
    dog = Watchdog()
    assert dog.limit_s == 30.0
    dog.close()


def test_slow_calls_below_the_limit_only_take_their_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(bytes(range(256)) * 64)
    backend = PosixBackend(threads=1)
    with seam.injected(FaultySyscalls(lambda call: time.sleep(0.01))):
        file = backend.open(path, writable=False)
        read = np.zeros(16384, np.uint8)
        file.read_into(read, 0).result()
        file.close()
        backend.close()
    assert read.tobytes() == path.read_bytes()
    assert messages(caplog) == []
