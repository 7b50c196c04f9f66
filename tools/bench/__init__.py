"""`tierstream bench NAME ...`: what this machine gives, measured.

A benchmark is a module of this folder with a `main(args)`, imported when it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from tierstream.io.errors import ConfigError

#: Benchmark -> what it measures.
BENCHMARKS = {
    "storage": "PATH...  drives, by block, threads and way",
    "copy": "between host memory and the GPU, by size and kind of memory",
    "adam": "AdamW on the CPU, by kernel and threads",
    "train": "steps of training from the tiers, against the bound and all on the GPU",
}


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    name = args[0] if args else "--help"
    if name == "--profile":
        with _terminated_as_interrupted():
            return _run("everything", args[1:])
    if name in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    if name not in BENCHMARKS:
        nearest = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"the benchmarks are {', '.join(BENCHMARKS)}"
        raise ConfigError(f"unknown benchmark {name}; {hint}")
    with _terminated_as_interrupted():
        return _run(name, args[1:])


def _run(name: str, args: Sequence[str]) -> int:
    status: int = importlib.import_module(f"tierstream.tools.bench.{name}").main(args)
    return status


def _usage() -> str:
    lines = ["usage: tierstream bench NAME ...", "", "Measure what this machine gives.", ""]
    lines += [f"  {name:8} {purpose}" for name, purpose in BENCHMARKS.items()]
    lines += ["", "`tierstream bench --profile FILE DIR...` measures all that training wants to know."]
    lines += ["`tierstream bench NAME --help` lists the options of a benchmark."]
    return "\n".join(lines)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM (a scheduler, a container that stops) and SIGHUP (a terminal that goes) end a benchmark as
    Ctrl-C does: nothing stays behind.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
