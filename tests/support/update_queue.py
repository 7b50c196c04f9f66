"""Units and granules to try an update queue with."""

from __future__ import annotations

from collections.abc import Iterable

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.optimizer import Verdict
from tierstream.engine.update.order import Work
from tierstream.engine.update.queue import UpdateQueue
from tierstream.tiered.layout import Page

#: In forward order, with their granules. A granule has two gradient pages, as with fp32 gradients of bf16
#: weights.
SIZES = {"embed": 2, "layers.0": 1, "layers.1": 3, "layers.2": 1, "head": 2}
UNITS = list(SIZES)
#: Seconds after which a thread that should go on is taken to sleep for ever.
PATIENCE_S = 20.0


def gradient_of(unit: str, index: int) -> frozenset[Page]:
    return frozenset(Page(unit, "grad", 2 * index + half) for half in (0, 1))


GRANULES = {
    unit: [Granule(unit, index, (), (), gradient_of(unit, index)) for index in range(count)]
    for unit, count in SIZES.items()
}
ALL = [granule for own in GRANULES.values() for granule in own]
PAGES = sorted((page for granule in ALL for page in granule.gradient), key=str)


def verdicts(*updates: int) -> tuple[Verdict, ...]:
    return tuple(Verdict(1.0, 1.0, 0.1, update) for update in updates)


def works(units: Iterable[str], update: int) -> dict[str, Work]:
    return {unit: Work(GRANULES[unit], verdicts(update)) for unit in units}


def idle_works(units: Iterable[str], *updates: int) -> dict[str, Work]:
    """Of units whose gradient is zero."""
    return {
        unit: Work([granule.without_gradient() for granule in GRANULES[unit]], verdicts(*updates))
        for unit in units
    }


def store(queue: UpdateQueue, *granules: Granule) -> None:
    for granule in granules:
        for page in granule.gradient:
            queue.stored(page)
