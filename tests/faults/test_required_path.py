"""A run that demands a way for its bytes gets it, or ends before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Command, nothing_is_half_made, nothing_is_locked, use_drive
from support.runs import make_run

from tierstream.io.posix import probe


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.mark.parametrize("demanded", ["gds", "kvikio-compat"])
def test_another_way_is_refused(command: Command, tmp_path: Path, demanded: str) -> None:
    """C25."""
    config = make_run(tmp_path, steps=1)
    drive = use_drive(config, tmp_path / "drive")
    config.tiers.backend, config.tiers.require_path = "posix", demanded  # type: ignore[assignment]
    taken = probe(drive).name
    command.refused_train(config, ["tiers.require_path", demanded, str(drive), taken])
    nothing_is_half_made(config)
    nothing_is_locked(config)
    assert list((Path(config.run_dir) / "data").iterdir()) == [], "the corpus was read first"
    assert list(drive.iterdir()) == []


def test_the_way_that_is_there_is_granted_and_told(command: Command, tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=1)
    if not probe(use_drive(config, tmp_path / "drive")).direct:
        pytest.skip(f"{tmp_path} does not take direct I/O")
    config.tiers.backend, config.tiers.require_path = "posix", "posix-direct"
    status, out, err = command.train(config)
    assert (status, err) == (0, "")
    assert "posix-direct" in out
