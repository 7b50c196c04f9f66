"""The run on the screen: a plan, one live line, events, and the tables at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tierstream.engine.callbacks import Callback
from tierstream.engine.metrics import PlanReport, RunSummary, StepMetrics
from tierstream.tools.tables import WIDTH_COLUMNS, count, open_console, print_plan, print_summary

_CLEAR_LINE = "\r\x1b[2K"
#: A terminal is redrawn, and a file written to, at most once in so many seconds.
_TERMINAL_INTERVAL_S = 0.1
_FILE_INTERVAL_S = 2.0


def step_line(metrics: StepMetrics, last_step: int, bound_s: float | None, columns: int | None = None) -> str:
    """One step in one line.

    Args:
        bound_s: seconds that a step takes at least on this machine; None: not known.
        columns: most characters; what matters least is dropped first. None: no limit.
    """
    parts = [
        f"{metrics.step}/{last_step}",
        f"loss {metrics.loss:#.4g}" if metrics.trained_tokens else "no trained token",
        f"norm {metrics.grad_norm:.3g}",
        f"{count(metrics.tokens_per_s)} tok/s",
        f"{metrics.step_s:.3g} s",
    ]
    if metrics.skipped:
        parts.insert(1, "SKIPPED")
    if bound_s is not None and metrics.step_s > 0:
        parts.append(f"{100 * bound_s / metrics.step_s:.0f}% bound")
    cause, seconds = max(metrics.stall_s.items(), key=lambda item: item[1], default=("", 0.0))
    if metrics.step_s > 0 and seconds >= 0.005 * metrics.step_s:
        parts.append(f"wait {cause} {100 * seconds / metrics.step_s:.0f}%")
    wide = "step " + "  ".join(parts)
    if columns is None:
        return wide
    shorter = [" ".join(parts[:kept]) for kept in range(len(parts), 0, -1)]
    fitting = (line for line in (wide, "step " + shorter[0], *shorter) if len(line) <= columns)
    return next(fitting, shorter[-1][:columns])


class Progress:
    """Prints steps: in place on a terminal, else a line now and then.

    The first step, skipped steps and the last one are always shown; in between at most ten a second on a
    terminal, and one in two seconds elsewhere.

    Args:
        last_step: the run's last step. bound_s: as in `step_line`.
        clock: seconds, rising.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        last_step: int,
        bound_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._last_step, self._bound_s, self._clock = stream, last_step, bound_s, clock
        self._in_place = stream.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._in_place else _FILE_INTERVAL_S
        self._shown_at: float | None = None
        self._waiting: StepMetrics | None = None  # newer than what is shown
        self._line = ""  # the live line, as it stands on the terminal

    def step(self, metrics: StepMetrics) -> None:
        """Show `metrics`, or keep it in case that it is the last."""
        now = self._clock()
        due = self._shown_at is None or now - self._shown_at >= self._interval_s
        if due or metrics.skipped or metrics.step == self._last_step:
            self._shown_at = now
            self._show(metrics)
        else:
            self._waiting = metrics

    def event(self, text: str) -> None:
        """A line of its own; the live line goes on below it."""
        line = self._line
        self._end_line(text)
        self._draw(line)

    def close(self) -> None:
        """Leave the newest step on the screen, as a line."""
        if self._waiting is not None:
            self._show(self._waiting)
        if self._line:
            self._end_line(self._line)

    def _show(self, metrics: StepMetrics) -> None:
        self._waiting = None
        if not self._in_place:
            self._end_line(step_line(metrics, self._last_step, self._bound_s))
            return
        width = min(WIDTH_COLUMNS, shutil.get_terminal_size((WIDTH_COLUMNS, 24)).columns)
        # One column stays free: a full last column makes some terminals wrap.
        line = step_line(metrics, self._last_step, self._bound_s, width - 1)
        if metrics.skipped:
            self._end_line(line)
        else:
            self._draw(line)

    def _draw(self, line: str) -> None:
        """Replace the live line."""
        if line:
            self._write(_CLEAR_LINE + line)
        self._line = line

    def _end_line(self, text: str) -> None:
        """`text` in place of the live line, for good."""
        self._write((_CLEAR_LINE if self._line else "") + text + "\n")
        self._line = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class ConsoleCallback(Callback):
    """Shows a run on `stream` (standard output). A context manager: leaving it ends the live line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = open_console(self._stream)
        self._progress: Progress | None = None

    def on_plan(self, plan: PlanReport) -> None:
        print_plan(self._console, plan)
        bound_s = plan.bound[1] if plan.bound is not None else None
        self._progress = Progress(self._stream, last_step=plan.last_step, bound_s=bound_s)

    def on_step(self, metrics: StepMetrics) -> None:
        if self._progress is None:
            raise RuntimeError("on_step before on_plan")
        self._progress.step(metrics)

    def on_event(self, text: str) -> None:
        if self._progress is None:
            self._console.print(text, soft_wrap=True)
        else:
            self._progress.event(text)

    def on_end(self, summary: RunSummary) -> None:
        self.close()
        print_summary(self._console, summary)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> ConsoleCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
