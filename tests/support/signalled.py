"""`tierstream train` in a process that sends itself a signal at a chosen place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.faults import Call, FaultySyscalls

from tierstream.engine.step import streamed_layers
from tierstream.engine.update import update
from tierstream.engine.weights import state
from tierstream.io import seam
from tierstream.tiered import snapshot_writer
from tierstream.tools import cli

#: Place -> (owner, name) of a function that is called there.
PLACES: dict[str, tuple[Any, str]] = {
    "weights": (state.PlaneWriter, "__call__"),
    "forward": (streamed_layers.StreamedLayers, "forward"),
    "backward": (streamed_layers.StreamedLayers, "backward"),
    "update": (update._CpuWorker, "update"),
    "checkpoint": (snapshot_writer, "_write_page"),
}


def train_signalled(path: str, place: str, call: int, numbers: list[int], told: str) -> None:
    """Entry of a process of its own. The signals are sent one after another at the `call`-th call; when, is
    written to the file `told`. A place that is none of `PLACES` is a pattern: system calls on such paths.
    """
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == call:
            Path(told).write_text(str(time.time()))
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count()
            return function(*args, **kwargs)

        return counted

    def at_path(found: Call) -> None:
        if place in found.path and found.name in ("open", "pwritev", "rename", "fsync"):
            count()

    if place in PLACES:
        owner, name = PLACES[place]
        setattr(owner, name, before(getattr(owner, name)))
        sys.exit(cli.main(["train", path]))
    with seam.injected(FaultySyscalls(at_path)):
        sys.exit(cli.main(["train", path]))
