"""What no simulated step can be faster than, whatever the order of its work: the seconds that each resource
is busy at least.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tierstream.engine.bound import least_traffic
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.drive import DriveRates
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.times import LayerTimes
from tierstream.io.transfer import Direction
from tierstream.tiered.layout import ITEM_BYTES, Unit


def floor_s(case: Case, machine: Machine, times: LayerTimes) -> float:
    """Seconds of a step in steady state, at least. What the drives move is that of the bound of a run
    (engine/bound.py), which holds for any order of page uses and any policy of the cache.
    """
    idle, uses = case.script.expected_idle, case.script.steady_uses()
    compute_s = _compute_s(case, times)
    host_s = case.grain * machine.rates.page_s * (len(uses) - _uses_spared(case))
    update_s, up_s, down_s = _updates_and_links(case, machine, idle)
    threads = case.config.optimizer.threads_of(machine.cores)
    cores_s = host_s + min(threads, machine.cores) * (0.0 if case.plan.gpu_updates else update_s)
    if machine.gpu_bytes is None:
        cores_s += machine.cores * compute_s + up_s + down_s
    names = case.config.tiers.nvme_dirs or []
    drives_s = 0.0
    if names:
        drives_s = _moved_s(machine.drives_of(names), *least_traffic(uses, case.plan, case.layout))
    return max(compute_s, host_s, update_s, up_s, down_s, cores_s / machine.cores, drives_s)


def _compute_s(case: Case, times: LayerTimes) -> float:
    """Of the compute lane, which does one thing after another."""
    units = case.units
    tables = (units.embed, *units.tables)
    work = [("forward", unit) for unit in units.begin if unit in tables]
    work += [("forward", layer) for layer in units.layers]
    work += [("head", units.head)]
    work += [("backward", layer) for layer in units.layers[units.backward_from :]]
    work += [("backward", table) for table in tables if table.trained]
    work += [("adamw", unit) for unit in case.script.staying if unit.trained]
    return sum(times.compute_s(what, unit.name) for what, unit in work)


def _updates_and_links(case: Case, machine: Machine, idle: Collection[str]) -> tuple[float, float, float]:
    """Seconds of AdamW on the CPU, and of the links to the device and back.

    Where CPU and GPU both update, shares of both as if granules could be cut at will.
    """
    layout, rates, script = case.layout, machine.rates, case.script
    if machine.gpu_bytes is None:
        up_rate = down_rate = rates.host_copy
    else:
        up_rate = rates.upload or math.inf
        down_rate = rates.download or up_rate
    plan = script.steady_plan
    up = _expert_uploads(case, idle)
    for upload, planned in zip(plan.uploads, plan.assignments, strict=True):
        up += layout.spec(upload.unit, upload.plane).nbytes if planned.fetch else 0
    trained = [unit for unit in script.streamed if unit.trained]
    busy = [unit for unit in trained if unit.name not in idle]
    down = sum(layout.spec(unit.name, "grad").nbytes for unit in busy)
    down += sum(spec.nbytes for (_, plane), spec in layout.planes.items() if plane == "activation")
    updated = trained if case.config.moe.idle == "dense" else busy
    names = {unit.name for unit in updated}
    states = sum(s.nbytes for s in layout.planes.values() if s.durable and s.unit in names)
    gradients = sum(layout.spec(unit.name, "grad").nbytes for unit in busy)
    update_s = sum(map(_numel, updated)) / rates.update_parameters_per_s
    more_up_s, more_down_s = (states + gradients) / up_rate, states / down_rate
    share = 0.0  # of the update, by the GPU
    if case.plan.gpu_updates:
        share = 1.0
        if case.plan.cpu_updates:
            share = min(
                _even(update_s, up / up_rate, more_up_s), _even(update_s, down / down_rate, more_down_s)
            )
    return (1 - share) * update_s, up / up_rate + share * more_up_s, down / down_rate + share * more_down_s


def _even(update_s: float, link_s: float, more_s: float) -> float:
    """The share with which the CPU and a link are busy equally long."""
    return max(0.0, update_s - link_s) / (update_s + more_s) if update_s else 0.0


def _numel(unit: Unit) -> int:
    return sum(tensor.numel for tensor in unit.tensors)


def _expert_uploads(case: Case, idle: Collection[str]) -> int:
    """Bytes of experts: once in forward, and again in backward but for those that still lie in slots."""
    if case.plan.device.expert_slots is None:
        return 0
    slots, size = case.plan.device.expert_slots
    nbytes = [
        sum(unit.numel * ITEM_BYTES[unit.dtype] for unit in own if unit.name not in idle)
        for own in case.units.experts
    ]
    return sum(nbytes) + max(0, sum(nbytes[case.units.backward_from :]) - slots * size)


def _uses_spared(case: Case) -> int:
    """Page uses of experts that are listed, and do not come where an expert lies in a slot."""
    if case.plan.device.expert_slots is None:
        return 0
    slots, size = case.plan.device.expert_slots
    return slots * -(-size // case.layout.page_bytes)


def _moved_s(drives: Sequence[DriveRates], read: int, written: int) -> float:
    """Of all drives together, with the bytes spread as is best: together as long as there are both, or one
    after the other.
    """

    def rate(way: Direction, *, mixed: bool) -> float:
        return sum(drive.rate(way, mixed=mixed) for drive in drives)

    reads, writes = rate(Direction.READ, mixed=False), rate(Direction.WRITE, mixed=False)
    reads_mixed, writes_mixed = rate(Direction.READ, mixed=True), rate(Direction.WRITE, mixed=True)
    both_s = min(read / reads_mixed, written / writes_mixed)
    then_s = max((read - both_s * reads_mixed) / reads, (written - both_s * writes_mixed) / writes)
    return min(both_s + then_s, read / reads + written / writes)
