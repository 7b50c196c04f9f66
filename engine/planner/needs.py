"""Bytes that a run takes of a machine: by tier and kind, and at the peak of the device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from tierstream.engine.device.memory import ACTIVATION_GROUP
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan_report import extras_nbytes
from tierstream.engine.planner.case import Case
from tierstream.engine.step.head import logit_nbytes
from tierstream.tiered.layout import ITEM_BYTES, Unit, round_up

#: Tensors as large as the input of a layer, of all rows, that are there while a layer is differentiated: its
#: input and output, their gradients, and one on its way.
_BOUNDARIES = 5
#: What a layer keeps for its backward, by the inputs and outputs of its products: fused kernels keep no more
#: (the H200 runs of docs/measurements), the model's own also norms and activation functions, in part in fp32.
_KEPT = {"liger": 1.0, "plain": 1.5}
#: Tensors with a row for each token and choice of an expert, beside what experts themselves keep: where they
#: come one by one, and in stacks.
_EXPERT_ROWS, _STACK_ROWS = 3, 1
#: Blocks of the device's allocator, small tensors.
_ROUNDED_UP = 1.04
#: Tokens of the busiest expert, by those of an even share.
_BUSIEST = 4
_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Device memory at its peak: the buffers of the run, and what passes beside them."""

    buffers_bytes: int
    """Exact: slots, gradient sums, units that stay, pages that pass through."""
    logits_bytes: int
    """Exact: logits of one chunk of the loss, and what is made of them; gone before the layers' backward."""
    layer_bytes: int
    """An estimate: what the largest layer keeps for its backward, its gradients, and the inputs and outputs
    of layers that are there then. Attention is counted as a flash kernel, without a matrix of scores."""

    extras_bytes: int
    """Exact: what layers are given beside the hidden states, with its gradients."""

    @property
    def nbytes(self) -> int:
        """All of it: logits and layers take turns."""
        return self.buffers_bytes + self.extras_bytes + max(self.logits_bytes, self.layer_bytes)


def device_peak(case: Case) -> Peak:
    return Peak(
        buffers_bytes=case.plan.gpu_bytes,
        logits_bytes=chunk_logits(case),
        layer_bytes=_layer_bytes(case),
        extras_bytes=extras_nbytes(case.units, case.plan),
    )


def chunk_logits(case: Case) -> int:
    """Bytes of the logits of one chunk."""
    train, vocabulary = case.config.train, case.vocabulary
    tokens = min(case.plan.tokens_per_step, train.loss_chunk(vocabulary))
    fused = ITEM_BYTES[case.units.head.dtype] if train.kernels == "liger" else None
    return tokens * vocabulary * logit_nbytes(train.z_loss_coef, fused)


def planes(case: Case) -> dict[str, dict[str, int]]:
    """Tier -> plane or kind of buffer -> bytes. Durable planes are named where they are at home; those that
    live within a step, which go to DRAM first, there.
    """
    memory, layout = case.plan.device, case.layout
    resident = set(memory.resident)
    home = "dram" if case.config.tiers.nvme_dirs is None else "nvme"
    found: dict[str, Counter[str]] = {"gpu": Counter(), "dram": Counter(), home: Counter()}
    for spec in layout.planes.values():
        page = min(spec.nbytes, layout.page_bytes)
        found[home if spec.durable else "dram"][spec.plane] += round_up(spec.nbytes, page)  # whole pages
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


def _layer_bytes(case: Case) -> int:
    train, units = case.config.train, case.units
    step_tokens, seq_len = case.plan.tokens_per_step, case.config.data.seq_len
    tokens = (train.rows_per_chunk or train.rows_per_step) * seq_len
    item, kept = ITEM_BYTES[units.embed.dtype], _KEPT[train.kernels]
    boundary = step_tokens * units.anatomy.boundary_width * item
    most = 0
    for index, layer in enumerate(units.layers):
        own = (layer, *units.beside[index])
        choices = _choices(units, index)
        edges = sum(_edges(unit, choices, train.kernels) for unit in own)
        nbytes = kept * tokens * item * edges + sum(map(_weights, own))
        if experts := units.experts[index]:
            expert = experts[0]
            nbytes += _EXPERT_ROWS * choices * boundary
            busiest = min(step_tokens, _BUSIEST * step_tokens * choices // len(experts))
            nbytes += kept * busiest * item * _edges(expert, 1, train.kernels) + _weights(expert)
        else:
            nbytes += _STACK_ROWS * choices * boundary
        most = max(most, int(_ROUNDED_UP * nbytes))
    waiting = len(units.layers) if case.config.tiers.activations == "gpu" else 0
    return most + (_BOUNDARIES + waiting) * boundary


def _choices(units: ModelUnits, layer: int) -> int:
    """Experts that a token goes to; 0: the layer has none."""
    experts, passed_by = units.experts[layer], units.passed_by[layer]
    if experts:
        return len(experts) - passed_by // experts[0].parameters
    stacks = [t for t in units.layers[layer].tensors if len(t.shape) == 3]
    if not stacks:
        return 0
    return stacks[0].shape[0] - passed_by // sum(math.prod(t.shape[1:]) for t in stacks)


def _edges(unit: Unit, choices: int, kernels: str) -> int:
    """Elements that are kept for each token of what goes into and comes out of a unit's operations: of its
    products, and of norms where no kernel computes them anew. Stacks hold the matrices of all experts.
    """
    total = 0
    for tensor in unit.tensors:
        if len(tensor.shape) > 2:
            total += choices * sum(tensor.shape[1:])
        elif len(tensor.shape) == 2 or (kernels == "plain" and not tensor.name.endswith("bias")):
            total += sum(tensor.shape)
    return total


def _weights(unit: Unit) -> int:
    return unit.numel * ITEM_BYTES[unit.dtype]
