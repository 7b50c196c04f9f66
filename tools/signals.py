"""What SIGTERM and SIGINT do to a run on the command line."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from tierstream.engine.metrics import PlanReport
from tierstream.engine.run.callbacks import Callback

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(Callback):
    """Ends a run by signals. A context manager; within, its handlers are in force, if it is entered in the
    main thread, the only one that can have any.

    Until the plan stands a signal is a `KeyboardInterrupt(signal)`: nothing is lost that the next start does
    not make again. Then it asks the run to stop after the step under way. After the first one the system's
    own handlers are back, so a second one ends the process where it is.

    Attributes:
        received: the first signal.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """As a shell gives it for a process that a signal ended."""
        return 0 if self.received is None else 128 + self.received

    def on_plan(self, plan: PlanReport) -> None:
        self._training = True

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.received = signal.Signals(number)
        if not self._training:
            raise KeyboardInterrupt(self.received)
        self.control.stop(self.received.name)
        # Not by way of Python's streams: the signal may have come while they are being written to.
        text = f"\n{self.received.name}: the run ends after this step; once more ends it at once\n"
        os.write(2, text.encode())
