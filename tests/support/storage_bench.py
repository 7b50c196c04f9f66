"""`tierstream bench storage`, small enough for tests, and what it leaves."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tierstream.tools import cli

#: Options of a run that takes a second or two.
TINY = shlex.split(
    "--backend posix --file-size 1MiB --block 64KiB --page 64KiB --threads 1 2 --rounds 2 --seconds 0.01"
)


@dataclass(frozen=True)
class StorageBench:
    """The command in this process."""

    capsys: pytest.CaptureFixture[str]

    def run(self, *args: str | Path) -> tuple[int, str, str]:
        """(status, standard output, standard error) of `tierstream bench ARGS`."""
        self.capsys.readouterr()
        return cli.main(["bench", *map(str, args)]), *self.capsys.readouterr()

    def measured(self, *args: str | Path) -> dict[str, Any]:
        """The JSON of `tierstream bench storage ARGS`, which must work."""
        status, out, err = self.run("storage", *args, "--json", "-")
        assert (status, err) == (0, ""), err
        plain: dict[str, Any] = json.loads(out)
        return plain

    def refused(self, *args: str | Path, said: list[str]) -> None:
        """`tierstream bench ARGS` ends with status 2 and one line that holds every text of `said`."""
        status, out, err = self.run(*args)
        assert (status, out, len(err.splitlines())) == (2, "", 1), out + err
        assert err.startswith("tierstream: error: ")
        assert [text for text in said if text not in err] == [], err


def rows(plain: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Measurements of a part."""
    return [entry for entry in plain["measurements"] if entry["part"] == part]


def everything_under(directory: Path) -> dict[str, bytes]:
    """Path below `directory` -> content, of every file; hidden ones too."""
    found = {}
    for folder, _, names in os.walk(directory):
        found |= {str(path): path.read_bytes() for name in names if (path := Path(folder, name))}
    return found
