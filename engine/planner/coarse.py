"""A case with fewer and larger pages, for a simulation that takes a second whatever the model: a trillion
parameters are 300 thousand pages, of which Python simulates some twenty thousand a second.
"""

from __future__ import annotations

from dataclasses import replace

from tierstream.engine.device.memory import EXPERT_GROUP, DeviceMemory
from tierstream.engine.model.units import ModelUnits, build_layout
from tierstream.engine.planner.case import Case
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout, TensorSpec, Unit, round_up

#: Pages with which a forecast is within 3 % of that in the run's own (docs/log.md), and takes half a second.
PAGES_FORESEEN = 3000
#: With so many it is seen what a change does, in half that time.
PAGES_COMPARED = 1000
#: With fewer frames pages leave that are still in use nearby, which they would not in a run. A DRAM tier that
#: holds less of the state than so many large pages makes no difference.
_FRAMES_LEAST = 32
#: Frames of these for prefetch, and for write-backs.
_AHEAD, _BEHIND = 8, 4


def grain_for(case: Case, pages: int = PAGES_FORESEEN, frames: int = 1) -> int:
    """Of how many pages, and experts, to make one, so that a case has about so many pages.

    Args:
        frames: DRAM shall have so many at least, if that takes no more pages than a forecast has.
    """
    total, plan = case.layout.page_total, case.plan
    finer = max(1, plan.dram_bytes // plan.page_bytes // frames)
    grain = max(min(-(-total // pages), finer), -(-total // PAGES_FORESEEN))
    experts = max(map(len, case.units.experts))

    def left_over(grain: int) -> int:
        return -experts % grain

    # Where it does not divide the experts, pages of the last ones are larger than what they hold.
    return min(range(grain, grain + grain // 2 + 1), key=left_over) if experts else grain


def coarser(case: Case, grain: int) -> Case:
    """The case with `grain` pages in each of its pages, and so many experts in each of its experts. Bytes of
    all planes, links and drives stay as they are, and so does the share of the pages that DRAM holds, unless
    it has too few frames.
    """
    if grain == 1:
        return case
    plan, units = case.plan, _with_merged_experts(case.units, grain)
    page_bytes = grain * plan.page_bytes
    layout = _layout(case, units, page_bytes)
    # A last page of a plane takes a whole frame, and of large pages more are last ones.
    frames = plan.dram_bytes // plan.page_bytes * layout.page_total // case.layout.page_total
    ahead = behind = 1
    if frames < _FRAMES_LEAST:
        frames, ahead, behind = _FRAMES_LEAST, _AHEAD, _BEHIND
    plan = replace(
        plan,
        page_bytes=page_bytes,
        dram_bytes=frames * page_bytes,
        prefetch_bytes=max(plan.prefetch_bytes, ahead * page_bytes) if plan.prefetch_bytes else 0,
        writeback_bytes=max(plan.writeback_bytes, behind * page_bytes),
        device=_device(plan.device, grain),
    )
    return replace(case, units=units, layout=layout, plan=plan, grain=case.grain * grain)


def in_whole_planes(case: Case, grain: int) -> Case:
    """Each plane as a page of its own, and experts as in `coarser`: for questions of bytes alone."""
    units = _with_merged_experts(case.units, grain)
    layout = _layout(case, units, PAGE_ALIGN_BYTES)
    page_bytes = round_up(max(nbytes for nbytes, _ in layout.sizes), PAGE_ALIGN_BYTES)
    layout, plan = replace(layout, page_bytes=page_bytes), replace(case.plan, page_bytes=page_bytes)
    return replace(case, units=units, layout=layout, plan=plan)


def _layout(case: Case, units: ModelUnits, page_bytes: int) -> Layout:
    optimizer, plan = case.config.optimizer, case.plan
    return build_layout(
        units, page_bytes=page_bytes, master=optimizer.master, grad_dtype=optimizer.grad_dtype,
        boundary_nbytes=plan.boundary_nbytes, resident=plan.device.resident,
    )  # fmt: skip


def _with_merged_experts(units: ModelUnits, grain: int) -> ModelUnits:
    return replace(units, experts=tuple(_merged(own, grain) for own in units.experts))


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
