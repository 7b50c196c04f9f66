"""Writes docs/reference.md and docs/metrics.md from the code: every key of a run file, every option of every
command; every field of the files that a run writes.

    python benchmarks/reference.py [--check]

With --check nothing is written, and the exit status is 1 if a page is not what the code says.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tierstream.engine.config import RunConfig
from tierstream.engine.config_tree import REQUIRED, Leaf, field_docs, leaves, option, sections
from tierstream.engine.metrics import (
    DrivePlan,
    DriveTotals,
    EvalMetrics,
    PlanReport,
    RunSummary,
    Sample,
    StepMetrics,
    TierPlan,
    TierTotals,
    TracedStep,
)
from tierstream.engine.moe.use import CacheCounts, ExpertStep
from tierstream.engine.planner.needs import Peak
from tierstream.engine.planner.outlook import Help, Outlook
from tierstream.tools import bench, cli, options
from tierstream.tools.options import NoOptions, metavar, shown

_DOCS = Path(__file__).resolve().parents[1] / "docs"
#: What a run writes -> its records, the whole one first.
RECORDS: dict[str, tuple[type, ...]] = {
    "metrics.jsonl": (StepMetrics, ExpertStep, CacheCounts),
    "evaluations.jsonl": (EvalMetrics,),
    "samples.jsonl": (Sample,),
    "plan.json": (PlanReport, TierPlan, DrivePlan),
    "result.json": (RunSummary, TierTotals, DriveTotals, TracedStep),
    "tierstream plan --json": (Outlook, Peak, Help),
}
_RECORDS_HEAD = """\
# Records of a run

Made from the code by `python benchmarks/reference.py`; do not edit it by hand.

The files of a run directory that programs read, and what their fields mean. A `.jsonl` file has a JSON object
a line, in the order of steps; a resumed run cuts off what it will write again. Sizes are bytes, times
seconds. A loss or norm that is not a number is written `NaN`, `Infinity` or `-Infinity`: Python's json reads
that, a strict reader of JSON refuses it, which is better than a loss of `null` that nobody notices. `None`
stands for `null`. `tierstream report` draws them.
"""
_HEAD = """\
# Reference

Made from the code by `python benchmarks/reference.py`; do not edit it by hand.

A run file is YAML with the sections below; a key that is not known is an error. On the command line the key
`tiers.dram` is the option `--tiers.dram`, and `_` is written `-`. A SIZE is a number of bytes, or a number
with KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000). `null`: none, or the run
decides. Relative paths are relative to the current directory.
"""


class _Seen(Exception):
    """A command has said what its options are."""

    def __init__(self, cls: type, prog: str, description: str) -> None:
        self.cls, self.prog, self.description = cls, prog, description


def commands() -> Iterator[str]:
    """The names of all commands, as they are typed."""
    for name in cli.COMMANDS:
        if name == "bench":
            yield from (f"bench {benchmark}" for benchmark in bench.BENCHMARKS)
            yield "bench --profile"
        else:
            yield "data preview" if name == "data" else name


def describe(command: str) -> _Seen:
    """What a command hands to the parser of options."""
    name = {"bench --profile": "bench.everything", "data preview": "data_preview"}.get(command, command)
    module = importlib.import_module(f"tierstream.tools.{name.replace(' ', '.').replace('-', '_')}")

    def parse(cls: type, args: Any, *, prog: str, description: str, **_: Any) -> None:
        raise _Seen(cls, prog, description)

    if command == "doctor":  # no section of settings, but any number of directories
        return _Seen(NoOptions, "tierstream doctor [DIRECTORY ...] [--json]", module._DESCRIPTION)
    asks = options if hasattr(module, "parse_run") else module  # whose name for the parser is looked up
    with mock.patch.object(asks, "parse_options", parse):
        try:
            module.main(["--help"])
        except _Seen as seen:
            return seen
    raise RuntimeError(f"{command} --help parses no options")


def entry(name: str, leaf: Leaf) -> str:
    default = "required" if leaf.default is REQUIRED else f"default `{shown(leaf.default)}`"
    return f"- `{name}` ({metavar(leaf.hint)}; {default}): {leaf.doc}"


def tree(cls: type, name: str = "") -> Iterator[tuple[str, type]]:
    """A section and those in it, each with its dotted name."""
    yield name, cls
    for inner, section in sections(cls).items():
        yield from tree(section, f"{name}.{inner}".lstrip("."))


def run_file() -> Iterator[str]:
    """The keys of a run file, section by section."""
    yield "## Keys of a run file"
    for section, cls in tree(RunConfig):
        own = [leaf for key, leaf in leaves(RunConfig).items() if key.rpartition(".")[0] == section]
        if section:
            yield f"\n### {section}\n"
            yield " ".join((inspect.getdoc(cls) or "").split()) + "\n"
        else:
            yield ""
        yield from (entry(leaf.key, leaf) for leaf in own)


def command_pages() -> Iterator[str]:
    """Usage, description and options of each command; those of a run file are not said again."""
    yield "\n## Commands\n\n`tierstream COMMAND --help` says the same."
    for command in commands():
        seen = describe(command)
        options = "" if seen.cls is NoOptions else " [options]"
        yield f"\n### tierstream {command}\n\n```text\n{seen.prog}{options}\n```\n"
        yield textwrap.dedent(seen.description).strip()
        own = [leaf for key, leaf in leaves(seen.cls).items() if key not in leaves(RunConfig)]
        if issubclass(seen.cls, RunConfig):
            yield "- All keys of a run file are options as well."
        if own and dataclasses.is_dataclass(seen.cls):
            yield ""
            yield from (entry(option(leaf.key), leaf) for leaf in own)


def records() -> Iterator[str]:
    """The fields of every record, with types as in the code."""
    for name, classes in RECORDS.items():
        yield f"## {name}"
        for cls in classes:
            title = "" if cls is classes[0] else f"### {cls.__name__}\n\n"
            yield f"\n{title}{' '.join((inspect.getdoc(cls) or '').split())}\n"
            docs = field_docs(cls)
            for spec in dataclasses.fields(cls):
                yield f"- `{spec.name}` ({spec.type}): {docs[spec.name]}"
        yield ""


def pages() -> dict[Path, str]:
    """Path -> what must stand there."""
    reference, fields = [_HEAD, *run_file(), *command_pages()], [_RECORDS_HEAD, *records()]
    return {
        _DOCS / "reference.md": "\n".join(reference) + "\n",
        _DOCS / "metrics.md": "\n".join(fields).rstrip("\n") + "\n",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    made = pages()
    if parser.parse_args().check:
        old = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
        for path in old:
            print(f"{path} is not what the code says; run python benchmarks/reference.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
