"""What becomes of experts without tokens ("idle") when a step's update is carried out.

transformers keeps the experts of a layer in one stack, so torch.optim.AdamW moves an idle one as well: its
gradient is zero, but its momentum and its decay go on. `dense` does so in every step. `lazy` puts it off
until the weights are next read: the updates that an expert missed are then carried out one after another,
which gives the same bits (docs/design.md section 5.5). `frozen` leaves an idle expert as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierstream.engine.moe.config import IdleMode
from tierstream.engine.update.optimizer import Verdict
from tierstream.engine.update.order import Work
from tierstream.engine.update.update import UpdateDriver
from tierstream.tiered.layout import Unit


class IdleExperts:
    """Knows which experts are idle, and up to which update each one's planes are.

    Args:
        streamed: all units that `updates` knows, in forward order.
        experts: those of them that are experts. Of frozen ones it is only known which are idle.
        update_of: a number of applied updates -> the verdict of the next one, whatever its gradients were.
        applied: updates that the planes hold.

    Attributes:
        names: experts without tokens in the latest step, so far.
    """

    def __init__(
        self,
        mode: IdleMode,
        updates: UpdateDriver,
        streamed: Sequence[Unit],
        experts: Iterable[Unit],
        update_of: Callable[[int], Verdict],
        applied: int,
    ) -> None:
        self._mode, self._updates, self._update_of = mode, updates, update_of
        self._streamed = [unit.name for unit in streamed if unit.trained]
        self._experts = list(experts)
        self.names: set[str] = set()
        self.restart(applied)

    def restart(self, applied: int) -> None:
        """The planes of all experts hold so many updates."""
        self._applied = applied
        lazy = [unit.name for unit in self._experts if unit.trained] if self._mode == "lazy" else []
        self._reached = dict.fromkeys(lazy, applied)

    def begin_step(self) -> None:
        self.names.clear()

    def expect_all_idle(self) -> None:
        """Before the first step nobody knows who will have tokens: who does is read when it is wanted."""
        self.names.update(unit.name for unit in self._experts)

    def absent(self, unit: Unit, verdict: Verdict | None) -> None:
        """An expert has no tokens in this step.

        Args:
            verdict: of its update, where that is carried out during backward.
        """
        self.names.add(unit.name)
        if verdict is not None and self._mode == "dense" and unit.trained:
            self._updates.queue.finish([unit.name])
            self._updates.queue.decide({unit.name: self._updates.idle_work(unit.name, [verdict])})

    def conclude(self, verdict: Verdict) -> None:
        """The step's update is applied, now or later, to all units that have a gradient."""
        self._applied = verdict.update
        for name in self._reached.keys() - self.names:
            self._reached[name] = verdict.update

    def works(self, verdict: Verdict) -> dict[str, Work]:
        """The step's update, in forward order."""
        updates = self._updates
        return {
            name: updates.idle_work(name, [verdict]) if name in self.names else updates.work(name, verdict)
            for name in self._streamed
            if name not in self.names or self._mode == "dense"
        }

    def is_behind(self, name: str) -> bool:
        """An expert has missed updates: its weights must not be read yet."""
        return self._reached.get(name, self._applied) < self._applied

    def catch_up(self, names: Sequence[str]) -> None:
        """These are read soon: let the updates that they missed go before all others."""
        overdue = self._overdue(names)
        if overdue:
            self._updates.queue.finish(overdue)
            self._updates.queue.decide_first(overdue)

    def overdue(self) -> dict[str, Work]:
        """What experts have missed, to be carried out now."""
        return self._overdue(self._reached)

    def _overdue(self, names: Iterable[str]) -> dict[str, Work]:
        behind = [name for name in names if self.is_behind(name)]
        works = {}
        for name in behind:
            missed = range(self._reached[name], self._applied)
            works[name] = self._updates.idle_work(name, [self._update_of(applied) for applied in missed])
            self._reached[name] = self._applied
        return works
