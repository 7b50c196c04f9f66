"""Bytes that a run takes of a machine: by tier and kind, and at the peak of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tierstream.engine.device.memory import ACTIVATION_GROUP
from tierstream.engine.plan_tiers import extras_nbytes
from tierstream.engine.planner.activations import (
    head_bytes,
    inputs_bytes,
    layer_bytes,
    logits_bytes,
    masked_bytes,
    masks_bytes,
)
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.trace.trace import Track
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, Layout, round_up

_SUM_BYTES = 4
#: Workspaces of cuBLAS, for the thread that runs forward and that of autograd, 33 MiB each; and what blocks
#: of buffers are rounded up by (an H200 and torch 2.11, docs/measurements).
_LIBRARIES_BYTES = 80 << 20
#: The mask so far, a condition, and both of them.
_MASKS_WHILE_MADE = 3


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Device memory at its peak: the buffers of the run, and what passes beside them."""

    buffers_bytes: int
    """Exact: slots, gradient sums, units that stay, pages that pass through."""
    logits_bytes: int
    """Exact: logits of one chunk of the loss, and what is made of them; gone before the layers' backward."""
    head_bytes: int
    """An estimate: hidden states beside these logits."""
    layer_bytes: int
    """An estimate: what the largest layer keeps for its backward, its gradients, its input and its output;
    with the mask that attention takes, where documents share rows."""
    inputs_bytes: int
    """Exact: inputs of all layers with a backward, where they stay (`tiers.activations: gpu`); else 0."""
    libraries_bytes: int
    """An estimate: workspaces, and what the allocator rounds up; 0 on the CPU."""
    extras_bytes: int
    """Exact: what layers are given beside the hidden states, with its gradients."""
    masks_bytes: int
    """Exact: the mask of all rows of a step, where documents share rows."""

    @property
    def loss_bytes(self) -> int:
        return self.logits_bytes + self.head_bytes

    @property
    def nbytes(self) -> int:
        """All of it: head and layers take turns, beside what stays."""
        stays = self.buffers_bytes + self.libraries_bytes + self.extras_bytes + self.inputs_bytes
        beside = self.masks_bytes + max(self.loss_bytes, self.layer_bytes)
        return stays + max(beside, _MASKS_WHILE_MADE * self.masks_bytes)

    @property
    def beside_bytes(self) -> int:
        """At the peak, beside the buffers."""
        return self.nbytes - self.buffers_bytes

    def describe(self) -> str:
        """What of it is what, for people."""
        buffers = f"buffers {format_bytes(self.buffers_bytes)}"
        if self.inputs_bytes:
            buffers += f", inputs of all layers {format_bytes(self.inputs_bytes)}"
        if self.masks_bytes:
            mask = f"a mask of data.seq_len squared for each row {format_bytes(self.masks_bytes)}"
            buffers += f", {mask} ({_MASKS_WHILE_MADE} times that while it is made)"
        if self.libraries_bytes:
            buffers += f", libraries {format_bytes(self.libraries_bytes)}"
        return (
            f"{buffers}, and beside them {format_bytes(self.loss_bytes)} for the loss or about "
            f"{format_bytes(self.layer_bytes)} for the largest layer"
        )


def device_peak(case: Case) -> Peak:
    stay = case.config.tiers.activations == "gpu"
    return Peak(
        buffers_bytes=case.plan.gpu_bytes,
        logits_bytes=logits_bytes(case),
        head_bytes=head_bytes(case),
        layer_bytes=layer_bytes(case) + masked_bytes(case),
        inputs_bytes=inputs_bytes(case.config, case.units) if stay else 0,
        libraries_bytes=_LIBRARIES_BYTES if case.config.train.device != "cpu" else 0,
        extras_bytes=extras_nbytes(case.units, case.plan),
        masks_bytes=masks_bytes(case),
    )


