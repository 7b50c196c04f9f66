"""The run on the screen: a plan, one live line, events, and the tables at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tierstream.engine.data.progress import Progress
from tierstream.engine.metrics import EvalMetrics, PlanReport, RunSummary, Sample, StepMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.io.sizes import format_bytes
from tierstream.tools.tables import WIDTH_COLUMNS, count, open_console, print_plan, print_summary

_CLEAR_LINE = "\r\x1b[2K"
#: A terminal is redrawn, and a file written to, at most once in so many seconds.
_TERMINAL_INTERVAL_S = 0.1
_FILE_INTERVAL_S = 2.0
#: A preparation writes to a file at most once in so many seconds.
_PROGRESS_INTERVAL_S = 10.0


def step_line(metrics: StepMetrics, last_step: int, bound_s: float | None, columns: int | None = None) -> str:
    """One step in one line.

    The norm is that before clipping; where it was clipped, the factor follows ("norm 2 x0.5").

    Args:
        bound_s: seconds that a step takes at least on this machine; None: not known.
        columns: most characters; what matters least is dropped first. None: no limit.
    """
    clipped = f" x{metrics.clip_factor:.3g}" if metrics.clip_factor != 1 else ""
    parts = [
        f"{metrics.step}/{last_step}",
        f"loss {metrics.loss:#.4g}" if metrics.trained_tokens else "no trained token",
        *(f"{name} {value:.3g}" for name, value in _router_losses(metrics)),
        f"norm {metrics.grad_norm:.3g}{clipped}",
        f"{count(metrics.tokens_per_s)} tok/s",
        f"{metrics.step_s:.3g} s",
    ]
    if metrics.skipped:
        parts.insert(1, "SKIPPED")
    if bound_s is not None and metrics.step_s > 0:
        share = 100 * bound_s / metrics.step_s
        # What is faster than possible says that the machine was slower when its rates were measured.
        parts.append(f"{share:.0f}% bound" if share <= 100 else ">100% bound (measured slower)")
    parts.append(f"epoch {metrics.epoch:.2f}")
    cause, seconds = max(metrics.stall_s.items(), key=lambda item: item[1], default=("", 0.0))
    if metrics.step_s > 0 and seconds >= 0.005 * metrics.step_s:
        parts.append(f"wait {cause} {100 * seconds / metrics.step_s:.0f}%")
    wide = "step " + "  ".join(parts)
    if columns is None:
        return wide
    shorter = [" ".join(parts[:kept]) for kept in range(len(parts), 0, -1)]
    fitting = (line for line in (wide, "step " + shorter[0], *shorter) if len(line) <= columns)
    return next(fitting, shorter[-1][:columns])


def _router_losses(metrics: StepMetrics) -> list[tuple[str, float]]:
    """Those that are computed."""
    named = (("aux", metrics.router_aux_loss), ("z", metrics.router_z_loss))
    return [(name, value) for name, value in named if value is not None]


def progress_line(progress: Progress, elapsed_s: float, columns: int | None = None, *, begun: int = 0) -> str:
    """How far a preparation has come, in one line.

    Args:
        elapsed_s: since so much was done as `begun` says: what an earlier process did took no time here.
        columns: most characters; the time left and the rate are dropped first, then the name is cut. None:
            no limit.
    """
    rate = (progress.done - begun) / elapsed_s if elapsed_s > 0 else 0.0
    is_bytes = progress.unit == "bytes"
    shown = format_bytes if is_bytes else "{:,}".format
    parts = [shown(progress.done) if is_bytes else f"{shown(progress.done)} {progress.unit}"]
    if progress.total is not None:
        percent = 100 * progress.done / max(1, progress.total)
        parts = [f"{percent:.0f}%  {shown(progress.done)} of {shown(progress.total)}"]
        parts[0] += "" if is_bytes else f" {progress.unit}"
    if rate:
        parts.append(f"{rate / 1e6:.3g} MB/s" if is_bytes else f"{count(rate)} {progress.unit}/s")
        if progress.total is not None and progress.done < progress.total:
            parts.append(f"{_duration((progress.total - progress.done) / rate)} left")
    lines = ["  ".join([progress.what, *parts[:kept]]) for kept in range(len(parts), 0, -1)]
    if columns is None:
        return lines[0]
    return next((line for line in lines if len(line) <= columns), lines[-1][:columns])


def _duration(seconds: float) -> str:
    """ "42 s", "3 min", "2.5 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


