"""How the device's memory is divided: buffers that streamed units share in turn, and units that stay.

A unit that stays has all of its state on the device: nothing of it moves, and its update takes a pass through
device memory. The first units in forward order stay, as many as the budget allows: their forward runs while
the updates of the others are still under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from tierstream.io.errors import BudgetError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, Layout, Unit

if TYPE_CHECKING:
    from tierstream.engine.model.units import ModelUnits

#: Groups of buffers that units share; embedding, head and the units that stay have their own, by their names.
LAYER_GROUP, BESIDE_GROUP, EXPERT_GROUP, ACTIVATION_GROUP = "layers", "beside", "experts", "activations"
#: Slots for weights of experts where no budget says how many: those computed with, and as many on their way.
_EXPERT_SLOTS = 16
#: Experts that are computed together at most. To enqueue them costs what a single one does; more would take
#: memory, and put off the begin of a layer.
_EXPERT_GROUP = 8
#: Their rows, by what as many experts have where tokens go to all equally often: enough that chance alone
#: parts few groups. Routers that send most tokens to a few experts make no group larger.
_GROUP_ROWS = 1.25
#: Pages whose copy may be under way at once in each direction: enough to keep a link busy, few enough to pin
#: little DRAM.
IN_FLIGHT_PAGES = 4
#: Inputs of layers that wait for their download: one being written while the next is computed.
WAITING_TENSORS = 2
_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Persistent buffers.

    Attributes:
        slots: of uploads: group -> (count, bytes of one).
        sums: of gradients, in fp32: group -> (count, elements of one).
        group_of: unit -> its group in both.
        resident: units that stay, in forward order.
        expert_slots: count and bytes of the slots for weights of experts; None: there are no experts.
        layer_slots: layers whose weights may be there at once, of those that are streamed.
        nbytes: all of it, the planes of the units that stay and pages that pass through included.
    """

    slots: Mapping[str, tuple[int, int]]
    sums: Mapping[str, tuple[int, int]]
    group_of: Mapping[str, str]
    resident: tuple[str, ...]
    expert_slots: tuple[int, int] | None
    layer_slots: int
    nbytes: int


def divide(
    units: ModelUnits,
    layout: Layout,
    *,
    boundary_nbytes: int | None,
    passing_nbytes: int,
    expert_nbytes: int | None,
    budget: int | None,
    stay: int | None = None,
) -> DeviceMemory:
    """Divides the budget; None: as little as training takes.

    Args:
        layout: with every plane of every unit.
        boundary_nbytes: of a staged activation; None: none is staged.
        passing_nbytes: for pages that pass through.
        expert_nbytes: for weights of experts, of which none stays for good; None: a few experts.
        stay: units that stay; None: as many as the budget holds.

    Raises:
        BudgetError: the budget holds neither all units nor two layers beside the ends, or not those that are
            to stay, or `expert_nbytes` do not hold one expert.
    """
    division = _Division(units, layout, boundary_nbytes, passing_nbytes, expert_nbytes)
    order = tuple(unit.name for unit in units.without_experts)
    if budget is None:
        return division.with_experts(division.least(order[: stay or 0]))
    if stay is not None and (memory := division.least(order[:stay])).nbytes > budget:
        raise BudgetError(
            f"tiers.resident is {stay}, which takes {format_bytes(memory.nbytes)} of the device, and "
            f"tiers.gpu is {format_bytes(budget)}; lower tiers.resident, or raise tiers.gpu",
            need_bytes=memory.nbytes, limit_bytes=budget, key="tiers.gpu",
        )  # fmt: skip
    # Not always less with fewer that stay: with all of them no page passes through, and no slot is shared.
    counts = range(len(order), -1, -1) if stay is None else [min(stay, len(order))]
    *most_first, least = (division.least(order[:count]) for count in counts)
    best = next((memory for memory in (*most_first, least) if memory.nbytes <= budget), None)
    if best is None:
        layer_nbytes = least.slots[LAYER_GROUP][1]
        rest = least.nbytes - least.layer_slots * layer_nbytes
        raise BudgetError(
            f"tiers.gpu is {format_bytes(budget)}, but two layers of {format_bytes(layer_nbytes)} beside "
            f"embedding, head, {'' if least.expert_slots is None else 'experts, '}gradient sums, staged "
            "activations and pages that pass through "
            f"({format_bytes(rest)}) need {format_bytes(least.nbytes)}; raise tiers.gpu, or lower "
            f"train.rows_per_step{'' if least.expert_slots is None else ' or moe.gpu_cache'}",
            need_bytes=least.nbytes, limit_bytes=budget, key="tiers.gpu",
        )  # fmt: skip
    streamed = len(units.layers) - sum(name in best.resident for name in division.layer_names)
    if LAYER_GROUP in best.slots:
        spare = (budget - best.nbytes) // best.slots[LAYER_GROUP][1]
        best = division.made(best.resident, min(streamed, best.layer_slots + spare))
    return division.with_experts(best)


def rounds_gradients(layout: Layout) -> bool:
    """Whether pages of gradients are rounded on their way down, in buffers of their own."""
    return any(spec.plane == "grad" and spec.dtype == "bfloat16" for spec in layout.planes.values())


