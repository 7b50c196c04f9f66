"""`tierstream data NAME ...`: the data of a run, before it is trained on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tierstream.io.errors import ConfigError
from tierstream.tools import data_preview

_USAGE = """\
usage: tierstream data NAME ...

Look at the data of a run.

  preview  RUN.yaml  counts, lengths and rows, with the trained tokens marked

`tierstream data preview --help` lists the options."""


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0 if args else 2
    if name != "preview":
        nearest = difflib.get_close_matches(name, ["preview"], n=1)
        hint = "did you mean preview?" if nearest else "there is preview"
        raise ConfigError(f"unknown command data {name}; {hint}")
    return data_preview.main(args[1:])
