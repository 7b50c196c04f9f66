"""When a run is saved, and what is said of it. How: `tierstream.engine.checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tierstream.engine import checkpoint
from tierstream.engine.callbacks import Callbacks
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.runtime import Runtime
from tierstream.engine.trace import Track


class Saver:
    """Writes the checkpoints of a run.

    Attributes:
        newest: the newest checkpoint of this process; None: none yet.
    """

    def __init__(
        self, config: CheckpointConfig, directory: Path, runtime: Runtime, callbacks: Callbacks
    ) -> None:
        self._config, self._directory, self._runtime, self._callbacks = config, directory, runtime, callbacks
        self.newest: Path | None = None

    def save_if_due(self, step: int, state: Callable[[], Mapping[str, object]], *, last: bool) -> None:
        """After `step`.

        Args:
            state: what a checkpoint holds beside the planes, as it is once the update is carried out.
            last: no step follows.
        """
        control, every = self._callbacks.control, self._config.every_steps
        due = every is not None and step % every == 0
        if due or control.wants_save or (last and self._config.at_end):
            control.wants_save = False
            self._save(step, state)

    def _save(self, step: int, state: Callable[[], Mapping[str, object]]) -> None:
        begin = time.perf_counter()
        self._runtime.flush()
        with self._runtime.trace.span(Track.HOST, "checkpoint"):
            self.newest = checkpoint.save(
                self._runtime.store, self._directory, step, state(), self._config.keep
            )
        self._callbacks.on_event(f"checkpoint {self.newest} ({time.perf_counter() - begin:.1f} s)")
        self._callbacks.on_checkpoint(step, self.newest)
