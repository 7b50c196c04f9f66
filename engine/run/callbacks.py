"""Callbacks: what a run tells those who follow it, and what they may ask of it.

    class Stop(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.loss < 1.5:
                self.control.stop("the loss is low enough")

    Trainer(config, [Stop()]).run()

All methods are called in the thread that trains, one callback after the other; an exception of theirs ends
the run. Knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tierstream.engine.data.progress import Progress
from tierstream.engine.metrics import EvalMetrics, PlanReport, RunSummary, Sample, StepMetrics


class Control:
    """What is asked of a run; it is done when the step under way has ended and its record is written."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.stop_reason: str | None = None
        self.wants_save = self.is_best = False

    def tell(self, text: str) -> None:
        """Have all callbacks hear of something rare, at once (`on_event`): it goes to the screen."""
        self._tell(text)

    def stop(self, reason: str) -> None:
        """End the run, with a checkpoint if it writes any. The first reason stands."""
        self.stop_reason = self.stop_reason or reason

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint. `best`: keep it, as `checkpoints/best`, until a better one is there."""
        self.wants_save, self.is_best = True, self.is_best or best


class Callback:
    """Is told what the run does. This one keeps it to itself; override what is wanted.

    Attributes:
        control: of the run, given before the first call.
    """

    control: Control

    def on_progress(self, progress: Progress) -> None:
        """A long preparation has come this far; before `on_plan`, as often as its owner likes."""

    def on_plan(self, plan: PlanReport) -> None:
        """Everything is decided, nothing has run."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A step has ended and its record is in the file."""

    def on_evaluation(self, metrics: EvalMetrics) -> None:
        """The run has been evaluated and the record is in the file; before a checkpoint of the same step."""

    def on_sample(self, sample: Sample) -> None:
        """The model has written a text and it is in the file; likewise."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """The checkpoint of `step` is complete and durable."""

    def on_event(self, text: str) -> None:
        """Something rare: resumed, checkpoint written, a fall-back taken and why."""

    def on_end(self, summary: RunSummary) -> None:
        """The last call of a run, unless an error ends it."""


class Callbacks(Callback):
    """Several as one, told in their order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)
        self.control = Control(self.on_event)
        for callback in self._callbacks:
            callback.control = self.control

    def on_progress(self, progress: Progress) -> None:
        for callback in self._callbacks:
            callback.on_progress(progress)

    def on_plan(self, plan: PlanReport) -> None:
        for callback in self._callbacks:
            callback.on_plan(plan)

    def on_step(self, metrics: StepMetrics) -> None:
        for callback in self._callbacks:
            callback.on_step(metrics)

    def on_evaluation(self, metrics: EvalMetrics) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(metrics)

    def on_sample(self, sample: Sample) -> None:
        for callback in self._callbacks:
            callback.on_sample(sample)

    def on_checkpoint(self, step: int, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(step, path)

    def on_event(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_event(text)

    def on_end(self, summary: RunSummary) -> None:
        for callback in self._callbacks:
            callback.on_end(summary)
