"""Evaluation between steps: when, on what, and what follows from it. How: `Runtime.evaluate`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.data.files import find_files
from tierstream.engine.data.prepare import open_data, tokenizer_directory
from tierstream.engine.data.progress import OnProgress
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.shards import TokenStore
from tierstream.engine.interpreter import collect_now_and_then
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import EvalMetrics
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.run.eval_config import EvalConfig
from tierstream.engine.run.scalars import perplexity
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import Runtime
from tierstream.io.errors import DataError


def open_eval_rows(
    config: RunConfig,
    directory: Path,
    held: Sequence[TokenStore],
    *,
    vocab_size: int,
    on_progress: OnProgress,
) -> Rows | None:
    """The evaluation set, each sample once; None: the run is not evaluated.

    Args:
        directory: of the run's data, where its tokenizer is.
        held: samples kept apart from training; without meaning if `eval.files` are named.

    Raises:
        DataError: files that cannot be used, or nothing to evaluate on.
    """
    wanted = config.eval
    if not wanted.wanted:
        return None
    tokenizer = str(tokenizer_directory(config.data, config.model, directory))
    files = config.data.files if wanted.files is None else wanted.files
    data = dataclasses.replace(config.data, files=files, weights=None, streaming=False, tokenizer=tokenizer)
    rows_per_step = wanted.rows_per_step or config.train.rows_per_step
    with _naming_eval():
        if wanted.files is not None:
            own = directory / "evaluation"  # so that no tokenizer is trained on these files
            held = open_data(data, config.model, own, vocab_size=vocab_size, on_progress=on_progress)
        return Rows(held, data, rows_per_step=rows_per_step, seed=config.train.seed)


def check_eval_files(wanted: EvalConfig) -> None:
    """What can be told before a corpus is tokenised. Raises DataError: a name that stands for no file."""
    with _naming_eval():
        if wanted.files is not None:
            find_files(wanted.files)


@contextmanager
def _naming_eval() -> Iterator[None]:
    """Errors about data are about that of the evaluation."""
    try:
        yield
    except DataError as error:
        raise DataError(f"evaluation: {str(error).replace('data.files', 'eval.files')}") from error


class Evaluator:
    """Evaluates a run when it is due, writes the records down, and ends the run if it gets no better.

    Args:
        writer: of `evaluations.jsonl`.
        saved: `state` in the checkpoint that the run resumes from; None: a run that was not evaluated so far.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: Rows,
        runtime: Runtime,
        callbacks: Callbacks,
        writer: RecordWriter,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._config, self._rows, self._runtime = config.eval, rows, runtime
        self._keep_best = config.checkpoint.keep_best
        self._callbacks, self._writer = callbacks, writer
        self._passes = rows.total_steps(1)
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self._without_improvement = 0
        if saved is not None and saved["data_fingerprint"] != rows.fingerprint:
            callbacks.on_event("evaluation: the set is another than before, so what was best is forgotten")
        elif saved is not None:
            self.best_loss, self.best_step = saved["best_loss"], saved["best_step"]
            self._without_improvement = saved["without_improvement"]
        self._stop_if_hopeless()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "without_improvement": self._without_improvement,
            "data_fingerprint": self._rows.fingerprint,
        }

    def run(self, step: int) -> None:
        """After `step`. Raises StorageError: the record cannot be written."""
        begin = time.perf_counter()
        loss, trained_tokens = self._runtime.evaluate(self._batches())
        seconds = time.perf_counter() - begin
        best = loss < (math.inf if self.best_loss is None else self.best_loss - self._config.min_delta)
        if best:
            self.best_loss, self.best_step = loss, step
        self._without_improvement = 0 if best else self._without_improvement + 1
        metrics = EvalMetrics(
            step=step,
            loss=loss,
            perplexity=perplexity(loss),
            trained_tokens=trained_tokens,
            seconds=seconds,
            tokens_per_s=self._passes * self._rows.rows_per_step * self._rows.seq_len / seconds,
            best=best,
        )
        self._writer.write(metrics)
        self._callbacks.on_evaluation(metrics)
        if best and self._keep_best:
            self._callbacks.control.save(best=True)
        self._stop_if_hopeless()

    def _batches(self) -> Iterator[Batch]:
        for number in range(self._passes):
            collect_now_and_then(number)
            yield Batch.of(self._rows.batch(number), self._runtime.device.torch_device)

    def _stop_if_hopeless(self) -> None:
        patience = self._config.patience
        if patience is not None and self._without_improvement >= patience:
            self._callbacks.control.stop(
                f"the loss of {self._without_improvement} evaluations in a row (eval.patience) was not below "
                f"the best, {self.best_loss} after step {self.best_step}"
            )
