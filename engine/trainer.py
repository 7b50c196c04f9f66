"""A run from its configuration to its last checkpoint: the story. Its parts: `tierstream.engine.run.run`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tierstream.engine import assemble
from tierstream.engine.checkpoint import with_another
from tierstream.engine.config import RunConfig
from tierstream.engine.device.full import full_memory_errors
from tierstream.engine.interpreter import undisturbed
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import RunSummary, StepMetrics
from tierstream.engine.run.callbacks import Callback, Callbacks
from tierstream.engine.run.full_drive import full_drive_errors
from tierstream.engine.run.run import Run
from tierstream.engine.run.trackers import open_trackers
from tierstream.io.errors import DamagedPageError

_TAKES_LESS = (
    "lower data.seq_len, train.rows_per_step, train.rows_per_chunk, train.loss_chunk_tokens, tiers.dram or "
    "tiers.gpu; `tierstream plan` says what takes how much"
)


class Trainer:
    """Trains one model as a configuration says.

    Args:
        callbacks: are told the plan, every step and the end, and may stop the run.

    Raises:
        ConfigError: a package that `log` needs is missing.

    Raises (from `run`):
        TierstreamError: what the user can mend, said before step 0 wherever it can be known then.
    """

    def __init__(self, config: RunConfig, callbacks: Iterable[Callback] = ()) -> None:
        self.config = config
        self._trackers = open_trackers(config)
        self.callbacks = Callbacks([*callbacks, *self._trackers])

    def run(self) -> RunSummary:
        """Check, plan, fill the tiers, train, save."""
        assemble.set_determinism(self.config)
        with full_memory_errors(_TAKES_LESS), full_drive_errors(self.config), ExitStack() as parts:
            for tracker in self._trackers:
                parts.callback(tracker.close)
            run = self._open(parts)
            parts.enter_context(undisturbed())
            path = run.directory.metrics_path
            metrics = parts.enter_context(RecordWriter(path, StepMetrics, last_step=run.step))
            while run.goes_on:
                record = run.train_step()
                metrics.write(record)
                self.callbacks.on_step(record)
                run.after_step(record)
            run.finish()
        self.callbacks.on_end(run.summary)
        return run.summary

    def _open(self, parts: ExitStack) -> Run:
        """Of checkpoints that `auto` may take, the newest that can be read to its end."""
        damaged = dict[Path, str]()
        while True:
            try:
                with ExitStack() as own:
                    run = Run.open(self.config, self.callbacks, own, damaged)
                    parts.push(own.pop_all())
                    return run
            except DamagedPageError as error:
                root = Path(error.root)
                if self.config.checkpoint.resume != "auto" or root in damaged:
                    raise with_another(error) from error
                damaged[root] = str(error)
