"""A run from Python, with a callback that follows it.

    python examples/train.py RUN.yaml

Callbacks are told everything that the screen and the log files show; `self.control` stops or saves the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tierstream import Callback, RunConfig, Trainer
from tierstream.engine.metrics import RunSummary, StepMetrics


class TimeLimit(Callback):
    """Ends the run, with a checkpoint, when its time is up; `checkpoint.resume: auto` goes on from there."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_step(self, metrics: StepMetrics) -> None:
        print(f"step {metrics.step}: loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s")
        if time.monotonic() > self._end:
            self.control.stop("the time is up")

    def on_checkpoint(self, step: int, path: Path) -> None:
        print(f"saved {path}")

    def on_end(self, summary: RunSummary) -> None:
        print(f"trained on {summary.tokens:,} tokens")


def main() -> None:
    config = RunConfig.from_file(sys.argv[1], {"checkpoint.resume": "auto"})
    Trainer(config, [TimeLimit(seconds=3600)]).run()


if __name__ == "__main__":
    main()
