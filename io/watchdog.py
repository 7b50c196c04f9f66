"""Reports calls to a drive that do not come back: a dying drive or a hung network mount looks like a slow run
otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)
#: A drive that takes this long for one call has a fault; busy ones take milliseconds, sleeping disks seconds.
REPORT_AFTER_S = 30.0


class _Call:
    __slots__ = ("begun", "reports", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.begun = time.monotonic()
        self.reports = 0


class Watchdog:
    """Logs a warning for each call that has been under way for `limit_s`, and again after every further
    `limit_s`.

    It reports and does nothing else: a call in the kernel cannot be given up, and the memory that it moves
    bytes to must stay.

    Args:
        limit_s: seconds; None: `REPORT_AFTER_S`, read when the watchdog is made.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = REPORT_AFTER_S if limit_s is None else limit_s
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watches the call that this thread makes in the `with` block. `what`: e.g. "reading /mnt/a at byte
        0".
        """
        key = threading.get_ident()
        call = _Call(what)
        with self._lock:
            self._calls[key] = call
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._watch, name="tierstream-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[key]
            if call.reports:
                _LOG.warning("%s came back after %.1f s", what, time.monotonic() - call.begun)

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.limit_s / 8):
            now = time.monotonic()
            with self._lock:
                late = [call for call in self._calls.values() if self._is_late(call, now)]
            for call in late:
                call.reports += 1
                _LOG.warning(
                    "%s has been under way for %.1f s: the drive or the network behind it does not answer; "
                    "see the kernel's messages (dmesg) and the drive's health (smartctl -a)",
                    call.what,
                    now - call.begun,
                )

    def _is_late(self, call: _Call, now: float) -> bool:
        return now - call.begun >= self.limit_s * (call.reports + 1)
