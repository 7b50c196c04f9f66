"""The command line in this process, and what a refusal must look like."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.runs import dump

from tierstream.engine.assemble import STATE_FOLDER
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.data.shards import read_store
from tierstream.io.drives import DirectoryLock
from tierstream.tools import cli

#: Most lines of a message.
LINES_MAX = 12


@dataclass(frozen=True)
class Command:
    """`tierstream`; run files are written to `folder`."""

    capsys: pytest.CaptureFixture[str]
    folder: Path

    def run(self, *args: str) -> tuple[int, str, str]:
        """(status, standard output, standard error)"""
        self.capsys.readouterr()
        return cli.main(args), *self.capsys.readouterr()

    def train(self, config: RunConfig) -> tuple[int, str, str]:
        return self.run("train", str(dump(config, self.folder / "run.yaml")))

    def refused(self, *args: str, said: list[str], status: int = 2) -> None:
        """The command ends with `status` and one message on standard error that holds every text of
        `said`.
        """
        found, _, err = self.run(*args)
        assert found == status, err
        assert err.startswith("tierstream: error: ")
        assert err.count("tierstream: ") == 1
        assert len(err.splitlines()) <= LINES_MAX
        assert "Traceback" not in err
        assert [text for text in said if text not in err] == [], err

    def refused_train(self, config: RunConfig, said: list[str], status: int = 2) -> None:
        self.refused("train", str(dump(config, self.folder / "run.yaml")), said=said, status=status)


def told(args: list[str]) -> tuple[int, str]:
    """(status, standard error) of `tierstream ARGS`, also in a process whose output nobody sees."""
    with redirect_stderr(io.StringIO()) as err:
        return cli.main(args), err.getvalue()


def use_drive(config: RunConfig, drive: Path) -> Path:
    """Keep the state in the directory `drive`, made if missing, with as little DRAM as will do."""
    drive.mkdir(exist_ok=True)
    config.tiers.nvme_dirs = [str(drive)]
    config.tiers.page, config.tiers.dram = ByteSize(8192), ByteSize(24 * 8192)
    return drive


def nothing_is_half_made(config: RunConfig) -> None:
    """No step, no checkpoint, no result, and no tokens but complete ones."""
    run_dir = Path(config.run_dir)
    metrics = run_dir / "metrics.jsonl"
    assert not (run_dir.is_dir() and metrics.exists() and metrics.stat().st_size)
    assert not (run_dir / "result.json").exists()
    assert sorted((run_dir / "checkpoints").glob("*")) == []
    for store in (run_dir / "data" / "tokens").glob("*/"):
        assert read_store(store)[1] == ""


def nothing_is_locked(config: RunConfig) -> None:
    places = [Path(config.run_dir), *(Path(name) / STATE_FOLDER for name in config.tiers.nvme_dirs or [])]
    for place in filter(Path.is_dir, places):
        DirectoryLock(place).release()
