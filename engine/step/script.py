"""What a step does, in which order and on which pages: all of it is known before a byte is read.

`Runtime` carries a script out; the planner's simulator runs the same one against the clock of a machine that
need not be there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tierstream.engine.device.memory import ACTIVATION_GROUP
from tierstream.engine.device.upload import Upload, nothing_held, plan_uploads
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.moe.use import expected_with_tokens
from tierstream.engine.plan import Plan
from tierstream.engine.step.schedule import Schedules
from tierstream.engine.step.streams import Use, list_uses
from tierstream.engine.update.granules import UnitGranules
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.store import Intent

#: Where updates begin in backward and the state is on drives, gradients may take this part of the DRAM, and
#: as many granules' as the workers have and as come meanwhile. A gradient that waits there for planes on a
#: drive costs its bytes in reads and in writes of what it keeps out.
_GRADIENTS_SHARE, _GRADIENTS_LEAST = 1 / 128, 4


class StepScript:
    """The script of a run's steps. Takes no memory on the device, no store and no weights.

    Attributes:
        uses: of device bytes, in a step; the first `forward_uses` of them make a pass forward.
        uploads: for each of `uses` what must be in a slot.
        staying, streamed: units whose state is on the device, and those whose state is in the store, in
            forward order.
        granules: of their updates.
        steady_plan: the slots of `uploads` where all weights were updated since the step before.
        schedules: page uses of steps and passes.
        updates_in_backward: a unit is updated as soon as its gradient is complete; else in the next forward.
        with_tokens: of each layer as many experts as have tokens in a step on average, where tokens go to all
            equally likely.
        expected_idle: the others.
        not_updated: those of them, if a step leaves their updates out or puts them off.
    """

    def __init__(
        self, units: ModelUnits, layout: Layout, plan: Plan, optimizer: OptimizerConfig, moe: MoeConfig
    ) -> None:
        memory = plan.device
        self.units, self.layout = units, layout
        self.uses = list_uses(units, stashes=plan.boundary_nbytes is not None)
        self.forward_uses = max(index for index, use in enumerate(self.uses) if use.kind == "head") + 1
        self.uploads = [_upload(use, memory.group_of) for use in self.uses]
        self.staying, self.streamed = (
            [unit for unit in units.in_forward_order if (unit.name in memory.resident) is stays]
            for stays in (True, False)
        )
        self.granules = UnitGranules(layout, self.streamed)
        self.steady_plan = plan_uploads(self.uploads, nothing_held(memory.slots, memory.resident))
        self.schedules = Schedules(
            layout, units, self.uses, self.granules, moe.idle, memory.resident, optimizer
        )
        self.updates_in_backward = optimizer.updates_in_backward
        layers = zip(units.experts, units.passed_by, strict=True)
        self.with_tokens = tuple(expected_with_tokens(*layer, plan.tokens_per_step) for layer in layers)
        self.expected_idle = frozenset(
            unit.name
            for own, count in zip(units.experts, self.with_tokens, strict=True)
            for unit in own[count:]
        )
        self.not_updated = frozenset[str]() if moe.idle == "dense" else self.expected_idle
        self._frames = plan.dram_bytes // layout.page_bytes

    def gradient_pages(self, *, on_drives: bool) -> int | None:
        """Pages of gradients that may be in DRAM before their update is finished; None: all of them."""
        if not (on_drives and self.updates_in_backward):
            return None
        widest = max((len(g.gradient) for own in self.granules.own.values() for g in own), default=0)
        return max(int(self._frames * _GRADIENTS_SHARE), _GRADIENTS_LEAST * widest)

    def steady_uses(self, idle: Collection[str] | None = None) -> list[tuple[Page, Intent]]:
        """Page uses of a step in steady state, in order.

        Args:
            idle: experts that have no tokens; None: the expected ones.
        """
        idle = self.expected_idle if idle is None else idle
        updating = not self.updates_in_backward
        return self.schedules.step(self.steady_plan, updating=updating, idle=idle, absent=idle)

    def expected(self, idle: Collection[str]) -> list[Page]:
        """Pages of the steps that follow one with these idle experts; see `Schedules.expected`."""
        updating = not self.updates_in_backward
        return self.schedules.expected(self.steady_plan, updating=updating, idle=idle)


def _upload(use: Use, group_of: Mapping[str, str]) -> Upload:
    if use.kind == "activation":
        return Upload(use.unit, "activation", ACTIVATION_GROUP)
    return Upload(use.unit, "weight", group_of[use.unit])
