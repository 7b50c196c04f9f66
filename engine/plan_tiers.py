"""What a plan puts into which tier, and what it takes beside its buffers. No torch."""

from __future__ import annotations

from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import TierPlan
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, Layout

_FP32_BYTES = 4


def tier_plans(config: RunConfig, units: ModelUnits, plan: Plan) -> tuple[TierPlan, ...]:
    """From the fastest down."""
    tiers = config.tiers
    found = [
        TierPlan(tier="gpu", holds=_on_device(plan, units), used_bytes=plan.gpu_bytes, limit_bytes=tiers.gpu),
        TierPlan(tier="dram", holds=_in_dram(plan), used_bytes=plan.dram_bytes, limit_bytes=tiers.dram),
    ]
    if tiers.nvme_dirs is not None:
        found.append(TierPlan(tier="nvme", holds=_on_drives(plan), used_bytes=plan.durable_bytes))
    return tuple(found)


def dtypes_of(layout: Layout) -> dict[str, str]:
    """Plane -> dtype."""
    dtypes = {p.plane: p.dtype for p in layout.planes.values() if p.plane != "activation"}
    return dtypes | {"gradient sum": "float32"}


def extras_nbytes(units: ModelUnits, plan: Plan) -> int:
    """Values and gradients."""
    return 2 * units.anatomy.extras_width * plan.tokens_per_step * ITEM_BYTES[units.embed.dtype]


def logit_nbytes(z_coef: float, fused_item_bytes: int | None) -> int:
    """Of one logit. `fused_item_bytes`: of an element of the matrix, where a kernel overwrites the logits."""
    return fused_item_bytes or (5 if z_coef else 3) * _FP32_BYTES


def _in_dram(plan: Plan) -> str:
    pages = f"{plan.dram_bytes // plan.page_bytes} pages of {plan.page_bytes} bytes"
    copies = plan.copy_bytes // plan.page_bytes
    return f"{pages}; beside them {copies} for checkpoints" if copies else pages


def _on_drives(plan: Plan) -> str:
    spilled = format_bytes(plan.spill_bytes)
    more = f"; up to {spilled} more of gradients and inputs of layers" if plan.spill_bytes else ""
    return f"state of every parameter{more}"


def _on_device(plan: Plan, units: ModelUnits) -> str:
    resident, everything = len(plan.device.resident), len(units.in_forward_order)
    streamed = f"{plan.device.layer_slots} of {len(units.layers)} layers, ends, gradient sums"
    if plan.device.expert_slots is not None:
        streamed = f"{plan.device.expert_slots[0]} of {sum(map(len, units.experts))} experts, {streamed}"
    if not resident:
        return streamed
    stays = f"all state of {resident} of {everything} units"
    return stays if resident == everything else f"{stays}; of the rest {streamed}"
