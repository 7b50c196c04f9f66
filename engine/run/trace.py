"""The traced steps of a run: recorded, written down, drawn."""

from __future__ import annotations

from tierstream.engine.metrics import RunSummary, TracedStep
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.run.directory import RunDirectory
from tierstream.engine.trace.file import write_trace
from tierstream.engine.trace.picture import picture
from tierstream.engine.trace.summary import summarise
from tierstream.engine.trace.trace import Trace
from tierstream.io import durable

#: Steps of a process before those that are traced: the first ones find empty tiers and cold kernels.
_WARM_UP_STEPS = 2


class RunTrace:
    """Records `wanted` steps, from the third of this process on.

    Args:
        first_step: steps done before this process.
    """

    def __init__(
        self, wanted: int, trace: Trace, directory: RunDirectory, callbacks: Callbacks, first_step: int
    ) -> None:
        self._wanted, self._trace, self._directory, self._callbacks = wanted, trace, directory, callbacks
        self._first_step = first_step
        self._traced: list[TracedStep] = []

    def begin_step(self, step: int) -> None:
        """Before the step that follows `step` steps."""
        done = step - self._first_step
        if self._wanted and done == _WARM_UP_STEPS:
            self._trace.start(step + 1)
        elif self._wanted and done == _WARM_UP_STEPS + self._wanted:
            self._write()

    def end(self, summary: RunSummary) -> None:
        """Write down what was recorded, if anything and not yet; the last step may come before all that was
        asked for.
        """
        if self._trace.recording:
            self._write()
        elif self._wanted and not self._traced:
            self._callbacks.on_event(
                f"warning: no trace was written: the first {_WARM_UP_STEPS} steps are not traced, and "
                "no others were left to run"
            )
        if self._traced:
            summary.traced, summary.trace = self._traced, str(self._directory.trace_path)

    def _write(self) -> None:
        spans = self._trace.stop()
        write_trace(spans, self._directory.trace_path)
        durable.write_file(self._directory.trace_picture_path, picture(spans))
        self._traced = summarise(spans)
        first, last = self._traced[0].step, self._traced[-1].step
        more = ""
        if len(self._traced) < self._wanted:
            more = f", not {self._wanted}: the first {_WARM_UP_STEPS} are not traced, and no others were left"
        self._callbacks.on_event(
            f"trace of steps {first} to {last}{more}: {self._directory.trace_path}, a picture of one: "
            f"{self._directory.trace_picture_path}"
        )