class _Division:
    def __init__(
        self,
        units: ModelUnits,
        layout: Layout,
        boundary_nbytes: int | None,
        passing_nbytes: int,
        expert_nbytes: int | None,
    ) -> None:
        self._units = units
        self._boundary_nbytes, self._passing_nbytes = boundary_nbytes, passing_nbytes
        self.layer_names = [unit.name for unit in units.layers]
        self._ends = {unit.name for unit in (*units.begin, *units.end)}
        self._experts = [unit for experts in units.experts for unit in experts]
        self._expert_slots = _expert_slots(self._experts, expert_nbytes)
        # Of thousands of experts these are found once, not for each division that is tried.
        self._expert_sums = [unit.numel for unit in self._experts if unit.trained]
        self._unit_count = len(units.in_forward_order)
        self._state_nbytes = dict.fromkeys((unit.name for unit in units.without_experts), 0)
        for (unit, plane), spec in layout.planes.items():
            if unit in self._state_nbytes and spec.durable and plane != "weight":  # weights have slots
                self._state_nbytes[unit] += spec.nbytes

    def least_slots(self, resident: tuple[str, ...]) -> int:
        """Layer slots without which streaming does not overlap with computing."""
        return min(2, sum(name not in resident for name in self.layer_names))

    def least(self, resident: tuple[str, ...]) -> DeviceMemory:
        """With no more than these slots."""
        return self.made(resident, self.least_slots(resident))

    def with_experts(self, memory: DeviceMemory) -> DeviceMemory:
        """Complete: experts, thousands at times, are named in the division that is chosen alone."""
        experts = dict.fromkeys((unit.name for unit in self._experts), EXPERT_GROUP)
        return replace(memory, group_of={**memory.group_of, **experts})

    def made(self, resident: tuple[str, ...], layer_slots: int) -> DeviceMemory:
        """Without the groups of experts."""
        units = self._units
        own = [unit for unit in units.without_experts if unit.name in {*resident, *self._ends}]
        slots = {unit.name: (1, _weight_nbytes(unit)) for unit in own}
        sums = {unit.name: (1, unit.numel) for unit in own if unit.trained}
        group_of = {unit.name: unit.name for unit in own}

        def share(group: str, sharing: Sequence[Unit], slot_count: int, sum_count: int) -> None:
            if not sharing:
                return
            if slot_count:
                slots[group] = slot_count, max(_weight_nbytes(unit) for unit in sharing)
            summed = [unit.numel for unit in sharing if unit.trained]
            if summed:
                sums[group] = min(sum_count, len(summed)), max(summed)
            group_of.update(dict.fromkeys((unit.name for unit in sharing), group))

        together = max(len(beside) for beside in units.beside)
        layers, beside = (
            [unit for unit in sharing if unit.name not in group_of]
            for sharing in (units.layers, chain(*units.beside))
        )
        share(LAYER_GROUP, layers, layer_slots, 2)
        share(BESIDE_GROUP, beside, max(layer_slots, 1) * together, 2 * together)
        if self._expert_sums and self._expert_slots is not None:  # those of a group, and one that leaves
            count = expert_group(self._expert_slots[0]) + 1
            sums[EXPERT_GROUP] = min(count, len(self._expert_sums)), max(self._expert_sums)
        everything_stays = len(resident) == self._unit_count
        nbytes = 0 if everything_stays else self._passing_nbytes
        if self._expert_slots is not None:
            nbytes += self._expert_slots[0] * self._expert_slots[1]
        if self._boundary_nbytes is not None:
            staged = min(2, len(units.layers) - units.backward_from)
            if staged:
                slots[ACTIVATION_GROUP] = staged, self._boundary_nbytes
        nbytes += sum(count * size for count, size in slots.values())
        nbytes += _SUM_BYTES * sum(count * numel for count, numel in sums.values())
        nbytes += sum(self._state_nbytes[name] for name in resident)
        return DeviceMemory(
            slots=slots,
            sums=sums,
            group_of=group_of,
            resident=resident,
            expert_slots=self._expert_slots,
            layer_slots=layer_slots,
            nbytes=nbytes,
        )


def expert_group(slots: int) -> int:
    """Experts that are computed together, so that as many can come meanwhile."""
    return max(1, min(_EXPERT_GROUP, slots // 2))


def group_rows(pairs: int, experts: int, group: int) -> int:
    """Rows of a group at most, unless a single expert has more.

    Args:
        pairs: (token, choice) pairs of a layer. experts: of the layer. group: experts in a group at most.
    """
    return math.ceil(_GROUP_ROWS * group * pairs / experts)


def _weight_nbytes(unit: Unit) -> int:
    return unit.numel * ITEM_BYTES[unit.dtype]


def _expert_slots(experts: Sequence[Unit], budget: int | None) -> tuple[int, int] | None:
    """Count and bytes of the slots for weights of experts."""
    if not experts:
        return None
    size = max(_weight_nbytes(unit) for unit in experts)
    count = min(_EXPERT_SLOTS if budget is None else budget // size, len(experts))
    if count < 1:
        raise BudgetError(
            f"moe.gpu_cache is {format_bytes(budget or 0)}, and an expert takes {format_bytes(size)}; raise "
            "it to that at least, or leave it out",
            need_bytes=size, limit_bytes=budget or 0,
        )  # fmt: skip
    return count, size
