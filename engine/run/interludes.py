"""What a run does between two steps, beside saving: it is evaluated, and it writes samples."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.stream import StreamedRows
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import EvalMetrics, Sample
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.run.directory import RunDirectory
from tierstream.engine.run.eval_config import EvalConfig
from tierstream.engine.run.evaluation import Evaluator
from tierstream.engine.run.sample_config import SampleConfig
from tierstream.engine.run.sampler import Prompts, Sampler
from tierstream.engine.step.runtime import Runtime


class Interludes:
    """Those of a run.

    Args:
        rows: that are trained on. eval_rows: None: the run is not evaluated.
        state: of the checkpoint that the run resumes from, or of a run that begins.
        parts: closes the files.

    Raises:
        ConfigError: prompts that cannot be gone on with.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: Rows | StreamedRows,
        eval_rows: Rows | None,
        runtime: Runtime,
        callbacks: Callbacks,
        directory: RunDirectory,
        state: dict[str, Any],
        parts: ExitStack,
    ) -> None:
        step, self._config = int(state["step"]), config
        self.evaluator: Evaluator | None = None
        self._sampler: Sampler | None = None
        if eval_rows is not None:
            writer = RecordWriter(directory.evaluations_path, EvalMetrics, last_step=step)
            parts.callback(writer.close)
            saved = state.get("evaluation")
            self.evaluator = Evaluator(config, eval_rows, runtime, callbacks, writer, saved)
        if config.sample.prompts is not None:
            formats = {config.data.format, *_formats(rows)}
            prompts = Prompts(config, directory.data, formats, runtime.model.config)
            writer = RecordWriter(directory.samples_path, Sample, last_step=step)
            parts.callback(writer.close)
            self._sampler = Sampler(config, prompts, runtime, callbacks, writer)

    def after_step(self, step: int, *, last: bool) -> bool:
        """What is due after `step`; whether there was anything. `last`: of the run."""
        known = (self._config.eval, self.evaluator), (self._config.sample, self._sampler)
        due = [each for when, each in known if each is not None and _is_due(when, step, last)]
        for each in due:
            each.run(step)
        return bool(due)


def _is_due(when: EvalConfig | SampleConfig, step: int, last: bool) -> bool:
    return (when.every_steps is not None and step % when.every_steps == 0) or (last and when.at_end)


def _formats(rows: Rows | StreamedRows) -> set[str]:
    """Of the records, as far as they are known before they are trained on."""
    stores = rows.stores if isinstance(rows, Rows) else []
    return {name for store in stores for name in store.counts.by_format}
