"""A process that tokenises: `python -m tierstream.engine.data.worker`, started and fed by `pool.py`.

It is a fresh interpreter, never a fork or a copy of its parent's main module, so it does not matter whether
the parent has used CUDA, is a notebook, or is a script without a `__main__` guard.

Standard input, a JSON object a line: first the `Assignment`, then shards, {"directory", "jobs": [[number of
the file, `Job`], ...]}.
Standard output, a JSON object a line: {"tokens": so far in this shard}, {"done": its tokens}, or
{"error": class, "message", "state"}, after which the process ends. What libraries print goes to standard
error. The end of standard input means that the parent has finished or died: the process ends at once,
whatever it is doing; what it has not finished does not count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.files import Job
from tierstream.engine.data.samples import Recipe, SampleMaker
from tierstream.engine.data.shard_writer import write_shard
from tierstream.io import errors
from tierstream.io.errors import TierstreamError

#: Seconds between two reports of a shard's tokens.
REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Assignment:
    """What all shards of a store have in common. `codec`: its file."""

    recipe: Recipe
    codec: str
    vocab_size: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Assignment:
        return cls(**value | {"recipe": Recipe(**value["recipe"])})


class Seldom:
    """Passes a call on at most every `REPORT_SECONDS`."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self._function, self._next = function, time.monotonic() + REPORT_SECONDS

    def __call__(self, value: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + REPORT_SECONDS
            self._function(value)


def error_to_json(error: TierstreamError) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error), "state": vars(error)}


def error_from_json(value: dict[str, Any]) -> TierstreamError:
    """The error as the worker raised it."""
    kind: type[TierstreamError] = getattr(errors, value["error"])
    error = kind.__new__(kind, value["message"])  # not through __init__, which composes the message
    vars(error).update(value["state"])
    return error


def main() -> None:
    # Whatever is printed here by libraries must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(sys.stdin, lines), daemon=True).start()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    status = 1
    try:
        assignment = Assignment.from_json(json.loads(lines.get()))
        maker = SampleMaker(
            assignment.recipe, Codec.load(Path(assignment.codec)), vocab_size=assignment.vocab_size
        )
        while True:
            shard = json.loads(lines.get())
            jobs = [(number, Job(**job)) for number, job in shard["jobs"]]
            report = Seldom(lambda tokens: answer({"tokens": tokens}))
            index = write_shard(maker, jobs, Path(shard["directory"]), report)
            answer({"done": index.tokens})
    except TierstreamError as error:
        answer(error_to_json(error))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # at once: the thread still reads standard input, which the interpreter would close


def _read_lines(file: TextIO, lines: queue.SimpleQueue[str]) -> None:
    for line in file:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