def planes(case: Case, forecast: Forecast) -> dict[str, dict[str, int]]:
    """Tier -> plane or kind of buffer -> bytes that are there, in DRAM at most. Durable planes are named
    where they are at home; others come and go in DRAM, and spill where it is short.

    Args:
        forecast: of a step in steady state, for what spills.
    """
    memory, layout = case.plan.device, case.layout
    resident = set(memory.resident)
    on_drives = case.config.tiers.nvme_dirs is not None
    home = "nvme" if on_drives else "dram"
    durable, local = (_in_pages(layout, durable=durable) for durable in (True, False))
    found: dict[str, Counter[str]] = {"gpu": Counter(), "dram": Counter(), home: Counter()}
    found[home].update(durable)
    if case.plan.dram_bytes < layout.page_total * layout.page_bytes:
        # Backward makes gradients as it uses up the inputs of layers, and forward the other way round: there
        # are never more than all of the one or of the other.
        spilled = _spilled(local, forecast)
        most = min(case.plan.dram_bytes, max((local[plane] - spilled[plane] for plane in local), default=0))
        found["dram"][" or ".join(local)] = most
        found["dram"]["copies of nvme"] = min(case.plan.dram_bytes - most, sum(durable.values()))
        found[home].update({f"{plane} that spills": nbytes for plane, nbytes in spilled.items()})
    else:
        found["dram"].update(local)
        if on_drives:
            found["dram"]["copies of nvme"] = sum(durable.values())
        found["dram"]["frames that are not full"] = case.plan.dram_bytes - sum(found["dram"].values())
    for spec in layout.planes.values() if resident else ():
        if spec.unit in resident:
            found["gpu"][f"{spec.plane} of units that stay"] += spec.nbytes
    for group, (count, size) in memory.slots.items():
        if group not in resident:
            found["gpu"]["activation" if group == ACTIVATION_GROUP else "weight"] += count * size
    if memory.expert_slots is not None:
        found["gpu"]["weight"] += memory.expert_slots[0] * memory.expert_slots[1]
    found["gpu"]["gradient sum"] += _SUM_BYTES * sum(count * numel for count, numel in memory.sums.values())
    found["gpu"]["pages that pass"] = memory.nbytes - sum(found["gpu"].values())
    return {tier: {kind: n for kind, n in kinds.items() if n} for tier, kinds in found.items()}


def step_local(case: Case) -> dict[str, int]:
    """Plane -> bytes that each step makes and uses up."""
    return _in_pages(case.layout, durable=False)


def _in_pages(layout: Layout, *, durable: bool) -> dict[str, int]:
    """Plane -> bytes, in whole pages where it has several."""
    found = Counter[str]()
    for (plane, dtype, numel, kept), count in layout.kinds.items():
        if kept == durable:
            nbytes = numel * ITEM_BYTES[dtype]
            found[plane] += count * round_up(nbytes, min(nbytes, layout.page_bytes))
    return dict(found)


def _spilled(local: Mapping[str, int], forecast: Forecast) -> dict[str, int]:
    """What a step writes of these planes: as large a share of all that it writes as in what was simulated."""
    written = Counter[str]()
    for span in forecast.spans:
        if span.track is Track.WRITES and span.page is not None:
            written[span.page.plane] += span.nbytes
    scale = forecast.nbytes["nvme write"] / max(1, sum(written.values()))
    return {plane: min(nbytes, int(scale * written[plane])) for plane, nbytes in local.items()}


def arenas(case: Case, *, device_in_host: bool) -> int:
    """Host memory for pages and for copies of them, and for the buffers of a device that is the CPU."""
    plan = case.plan
    return plan.dram_bytes + plan.copy_bytes + (plan.gpu_bytes if device_in_host else 0)


def disk(case: Case) -> dict[str, int]:
    """What the drives and the run directory must have free: the state, what may spill, one checkpoint, and
    all checkpoints that stand side by side.
    """
    plan, on_drives = case.plan, case.config.tiers.nvme_dirs is not None
    most = case.config.checkpoint.most_at_once
    return {
        "store": plan.durable_bytes + plan.spill_bytes if on_drives else 0,
        "checkpoint": plan.durable_bytes,
        "checkpoints": most * plan.durable_bytes,
    }