class LiveLine:
    """Prints steps and preparations: in place on a terminal, else a line now and then.

    The first step, skipped steps and the last one are always shown; in between at most ten a second on a
    terminal, and one in two seconds elsewhere. A preparation has a line in ten seconds elsewhere, so a short
    one has none.

    Args:
        clock: seconds, rising.

    Attributes:
        last_step: the run's last step. bound_s: as in `step_line`.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        last_step: int = 0,
        bound_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last_step, self.bound_s = last_step, bound_s
        self._stream, self._clock = stream, clock
        self._in_place = stream.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._in_place else _FILE_INTERVAL_S
        self._shown_at: float | None = None
        self._waiting: StepMetrics | None = None  # newer than what is shown
        self._line = ""  # the live line, as it stands on the terminal
        self._preparing: tuple[str, float, int] | None = None  # what, since when, and done then
        self._progress_shown_at = 0.0

    def step(self, metrics: StepMetrics) -> None:
        """Show `metrics`, or keep it in case that it is the last."""
        now = self._clock()
        due = self._shown_at is None or now - self._shown_at >= self._interval_s
        if due or metrics.skipped or metrics.step == self.last_step:
            self._shown_at = now
            self._show(metrics)
        else:
            self._waiting = metrics

    def progress(self, progress: Progress) -> None:
        """Show how far a preparation has come, if it is time to."""
        now = self._clock()
        if self._preparing is None or self._preparing[0] != progress.what:
            self._preparing, self._progress_shown_at = (progress.what, now, progress.done), now
        elif now - self._progress_shown_at >= (self._interval_s if self._in_place else _PROGRESS_INTERVAL_S):
            self._progress_shown_at = now
            _, since, begun = self._preparing
            columns = self._columns() if self._in_place else None
            show = self._draw if self._in_place else self._end_line
            show(progress_line(progress, now - since, columns, begun=begun))

    def event(self, text: str) -> None:
        """A line of its own; the live line of a step goes on below it."""
        line = "" if self._preparing else self._line
        self._end_line(text)
        self._draw(line)

    def prepared(self) -> None:
        """Steps follow: the line of a preparation goes."""
        if self._line:
            self._write(_CLEAR_LINE)
        self._line, self._preparing = "", None

    def close(self) -> None:
        """Leave the newest step on the screen, as a line; that of a preparation goes."""
        if self._preparing is not None:
            self.prepared()
        if self._waiting is not None:
            self._show(self._waiting)
        if self._line:
            self._end_line(self._line)

    def _columns(self) -> int:
        """Of the terminal; one stays free: a full last column makes some terminals wrap."""
        return min(WIDTH_COLUMNS, shutil.get_terminal_size((WIDTH_COLUMNS, 24)).columns) - 1

    def _show(self, metrics: StepMetrics) -> None:
        self._waiting = None
        if not self._in_place:
            self._end_line(step_line(metrics, self.last_step, self.bound_s))
            return
        line = step_line(metrics, self.last_step, self.bound_s, self._columns())
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
        self._live = LiveLine(self._stream)
        self._planned = False

    def on_progress(self, progress: Progress) -> None:
        self._live.progress(progress)

    def on_plan(self, plan: PlanReport) -> None:
        self._live.prepared()
        print_plan(self._console, plan)
        self._live.bound_s = plan.bound[1] if plan.bound is not None else None
        self._live.last_step, self._planned = plan.last_step, True

    def on_step(self, metrics: StepMetrics) -> None:
        if not self._planned:
            raise RuntimeError("on_step before on_plan")
        self._live.step(metrics)

    def on_evaluation(self, metrics: EvalMetrics) -> None:
        self._live.event(
            f"evaluation after step {metrics.step}: loss {metrics.loss:#.5g}{', the best' * metrics.best}, "
            f"perplexity {metrics.perplexity:.4g}; {metrics.trained_tokens:,} tokens in "
            f"{metrics.seconds:.3g} s"
        )

    def on_sample(self, sample: Sample) -> None:
        self._live.event(f"sample after step {sample.step}: {sample.prompt!r} -> {sample.text!r}")

    def on_event(self, text: str) -> None:
        self._live.event(text)

    def on_end(self, summary: RunSummary) -> None:
        self.close()
        print_summary(self._console, summary)

    def close(self) -> None:
        self._live.close()

    def __enter__(self) -> ConsoleCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
