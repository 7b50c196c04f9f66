"""When a run is saved, beside the training that goes on, and what is said of it. How:
`tierstream.engine.checkpoint`.

After the updates of a step the store is captured, which takes no time, and a thread writes what is captured
while the next steps run. What is written is the state after that step to the bit. One checkpoint is under way
at a time: the next one waits for it, and so does the end of the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tierstream.engine import checkpoint
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.step.runtime import Runtime
from tierstream.engine.trace.trace import Track
from tierstream.io import seam
from tierstream.io.errors import StorageError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.capture import Capture


class _Written(NamedTuple):
    """What the thread has to tell.

    Attributes:
        problem: old checkpoints that could not be removed; the new one is good.
    """

    path: Path
    seconds: float
    problem: StorageError | None


class Saver:
    """Writes the checkpoints of a run. A context manager: leaving it waits for the one under way.

    Args:
        clock: seconds, rising.
        damaged: names of checkpoints that were passed over; they stay until one of the same step is written.

    Attributes:
        newest: the newest complete checkpoint of this process; None: none yet.
        failed: checkpoints that could not be written.
        error: why the latest could not be written; None: it was.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        runtime: Runtime,
        callbacks: Callbacks,
        clock: Callable[[], float] = time.monotonic,
        damaged: Iterable[str] = (),
    ) -> None:
        self._config, self._directory, self._runtime, self._callbacks = config, directory, runtime, callbacks
        self._clock, self._last_s = clock, clock()
        self._damaged = set(damaged)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierstream-checkpoint")
        self._under_way: tuple[int, Future[_Written]] | None = None
        self._saved_step: int | None = None
        self.newest: Path | None = None
        self.failed = 0
        self.error: StorageError | None = None

    def after_step(self, step: int, state: Callable[[], Mapping[str, object]]) -> None:
        """Write a checkpoint if one is due, and tell what has become of the one before.

        Args:
            state: what a checkpoint holds beside the planes, as it is once the update is carried out.

        Raises:
            StorageError: the store's own drives failed. If a checkpoint cannot be written, training goes on.
        """
        if self._under_way is not None and self._under_way[1].done():
            self._conclude()
        if self._is_due(step):
            self._begin(step, state)

    def finish(self, step: int, state: Callable[[], Mapping[str, object]], *, save: bool) -> None:
        """No step follows: wait until everything is written. `save`: the state after `step` as well."""
        if save and self._saved_step != step:
            self._begin(step, state)
        self._conclude()

    def close(self) -> None:
        """Wait for the checkpoint under way, whatever becomes of it."""
        self._thread.shutdown()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_due(self, step: int) -> bool:
        steps, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = steps is not None and step % steps == 0
        by_time = minutes is not None and self._clock() - self._last_s >= 60 * minutes
        return by_steps or by_time or self._callbacks.control.wants_save

    def _begin(self, step: int, state: Callable[[], Mapping[str, object]]) -> None:
        if self._under_way is not None:
            busy, written = self._under_way
            if not written.done():
                self._callbacks.on_event(
                    f"the checkpoint of step {step} waits for that of step {busy}, still being written"
                )
            self._conclude()
        control, self._saved_step, self._last_s = self._callbacks.control, step, self._clock()
        best, control.wants_save, control.is_best = control.is_best, False, False
        with self._runtime.trace.span(Track.HOST, "checkpoint"):
            self._runtime.flush()
            capture = self._runtime.store.capture(self._runtime.update_order)
        self._under_way = step, self._thread.submit(self._write, capture, step, state(), best)

    def _write(self, capture: Capture, step: int, state: Mapping[str, object], best: bool) -> _Written:
        """In the thread."""
        begin = time.perf_counter()
        with capture:
            path = checkpoint.write(capture, self._directory, step, state, best=best)
        self._damaged.discard(path.name)
        problem = None
        try:
            checkpoint.rotate(self._directory, path, self._config.keep, self._damaged)
        except StorageError as error:
            problem = error
        return _Written(path, time.perf_counter() - begin, problem)

    def _conclude(self) -> None:
        """Wait for the checkpoint under way and tell what has become of it."""
        if self._under_way is None:
            return
        (step, future), self._under_way = self._under_way, None
        try:
            written = future.result()
        except StorageError as error:
            if not _is_inside(error.path, self._directory):
                raise
            self.failed, self.error = self.failed + 1, error
            self._callbacks.on_event(self._explain(step, error))
            return
        self.newest, self.error = written.path, None
        self._callbacks.on_event(f"checkpoint {written.path} ({written.seconds:.1f} s)")
        if written.problem is not None:
            self._callbacks.on_event(f"warning: old checkpoints stay: {written.problem}")
        self._callbacks.on_checkpoint(step, written.path)

    def _explain(self, step: int, error: StorageError) -> str:
        need_bytes = self._runtime.layout.nbytes(durable=True)
        try:
            usage = seam.current().statvfs(str(self._directory))
            free = format_bytes(usage.f_bavail * usage.f_frsize)
        except OSError as cause:
            free = f"({cause.strerror})"
        return (
            f"warning: the checkpoint of step {step} failed: {error}. It needs {format_bytes(need_bytes)} in "
            f"{self._directory}, where {free} are free now. Older checkpoints stay, training goes on; the "
            f"next is tried {self._next_try(step)}"
        )

    def _next_try(self, step: int) -> str:
        steps, minutes = self._config.every_steps, self._config.every_minutes
        tries = []
        if steps is not None:
            tries.append(f"after step {(step // steps + 1) * steps}")
        if minutes is not None:
            tries.append(f"in {max(0.0, self._last_s + 60 * minutes - self._clock()) / 60:.3g} minutes")
        return " or ".join(tries) or "at the end of the run"


def _is_inside(path: str, directory: Path) -> bool:
    root = os.path.abspath(directory)
    return os.path.commonpath([os.path.abspath(path), root]) == root
