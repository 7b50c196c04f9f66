"""A case with fewer and larger pages, for a simulation that takes seconds whatever the model."""

from __future__ import annotations

from dataclasses import replace

from tierstream.engine.device.memory import EXPERT_GROUP, DeviceMemory
from tierstream.engine.model.units import build_layout
from tierstream.engine.planner.case import Case
from tierstream.tiered.layout import TensorSpec, Unit

#: Page uses of a step that are simulated in about a second.
_PAGES_ENOUGH = 6000
#: Frames that are left at least, so that eviction keeps its choice.
_FRAMES_LEAST = 256
#: Fewer frames than this make the store wait where a larger one would not.
FRAMES_FEWEST = 32
#: More pages are not simulated: where even these leave fewer frames than that, DRAM holds so little of the
#: state that more of it would make no difference.
_PAGES_MOST = 20_000


def coarser(case: Case, pages_enough: int | None = None, frames_least: int | None = None) -> Case:
    """The case with `grain` pages in each of its pages, and so many experts in each of its experts; the same
    if it has few. Bytes of all planes, links and budgets stay as they are.

    Args:
        pages_enough: more are not needed; None: as many as take a second.
        frames_least: that are left; None: as many as let a forecast be exact.
    """
    layout, plan = case.layout, case.plan
    pages = sum(layout.page_count(*key) for key in layout.planes)
    wanted = -(-pages // (pages_enough or _PAGES_ENOUGH))
    grain = min(wanted, max(1, plan.dram_bytes // layout.page_bytes // (frames_least or _FRAMES_LEAST)))
    grain = max(grain, -(-pages // _PAGES_MOST))
    if grain == 1:
        return case
    page_bytes = grain * layout.page_bytes
    if plan.dram_bytes < FRAMES_FEWEST * page_bytes:
        plan = replace(
            plan,
            dram_bytes=FRAMES_FEWEST * page_bytes,
            prefetch_bytes=max(plan.prefetch_bytes, FRAMES_FEWEST // 4 * page_bytes),
            writeback_bytes=max(plan.writeback_bytes, FRAMES_FEWEST // 8 * page_bytes),
        )
    units = replace(case.units, experts=tuple(_merged(own, grain) for own in case.units.experts))
    optimizer = case.config.optimizer
    merged = build_layout(
        units, page_bytes=page_bytes, master=optimizer.master, grad_dtype=optimizer.grad_dtype,
        boundary_nbytes=plan.boundary_nbytes, resident=plan.device.resident,
    )  # fmt: skip
    device = _device(plan.device, grain)
    plan = replace(plan, page_bytes=page_bytes, device=device)
    return replace(case, units=units, layout=merged, plan=plan, grain=case.grain * grain)


def _merged(experts: tuple[Unit, ...], grain: int) -> tuple[Unit, ...]:
    groups = (experts[start : start + grain] for start in range(0, len(experts), grain))
    return tuple(_as_one(group[0], len(group)) for group in groups)


def _as_one(unit: Unit, count: int) -> Unit:
    """So many units like this one."""
    tensors = (TensorSpec(t.name, (count, *t.shape), count * t.offset, t.group) for t in unit.tensors)
    return Unit(unit.name, unit.dtype, tuple(tensors), count * unit.numel)


def _device(memory: DeviceMemory, grain: int) -> DeviceMemory:
    if memory.expert_slots is None:
        return memory
    count, nbytes = memory.expert_slots
    sums, numel = memory.sums[EXPERT_GROUP]
    return replace(
        memory,
        expert_slots=(max(2, count // grain), grain * nbytes),
        sums={**memory.sums, EXPERT_GROUP: (max(2, sums // grain), grain * numel)},
    )
