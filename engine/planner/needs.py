"""Bytes that a run takes of a machine: by tier and kind, and at the peak of the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tierstream.engine.device.memory import ACTIVATION_GROUP
from tierstream.engine.plan_tiers import extras_nbytes
from tierstream.engine.planner.activations import head_bytes, inputs_bytes, layer_bytes, logits_bytes
from tierstream.engine.planner.case import Case
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, round_up

_SUM_BYTES = 4


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
    """An estimate: what the largest layer keeps for its backward, its gradients, its input and its output."""
    inputs_bytes: int
    """Exact: inputs of all layers, which stay on the device with `tiers.activations: gpu`; else 0."""
    extras_bytes: int
    """Exact: what layers are given beside the hidden states, with its gradients."""

    @property
    def loss_bytes(self) -> int:
        return self.logits_bytes + self.head_bytes

    @property
    def nbytes(self) -> int:
        """All of it: head and layers take turns, beside what stays."""
        stays = self.buffers_bytes + self.extras_bytes + self.inputs_bytes
        return stays + max(self.loss_bytes, self.layer_bytes)

    def describe(self) -> str:
        """What of it is what, for people."""
        buffers = f"buffers {format_bytes(self.buffers_bytes)}"
        if self.inputs_bytes:
            buffers += f", inputs of all layers {format_bytes(self.inputs_bytes)}"
        return (
            f"{buffers}, and beside them {format_bytes(self.loss_bytes)} for the loss or about "
            f"{format_bytes(self.layer_bytes)} for the largest layer"
        )


def device_peak(case: Case) -> Peak:
    return Peak(
        buffers_bytes=case.plan.gpu_bytes,
        logits_bytes=logits_bytes(case),
        head_bytes=head_bytes(case),
        layer_bytes=layer_bytes(case),
        inputs_bytes=inputs_bytes(case),
        extras_bytes=extras_nbytes(case.units, case.plan),
    )


def planes(case: Case) -> dict[str, dict[str, int]]:
    """Tier -> plane or kind of buffer -> bytes. Durable planes are named where they are at home; those that
    live within a step, which go to DRAM first, there.
    """
    memory, layout = case.plan.device, case.layout
    resident = set(memory.resident)
    home = "dram" if case.config.tiers.nvme_dirs is None else "nvme"
    found: dict[str, Counter[str]] = {"gpu": Counter(), "dram": Counter(), home: Counter()}
    for (plane, dtype, numel, durable), count in layout.kinds.items():
        nbytes = numel * ITEM_BYTES[dtype]
        whole_pages = round_up(nbytes, min(nbytes, layout.page_bytes))
        found[home if durable else "dram"][plane] += count * whole_pages
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
