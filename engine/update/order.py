"""Which granule is updated next: one whose verdict is known and whose gradient is stored, in the order in
which forward needs them. A state machine without threads; `queue` brings them together with it.
"""

from __future__ import annotations

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


#: A granule that was taken, and what to carry out on it.
Taken = tuple[Granule, tuple[Verdict, ...]]


class _UnitState:
    """What is left of one unit's work."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.verdicts: tuple[Verdict, ...] = ()
        self.untaken: list[Granule] = []
        self.unfinished: set[int] = set()


class UpdateOrder:
    """What is left to update.

    Args:
        units: in forward order.
        gradient_pages: pages of gradients that may be in DRAM, or on their way there, before their update is
            finished; None: all of them.
    """

    def __init__(self, units: Iterable[str], gradient_pages: int | None = None) -> None:
        self._gradient_pages, self._admitted = gradient_pages, 0
        self._units = {name: _UnitState(index) for index, name in enumerate(units)}
        self._first: list[_UnitState] = []
        self._pending: list[_UnitState] = []
        """Units with granules that nobody has taken, in the order in which they are wanted; those of the one
        list before those of the other."""
        self._stored: set[Page] = set()
        """Gradient pages in DRAM."""
        self._allowed = len(self._units)

    @property
    def waiting(self) -> bool:
        """There are granules that nobody has taken."""
        return bool(self._pending or self._first)

    @property
    def has_room(self) -> bool:
        """A page of a gradient may go to DRAM."""
        return self._gradient_pages is None or self._admitted < self._gradient_pages

    def admit(self) -> None:
        """A page of a gradient goes to DRAM."""
        self._admitted += 1

    def stored(self, page: Page) -> None:
        """A page of a gradient is in DRAM."""
        self._stored.add(page)

    def forget(self) -> None:
        """The stored gradients, which are all that were admitted, are discarded."""
        self._stored.clear()
        self._admitted = 0

    def decide(self, works: Mapping[str, Work], *, ahead: int | None = None) -> None:
        """These units are to be updated.

        Args:
            works: of each unit.
            ahead: so many units may be updated before the first is asked for (`ask`); None: all.

        Raises:
            InvariantError: the update of a unit before this one has not been finished.
        """
        self._add(works, self._pending)
        self._allowed = len(self._units) if ahead is None else ahead

    def decide_first(self, works: Mapping[str, Work]) -> None:
        """As `decide`, for units that somebody waits for: nothing goes before them or holds them back."""
        self._add(works, self._first)

    def want_in_forward_order(self) -> None:
        """What is left of updates during backward is wanted by the forward that comes."""
        self._pending.sort(key=lambda unit: unit.position)

    def next(self) -> Taken | None:
        """The next granule, which is taken; None: there is none now."""
        allowed = (unit for unit in self._pending if unit.position < self._allowed)
        return self._taken(chain(self._first, allowed))

    def last(self) -> Taken | None:
        """As `next`, beginning with the unit that is wanted last of those that may be updated."""
        allowed = (unit for unit in reversed(self._pending) if unit.position < self._allowed)
        return self._taken(chain(allowed, reversed(self._first)))

    def finished(self, granule: Granule) -> None:
        """The planes of a granule that was taken are updated."""
        self._units[granule.unit].unfinished.discard(granule.index)
        self._admitted -= len(granule.gradient)

    def ask(self, unit: str) -> bool:
        """The unit's weights are asked for, so updates may run further ahead; tells whether more may now."""
        ahead = self._units[unit].position + 1 + UNITS_AHEAD
        further = ahead > self._allowed
        self._allowed = max(ahead, self._allowed)
        return further

    def ask_all(self) -> None:
        """Nothing holds updates back."""
        self._allowed = len(self._units)

    def is_due(self, unit: str, granule: int) -> bool:
        """A granule's update is not finished."""
        return granule in self._units[unit].unfinished

    def any_due(self, units: Iterable[str] | None = None) -> bool:
        """An update of these units is not finished; None: of any."""
        states = self._units.values() if units is None else (self._units[name] for name in units)
        return any(state.unfinished for state in states)

    def _add(self, works: Mapping[str, Work], to: list[_UnitState]) -> None:
        for name, work in works.items():
            unit = self._units[name]
            if unit.unfinished:
                raise InvariantError(f"an update of {name} began before the one before it was finished")
            unit.verdicts = work.verdicts
            unit.untaken = list(work.granules)
            unit.unfinished = {granule.index for granule in work.granules}
            to.append(unit)

    def _taken(self, units: Iterable[_UnitState]) -> Taken | None:
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
