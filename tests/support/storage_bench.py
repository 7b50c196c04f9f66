"""`tierstream bench storage`, small enough for tests, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tierstream.tools import cli

#: Options of a run that takes a second or two.
TINY = shlex.split(
    "--backend posix --file-size 2MiB --block 64KiB --page 64KiB --threads 1 2 --rounds 2 --seconds 0.01"
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
        assert status == 0, err
        assert unexpected(err) == []
        plain: dict[str, Any] = json.loads(out)
        return plain

    def refused(self, *args: str | Path, said: list[str]) -> None:
        """`tierstream bench ARGS` ends with status 2 and one line that holds every text of `said`."""
        status, out, err = self.run(*args)
        assert (status, out, len(err.splitlines())) == (2, "", 1), out + err
        assert err.startswith("tierstream: error: ")
        assert [text for text in said if text not in err] == [], err


def unexpected(err: str) -> list[str]:
    """Lines on standard error that are neither an announcement nor the name of a phase."""
    known = re.compile(r".*: about \d+ s, \d+ GB written; Ctrl-C .*|.*: \d+ cases, \d+ rounds")
    return [line for line in err.splitlines() if not known.fullmatch(line)]


def rows(plain: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Measurements of a part."""
    return [entry for entry in plain["measurements"] if entry["part"] == part]


def everything_under(directory: Path) -> dict[str, bytes]:
    """Path below `directory` -> content, of every file; hidden ones too."""
    found = {}
    for folder, _, names in os.walk(directory):
        found |= {str(path): path.read_bytes() for name in names if (path := Path(folder, name))}
    return found
