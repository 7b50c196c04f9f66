"""Every page use of a step, or of a pass forward, in the order in which it is expected: what the store looks
ahead on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

from tierstream.engine.device.upload import StepPlan
from tierstream.engine.model.units import ModelUnits, activation_unit
from tierstream.engine.moe.config import IdleMode
from tierstream.engine.step.streams import Use
from tierstream.engine.update.granules import UnitGranules
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Layout, Page, Unit
from tierstream.tiered.store import Intent


class Schedules:
    """Lists page uses.

    Args:
        uses: of device bytes, of a step.
        granules: of the units whose state is in the store.
        mode: what an update does to experts without tokens.
        resident: units that stay on the device.
    """

    def __init__(
        self,
        layout: Layout,
        units: ModelUnits,
        uses: Sequence[Use],
        granules: UnitGranules,
        mode: IdleMode,
        resident: Collection[str],
        config: OptimizerConfig,
    ) -> None:
        self._layout, self._units, self._uses = layout, units, uses
        self._granules, self._mode = granules, mode
        self._resident, self._updates_in_backward = resident, config.updates_in_backward
        self._stashed = {use.layer for use in uses if use.kind == "activation"}
        self._by_name = {unit.name: unit for unit in units.in_forward_order}

    def step(
        self,
        plan: StepPlan,
        *,
        updating: bool,
        idle: Collection[str],
        absent: Collection[str],
        first: int = 0,
    ) -> list[tuple[Page, Intent]]:
        """A step.

        Args:
            updating: the update of the step before is carried out in forward.
            idle: experts that had no tokens in the step before.
            absent: experts that have none in this one.
            first: use of device bytes from which on it is listed.
        """
        made: list[tuple[Page, Intent]] = []
        updated: set[str] = set()

        def add_update(unit: Unit) -> None:
            if updating and unit.name not in updated:
                made.extend(self._update(unit, idle))
                updated.add(unit.name)

        following = self._uses[first + 1 :]
        for index, (use, next_use) in enumerate(zip_longest(self._uses[first:], following), start=first):
            if use.kind == "activation":
                made += _all(plan.pages(self._layout, index), Intent.CONSUME)
                continue
            add_update(self._by_name[use.unit])
            made += _all(plan.pages(self._layout, index), Intent.READ)
            if use.layer is None:
                if use.kind == "head" and self._by_name[use.unit] in self._units.end:
                    made += self._gradient(self._by_name[use.unit], absent)
                continue
            if _goes_on(use, next_use):
                continue
            if use.kind == "forward" and use.layer in self._stashed:
                made += _all(self._layout.pages(activation_unit(use.layer), "activation"), Intent.OVERWRITE)
            for expert in self._units.experts[use.layer]:
                add_update(expert)
                made += self._expert(expert, absent)
                if use.kind == "backward":
                    made += self._gradient(expert, absent)
            if use.kind == "backward":
                for unit in (self._units.layers[use.layer], *self._units.beside[use.layer]):
                    made += self._gradient(unit, absent)
        units = self._units
        ends = (*reversed(units.tables), units.embed, *units.around)
        return made + [use for unit in ends for use in self._gradient(unit, absent)]

    def expected(self, plan: StepPlan, *, updating: bool, idle: Collection[str]) -> list[Page]:
        """Pages of a step of which it is not known yet who has tokens.

        Where the updates bring the weights of all experts in forward, all are expected to have some: one that
        has none after all costs next to nothing, one that was not expected leaves DRAM before backward.
        Elsewhere those are that had some in the step before.

        Args:
            updating, idle: see `step`.
        """
        all_come = self._mode == "dense" and not self._updates_in_backward
        uses = self.step(plan, updating=updating, idle=idle, absent=() if all_come else idle)
        return [page for page, _ in uses]

    def after_forward(self, plan: StepPlan, absent: Collection[str]) -> list[Page]:
        """Pages of what is left of a step once its layers have run. `absent`: experts without tokens."""
        first = next(index for index, use in enumerate(self._uses) if use.kind == "head")
        uses = self.step(plan, updating=False, idle=absent, absent=absent, first=first)
        return [page for page, _ in uses]

    def forward(self, plan: StepPlan, wanted: Collection[str]) -> list[Page]:
        """A pass forward; all are read. `wanted`: experts that are expected to have tokens."""
        pages: list[Page] = []
        uses = self._uses[: len(plan.uploads)]
        for index, (use, next_use) in enumerate(zip_longest(uses, uses[1:])):
            pages += plan.pages(self._layout, index)
            if use.layer is not None and not _goes_on(use, next_use):
                experts = [expert.name for expert in self._units.experts[use.layer] if expert.name in wanted]
                pages += [page for name in experts for page in self._layout.pages(name, "weight")]
        return pages

    def _update(self, unit: Unit, idle: Collection[str]) -> list[tuple[Page, Intent]]:
        if unit.name in idle and self._mode != "dense":
            return []
        return self._granules.uses(unit.name, idle=unit.name in idle)

    def _expert(self, expert: Unit, idle: Collection[str]) -> list[tuple[Page, Intent]]:
        if expert.name in idle:
            return []
        return _all(self._layout.pages(expert.name, "weight"), Intent.READ)

    def _gradient(self, unit: Unit, idle: Collection[str]) -> list[tuple[Page, Intent]]:
        if unit.name in self._resident or not unit.trained:
            return []
        stored = [] if unit.name in idle else _all(self._layout.pages(unit.name, "grad"), Intent.OVERWRITE)
        return stored + (self._update(unit, idle) if self._updates_in_backward else [])


def _goes_on(use: Use, next_use: Use | None) -> bool:
    """More of the same layer comes."""
    return next_use is not None and use[::2] == next_use[::2]


def _all(pages: Sequence[Page], intent: Intent) -> list[tuple[Page, Intent]]:
    return [(page, intent) for page in pages]
