"""How long the device computes on each part of a step: by a model of the machine, or as a trace says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from tierstream.engine.planner.case import Case
from tierstream.engine.planner.machine import Machine
from tierstream.engine.trace.trace import Span, Track
from tierstream.tiered.layout import ITEM_BYTES

#: Operations of torch for each tensor of a layer: forward, and recompute with backward.
_FORWARD_OPS, _BACKWARD_OPS = 7, 22
#: And for each expert that comes on its own, in a group, however large: OLMoE on an H200 (docs/measurements).
_EXPERT_FORWARD_OPS, _EXPERT_BACKWARD_OPS = 60, 260
#: How often what goes into and comes out of a matrix product crosses the device's memory, with the operations
#: around it, forward and backward. Fused kernels: what H200 runs of docs/measurements take beyond products.
_PASSES = {"plain": (4.0, 12.0), "liger": (1.6, 4.8)}
#: Bytes that cross it for each logit: fp32 logits, their exponentials and their gradient; or bf16 ones, in
#: whose place their gradient is put.
_LOGIT_BYTES = {"plain": 28, "liger": 10}
#: Bytes for each parameter of a gradient: read as autograd gives it, added to an fp32 sum, squared; and of an
#: update on the device.
_GRADIENT_BYTES, _UPDATE_BYTES = 14, 26


class LayerTimes(Protocol):
    """Seconds of the compute lane, for all rows of a step."""

    def compute_s(self, what: str, unit: str) -> float:
        """Of one piece of work.

        Args:
            what: as a trace names it: "forward", "backward" (with its recompute), "head" or "adamw".
            unit: whose weights; a layer is meant with all of its experts.
        """
        ...


@dataclass(frozen=True)
class Known:
    """Times by (what, unit); of units that were not seen those of another of the same kind."""

    seconds: Mapping[tuple[str, str], float]

    def compute_s(self, what: str, unit: str) -> float:
        if (what, unit) in self.seconds:
            return self.seconds[what, unit]
        kind = unit.partition(".")[0]
        like = [
            seconds
            for (own, name), seconds in self.seconds.items()
            if own == what and name.partition(".")[0] == kind
        ]
        return median(like) if like else 0.0


def times_of_trace(spans: Sequence[Span]) -> Known:
    """What a trace says of each unit, the median over its steps: the time of its spans on the lane `compute`,
    less what was waited for within them (experts).
    """
    waits = [span for span in spans if span.track is Track.HOST and span.waiting]
    found: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        if span.track is Track.COMPUTE:
            waited = sum(
                wait.end_s - wait.begin_s
                for wait in waits
                if span.begin_s <= wait.begin_s and wait.end_s <= span.end_s
            )
            found.setdefault((span.what, span.unit), []).append(span.end_s - span.begin_s - waited)
    return Known({key: median(times) for key, times in found.items()})


def modelled_times(case: Case, machine: Machine) -> Known:
    """Floating-point work, bytes through the device's memory and operations to launch, each at the machine's
    rate; products and the rest take turns, launches run beside them.
    """
    rates, tokens = machine.rates, case.plan.tokens_per_step
    units, item = case.units, ITEM_BYTES[case.units.embed.dtype]

    def seconds(flop: float, nbytes: float, ops: float = 0.0) -> float:
        return max(flop / rates.flop_per_s + nbytes / rates.device_memory, ops * rates.launch_s)

    found: dict[tuple[str, str], float] = {}
    kernels = case.config.train.kernels
    forward_passes, backward_passes = _PASSES[kernels]
    rows = case.config.train.rows_per_step
    chunks = -(-rows // (case.config.train.rows_per_chunk or rows))
    for index, layer in enumerate(units.layers):
        own, passed_by = units.layers_summed[index], units.passed_by[index]
        numel = own.parameters - passed_by
        share = numel / own.parameters
        edges, tensors = share * own.edges, chunks * own.tensors
        experts = len(units.experts[index])
        product = 2.0 * tokens * numel
        spared = 0.0 if passed_by else 2.0 * tokens * max(t.numel for t in layer.tensors)
        moved = tokens * edges * item
        found["forward", layer.name] = seconds(
            product, forward_passes * moved, _FORWARD_OPS * tensors + _EXPERT_FORWARD_OPS * experts
        )
        found["backward", layer.name] = seconds(
            3 * product - spared,
            backward_passes * moved + _GRADIENT_BYTES * own.parameters,
            _BACKWARD_OPS * tensors + _EXPERT_BACKWARD_OPS * experts,
        )
    head = units.head.parameters
    found["head", units.head.name] = seconds(
        6.0 * tokens * head, _LOGIT_BYTES[kernels] * tokens * case.vocabulary + _GRADIENT_BYTES * head
    )
    for unit in units.begin:
        width = unit.tensors[0].shape[-1]
        found["forward", unit.name] = seconds(0, 2 * tokens * width * item)
        found["backward", unit.name] = seconds(0, 10 * tokens * width * item + _GRADIENT_BYTES * unit.numel)
    for unit in units.without_experts:  # of which alone some stay, and are updated there
        found["adamw", unit.name] = seconds(0, _UPDATE_BYTES * unit.numel)
    return Known(found)
