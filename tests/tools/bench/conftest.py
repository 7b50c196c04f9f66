"""What the tests of benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drive_kinds import drive_of_kind
from support.storage_bench import StorageBench

from tierstream.engine.bound import Rates


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> StorageBench:
    return StorageBench(capsys)


@pytest.fixture
def made_up_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor of this machine needs no measuring."""
    rates = Rates(flop_per_s=1e12, upload=None, update_parameters_per_s=1e9)
    monkeypatch.setattr("tierstream.engine.measure.machine.machine_rates", lambda *args: rates)


@pytest.fixture
def direct() -> Iterator[Path]:
    """An empty directory on a drive that takes direct I/O."""
    with drive_of_kind("posix-direct") as drive:
        yield drive.directory
