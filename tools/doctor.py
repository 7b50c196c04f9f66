"""`tierstream doctor [DIRECTORY ...] [--json]`"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TextIO

import tyro

from tierstream.io.errors import ConfigError
from tierstream.tools.checks import Check, Status, collect
from tierstream.tools.quiet import without_warnings
from tierstream.tools.tables import open_console, table

_PROG = "tierstream doctor"
_DESCRIPTION = "Say whether tierstream will run well on this machine, and what to do where it will not."


@dataclass
class _Options:
    directories: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="[DIRECTORY ...]",
            help="Where state is to lie; each is tried by a small write.",
            help_behavior_hint="(default: the current directory)",
        ),
    ] = ()
    json: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="One JSON object in place of the table.", help_behavior_hint=""),
    ] = False


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns 0 or, where there is a problem, 2; raises TierstreamError."""
    options, rest = tyro.cli(
        _Options, args=args, prog=_PROG, description=_DESCRIPTION, return_unknown_args=True
    )
    if rest:
        raise ConfigError(f"unknown option {rest[0]}; `{_PROG} --help` lists the known ones")
    with without_warnings():  # the report says itself which directory goes through the page cache
        checks = collect(options.directories or (".",))
    if options.json:
        print(json.dumps(as_json(checks), indent=2))
    else:
        print_checks(checks, sys.stdout)
    return 2 if worst(checks) is Status.PROBLEM else 0


def worst(checks: Sequence[Check]) -> Status:
    """The status of the machine: that of its worst check."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index)


def as_json(checks: Sequence[Check]) -> dict[str, object]:
    """`{"status": ..., "checks": {name: {"status": ..., "value": ..., "remedy": ...}}}`"""
    return {
        "status": worst(checks).value,
        "checks": {
            check.name: {"status": check.status.value, "value": check.value, "remedy": check.remedy}
            for check in checks
        },
    }


def print_checks(checks: Sequence[Check], stream: TextIO) -> None:
    """The checks as a table, and how many are not ok."""
    rows = [
        (check.status.value, check.name, f"{check.value}\n-> {check.remedy}" if check.remedy else check.value)
        for check in checks
    ]
    shown = [[_printable(text, stream) for text in row] for row in rows]
    console = open_console(stream)
    console.print(table("This machine", ("", "what", "found"), shown, text_columns=3))
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    found = [_counted(counts[status], status.value) for status in (Status.PROBLEM, Status.WARNING)]
    console.print(", ".join(found))


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _printable(text: str, stream: TextIO) -> str:
    """`text` with what the stream cannot show, as in names of files, in escapes."""
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
