"""What a run knows of itself before its first step, with the bound of a step from this machine's rates."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version

from tierstream.engine import assemble
from tierstream.engine.bound import plan_bound
from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import KnownDrive, machine_rates
from tierstream.engine.measure.machine_facts import describe_machine
from tierstream.engine.metrics import DrivePlan, PlanReport
from tierstream.engine.model.carve import TORCH_DTYPES
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.engine.plan_tiers import dtypes_of, extras_nbytes, tier_plans
from tierstream.engine.step.head import logits_nbytes
from tierstream.engine.step.runtime import Runtime
from tierstream.io.profile import MachineProfile
from tierstream.tiered.layout import Layout, Unit


def describe_plan(
    config: RunConfig,
    units: ModelUnits,
    layout: Layout,
    plan: Plan,
    runtime: Runtime,
    tier: assemble.Drives | None,
    device: Device,
    profile: MachineProfile,
    step: int,
    last_step: int,
) -> PlanReport:
    """The report of a plan.

    Args:
        tier: the drives; None where the state lives in DRAM.
        profile: rates that need not be measured.
        step: steps done. last_step: of the run.
    """
    rates = machine_rates(
        profile,
        tier.known if tier else [],
        device,
        TORCH_DTYPES[units.embed.dtype],
        assemble.update_threads(config),
    )
    bound = plan_bound(rates, plan, layout, runtime.script, on_drives=tier is not None)
    return PlanReport(
        parameters=plan.parameters,
        tokens_per_step=plan.tokens_per_step,
        first_step=step + 1,
        last_step=last_step,
        dtypes=dtypes_of(layout),
        tiers=tier_plans(config, units, plan),
        frozen_parameters=plan.frozen_parameters,
        logits_bytes=_logits_nbytes(config, plan, runtime),
        extras_bytes=extras_nbytes(units, plan),
        bound_s=bound.seconds,
        drives=tuple(_drive_plan(drive, tier) for drive in tier.known) if tier else (),
        written_bytes_per_step=bound.nvme_written_bytes,
        sample_tokens=config.sample.max_tokens if config.sample.prompts else 0,
        sample_bytes_per_token=_weights_nbytes(units, layout, plan, rows=len(config.sample.prompts or [])),
        machine=describe_machine() | {name: version(name) for name in ("transformers", "tierstream")},
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _logits_nbytes(config: RunConfig, plan: Plan, runtime: Runtime) -> int:
    """Of a chunk of the loss."""
    model = runtime.model
    tokens = min(plan.tokens_per_step, config.train.loss_chunk(model.config.vocab_size))
    return logits_nbytes(model.get_output_embeddings(), tokens, config.train.z_loss_coef)


def _weights_nbytes(units: ModelUnits, layout: Layout, plan: Plan, *, rows: int) -> int:
    """Weights that go to the device for a token of each of so many rows, at most."""

    def nbytes(unit: Unit) -> int:
        return 0 if unit.name in plan.device.resident else layout.spec(unit.name, "weight").nbytes

    total = sum(map(nbytes, units.without_experts))
    for experts, passed_by in zip(units.experts, units.passed_by, strict=True):
        if experts:
            active = len(experts) - passed_by // sum(tensor.numel for tensor in experts[0].tensors)
            total += sum(map(nbytes, experts[: rows * active]))
    return total


def _drive_plan(drive: KnownDrive, tier: assemble.Drives) -> DrivePlan:
    tuning, rates = drive.tuning, drive.rates
    return DrivePlan(
        directory=drive.directory,
        path=str(tier.paths[drive.directory]),
        threads=tuning.threads,
        task_bytes=tuning.task_bytes,
        queue_depth=tuning.queue_depth,
        share=drive.weight / sum(each.weight for each in tier.known),
        read=None if rates is None else rates.read,
        write=None if rates is None else rates.write,
        mixed=None if rates is None else rates.mixed,
    )
