"""Where a benchmark's result goes: the screen, a JSON file, a directory with a report for a browser."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tierstream.io.durable import make_directories, publish_directory, remove_tree, write_file
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import Case, Measurement, measure
from tierstream.tools.bench.plots import PlotSpec, render
from tierstream.tools.bench.result import Result, grids
from tierstream.tools.outputs import check_file, check_writable, write_output
from tierstream.tools.page import Page, Picture
from tierstream.tools.tables import open_console, table

_HTML, _JSON, _PLOT, _TRACE = "report.html", "result.json", "plot-", "trace-"
_STDOUT = "-"
_WIDTH_COLUMNS = 110


@dataclass(kw_only=True)
class OutputOptions:
    """Options that all benchmarks have."""

    rounds: int = 7
    """How often each case runs, in turn with the others, after one round that does not count."""
    json: str | None = None
    """A file for the result as JSON; "-" prints that instead of the table."""
    report: str | None = None
    """A directory for report.html, result.json and the plots. It must be new, empty or hold an earlier
    report, which is replaced."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}; it must be at least 1")


@dataclass(frozen=True)
class TracedCase:
    """Some steps of a case, recorded: a file for ui.perfetto.dev and a picture of a step."""

    title: str
    json: bytes
    png: bytes

    @property
    def name(self) -> str:
        """Of its files, without suffix."""
        return _TRACE + "-".join(re.findall(r"[a-z0-9.]+", self.title.lower()))


def check_output(options: OutputOptions) -> None:
    """Finds before a long run what would make it useless after.

    Raises:
        ConfigError: the place for the JSON or the report cannot take it.
    """
    if options.json is not None and options.json != _STDOUT:
        check_file("--json", options.json)
    if options.report is not None:
        _check_report(Path(options.report).resolve())


def run_cases(
    cases: Sequence[Case],
    rounds: int,
    *,
    warmups: int = 1,
    what: str = "",
    on_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Measures them, with a bar on the terminal (standard error); where that is none, with a line that says
    `what`, if it is said. `on_round`: see `measure`.
    """
    console = Console(stderr=True)
    if what and not console.is_terminal:
        print(f"{what}: {len(cases)} cases, {warmups + rounds} rounds", file=sys.stderr, flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what or "measuring", total=len(cases) * (warmups + rounds))
        return measure(
            cases, rounds=rounds, warmups=warmups, on_run=lambda case: bar.advance(task), on_round=on_round
        )


def present(
    result: Result, plots: Sequence[PlotSpec], options: OutputOptions, traces: Sequence[TracedCase] = ()
) -> None:
    """Puts the result where the options want it.

    Raises:
        StorageError: a file could not be written; what was there before stays.
    """
    if options.report is not None:
        write_report(result, plots, Path(options.report).resolve(), traces)
    if options.json == _STDOUT:
        sys.stdout.write(_json_text(result))
        return
    print_result(open_console(sys.stdout, _WIDTH_COLUMNS), result)
    if options.json is not None:
        write_output(options.json, _json_text(result).encode())
    if options.report is not None:
        print(f"report: {Path(options.report) / _HTML}")


def print_result(console: Console, result: Result) -> None:
    """Title, machine, tables, notes."""
    console.print(result.title, style="bold")
    console.print(", ".join(f"{part} {text}" for part, text in result.machine.items()))
    for grid in grids(result):
        shown = table("", grid.columns, grid.rows, text_columns=grid.text_columns)
        shown.title, shown.caption, shown.caption_justify = None, grid.caption, "left"
        console.print(shown)
    for note in result.notes:
        console.print(f"- {note}")


def write_report(
    result: Result, plots: Sequence[PlotSpec], directory: Path, traces: Sequence[TracedCase] = ()
) -> None:
    """Makes `directory` with report.html (which needs no other file), result.json, a PNG per plot, and a PNG
    and a JSON per trace; an earlier report there is replaced as a whole.

    Raises:
        StorageError: a step failed; then no part of the new report is there.
    """
    rendered = [(plot, render(plot, result.measurements)) for plot in plots]
    files = {f"{_PLOT}{plot.name}.png": png for plot, png in rendered}
    for trace in traces:
        files |= {f"{trace.name}.png": trace.png, f"{trace.name}.json": trace.json}
    pictures = [(plot.title, png) for plot, png in rendered] + [(trace.title, trace.png) for trace in traces]
    files |= {_JSON: _json_text(result).encode(), _HTML: _page(result, pictures).html()}
    make_directories(directory.parent)
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        make_directories(temporary)
        for name, data in files.items():
            write_file(temporary / name, data)
        remove_tree(directory)
        publish_directory(temporary, directory)
    except BaseException:
        with suppress(StorageError):
            remove_tree(temporary)
        raise


def _page(result: Result, pictures: Sequence[tuple[str, bytes]]) -> Page:
    return Page(
        title=result.title,
        subtitle=f"{result.date}, tierstream {result.to_json()['tierstream']}",
        command=" ".join(result.command),
        facts=result.machine,
        notes=result.notes,
        blocks=[*(Picture(title, png) for title, png in pictures), *grids(result)],
    )


def _json_text(result: Result) -> str:
    return json.dumps(result.to_json(), indent=2) + "\n"


def _check_report(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--report {directory} is a file; name a directory")
    found = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    strange = sorted(name for name in found - {_HTML, _JSON} if not _is_ours(name))
    if found and (strange or not {_HTML, _JSON} <= found):
        what = f"holds {strange[0]}" if strange else "is not empty"
        raise ConfigError(
            f"--report {directory} {what} and is no earlier report; name a new directory, or empty this one"
        )
    above = directory.parent
    while not above.exists():
        above = above.parent
    check_writable("--report", above)


def _is_ours(name: str) -> bool:
    picture = name.startswith((_PLOT, _TRACE)) and name.endswith(".png")
    return picture or (name.startswith(_TRACE) and name.endswith(".json"))
