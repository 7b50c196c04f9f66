"""Threads at the order of updates: workers `take` granules and report them `finished`; uploads `wait` for
theirs. Who computes which granule, and when, is left to whoever is free: the planes do not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.order import Taken, UpdateOrder, Work
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Page


class UpdateQueue:
    """Every method may be called from any thread; see `UpdateOrder` for what they decide.

    Args:
        units, gradient_pages: see `UpdateOrder`.
    """

    def __init__(self, units: Iterable[str], gradient_pages: int | None = None) -> None:
        self._order = UpdateOrder(units, gradient_pages)
        # Workers wait for granules, uploads for granules that are finished: who cannot go on is not woken.
        self._lock = threading.Lock()
        self._work, self._progress = threading.Condition(self._lock), threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._closed = False

    def admit(self) -> None:
        """Block until a page of a gradient may go to DRAM; where no update is finished any more: at once."""
        with self._lock:
            self._progress.wait_for(lambda: self._order.has_room or self._error or self._closed)
            self._order.admit()

    def stored(self, page: Page) -> None:
        """A page of a gradient is in DRAM."""
        with self._lock:
            self._order.stored(page)
            if self._order.waiting:
                self._work.notify()

    def forget(self) -> None:
        """The stored gradients are discarded."""
        with self._lock:
            self._order.forget()
            self._progress.notify_all()

    def decide(self, works: Mapping[str, Work], *, ahead: int | None = None) -> None:
        """See `UpdateOrder.decide`."""
        with self._lock:
            self._order.decide(works, ahead=ahead)
            self._work.notify_all()

    def decide_first(self, works: Mapping[str, Work]) -> None:
        """See `UpdateOrder.decide_first`."""
        with self._lock:
            self._order.decide_first(works)
            self._work.notify_all()

    def want_in_forward_order(self) -> None:
        """What is left of updates during backward is wanted by the forward that comes."""
        with self._lock:
            self._order.want_in_forward_order()

    def take(self, *, last_first: bool = False) -> Taken | None:
        """The next granule and the verdicts to carry out, as soon as there is one; None: the queue was
        closed, or something failed.

        Args:
            last_first: of the units that may be updated, begin with the one that is wanted last.
        """
        with self._lock:
            while not self._closed and self._error is None:
                found = self._order.last() if last_first else self._order.next()
                if found is not None:
                    return found
                self._work.wait()
            return None

    def finished(self, granule: Granule) -> None:
        """The planes of a granule that was taken are updated, and its lease was given back."""
        with self._lock:
            self._order.finished(granule)
            self._progress.notify_all()

    def failed(self, error: BaseException) -> None:
        """A worker, or the download of a gradient, ends with an error: everyone who waits gets it."""
        with self._lock:
            self._error = self._error or error
            self._wake_all()

    def wait(self, unit: str, granule: int) -> None:
        """Block until the pending update of a granule, if any, is finished; lets updates run further ahead.

        Raises:
            BaseException: what made a worker or a download fail.
        """
        with self._lock:
            if self._order.ask(unit):
                self._work.notify_all()
            self._progress.wait_for(
                lambda: not self._order.is_due(unit, granule) or self._error or self._closed
            )
            self._raise()

    def finish(self, units: Collection[str] | None = None) -> None:
        """Wait until no update of these units is left; None: of any.

        Raises:
            BaseException: what made a worker or a download fail.
        """
        with self._lock:
            if self._order.any_due(units):
                self._order.ask_all()
                self._work.notify_all()
            self._progress.wait_for(lambda: self._error or self._closed or not self._order.any_due(units))
            self._raise()

    def close(self) -> None:
        """Nothing is handed out any more."""
        with self._lock:
            self._closed = True
            self._wake_all()

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._progress.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise InvariantError("the update was aborted")
