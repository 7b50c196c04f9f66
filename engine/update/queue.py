"""Which granule is updated next: one whose verdict is known and whose gradient is stored, in the order in
which forward needs them.

Workers `take` granules and report them `finished`; uploads `wait` for theirs. Who computes which granule, and
when, is left to whoever is free: the planes do not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.optimizer import Verdict
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Page

#: A deferred update may run this many units ahead of the last unit whose weights were asked for: enough to
#: hide it, little enough that updated weights are still in DRAM when they are uploaded.
UNITS_AHEAD = 2


class Work(NamedTuple):
    """What is due for a unit.

    Attributes:
        granules: all of the unit's, with the pages of the gradient or, where it is zero, without.
        verdicts: carried out one after another; more than one only where the gradient is zero.
    """

    granules: Sequence[Granule]
    verdicts: tuple[Verdict, ...]


class _UnitState:
    """What is left of one unit's work."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.verdicts: tuple[Verdict, ...] = ()
        self.untaken: list[Granule] = []
        self.unfinished: set[int] = set()


class UpdateQueue:
    """Every method may be called from any thread.

    Args:
        units: in forward order.
    """

    def __init__(self, units: Iterable[str]) -> None:
        self._units = {name: _UnitState(index) for index, name in enumerate(units)}
        self._first: list[_UnitState] = []
        self._pending: list[_UnitState] = []
        """Units with granules that nobody has taken, in the order in which they are wanted; those of the one
        list before those of the other."""
        self._stored: set[Page] = set()
        """Gradient pages in DRAM."""
        self._allowed = len(self._units)
        # Workers wait for granules, uploads for granules that are finished: who cannot go on is not woken.
        self._lock = threading.Lock()
        self._work, self._progress = threading.Condition(self._lock), threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._closed = False

    def stored(self, page: Page) -> None:
        """A page of a gradient is in DRAM."""
        with self._lock:
            self._stored.add(page)
            if self._pending or self._first:
                self._work.notify()

    def forget(self) -> None:
        """The stored gradients are discarded."""
        with self._lock:
            self._stored.clear()

    def decide(self, works: Mapping[str, Work], *, ahead: int | None = None) -> None:
        """These units are to be updated.

        Args:
            works: of each unit.
            ahead: so many units may be updated before the first is asked for (`wait`); None: all.

        Raises:
            InvariantError: the update of a unit before this one has not been finished.
        """
        with self._lock:
            self._add(works, self._pending)
            self._allowed = len(self._units) if ahead is None else ahead
            self._work.notify_all()

    def decide_first(self, works: Mapping[str, Work]) -> None:
        """As `decide`, for units that somebody waits for: nothing goes before them or holds them back."""
        with self._lock:
            self._add(works, self._first)
            self._work.notify_all()

    def want_in_forward_order(self) -> None:
        """What is left of updates during backward is wanted by the forward that comes."""
        with self._lock:
            self._pending.sort(key=lambda unit: unit.position)

    def take(self, *, last_first: bool = False) -> tuple[Granule, tuple[Verdict, ...]] | None:
        """The next granule and the verdicts to carry out, as soon as there is one; None: the queue was
        closed, or something failed.

        Args:
            last_first: of the units that may be updated, begin with the one that is wanted last.
        """
        with self._lock:
            while not self._closed and self._error is None:
                found = self._last() if last_first else self._next()
                if found is not None:
                    return found
                self._work.wait()
            return None

    def finished(self, granule: Granule) -> None:
        """The planes of a granule that was taken are updated, and its lease was given back."""
        with self._lock:
            self._units[granule.unit].unfinished.discard(granule.index)
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
        state = self._units[unit]
        with self._lock:
            ahead = state.position + 1 + UNITS_AHEAD
            if ahead > self._allowed:
                self._allowed = ahead
                self._work.notify_all()
            self._progress.wait_for(lambda: granule not in state.unfinished or self._error or self._closed)
            self._raise()

    def finish(self, units: Iterable[str] | None = None) -> None:
        """Wait until no update of these units is left; None: of any.

        Raises:
            BaseException: what made a worker or a download fail.
        """
        with self._lock:
            awaited = self._units.values() if units is None else [self._units[name] for name in units]
            if any(unit.unfinished for unit in awaited):
                self._allowed = len(self._units)
                self._work.notify_all()
            self._progress.wait_for(
                lambda: self._error or self._closed or not any(unit.unfinished for unit in awaited)
            )
            self._raise()

    def close(self) -> None:
        """Nothing is handed out any more."""
        with self._lock:
            self._closed = True
            self._wake_all()

    def _add(self, works: Mapping[str, Work], to: list[_UnitState]) -> None:
        for name, work in works.items():
            unit = self._units[name]
            if unit.unfinished:
                raise InvariantError(f"an update of {name} began before the one before it was finished")
            unit.verdicts = work.verdicts
            unit.untaken = list(work.granules)
            unit.unfinished = {granule.index for granule in work.granules}
            to.append(unit)

    def _next(self) -> tuple[Granule, tuple[Verdict, ...]] | None:
        allowed = (unit for unit in self._pending if unit.position < self._allowed)
        return self._taken(chain(self._first, allowed))

    def _last(self) -> tuple[Granule, tuple[Verdict, ...]] | None:
        allowed = (unit for unit in reversed(self._pending) if unit.position < self._allowed)
        return self._taken(chain(allowed, reversed(self._first)))

    def _taken(self, units: Iterable[_UnitState]) -> tuple[Granule, tuple[Verdict, ...]] | None:
        """The first granule of these units whose gradient is stored."""
        for unit in units:
            granule = next((g for g in unit.untaken if g.gradient <= self._stored), None)
            if granule is not None:
                self._stored -= granule.gradient
                unit.untaken.remove(granule)
                if not unit.untaken:
                    (self._first if unit in self._first else self._pending).remove(unit)
                return granule, unit.verdicts
        return None

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._progress.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise InvariantError("the update was aborted")
