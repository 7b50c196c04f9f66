"""A run that need not be run: its model without memory, its plan, its script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

from tierstream.engine.config import RunConfig
from tierstream.engine.device.memory import expert_group
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.engine.plan_on import plan_on
from tierstream.engine.planner import known
from tierstream.engine.planner.known import Model
from tierstream.engine.planner.machine import Machine
from tierstream.engine.step.script import StepScript
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import BudgetError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import Layout


@dataclass(frozen=True)
class Case:
    """What is known of a run before it begins. Takes no memory on the device, no store and no weights.

    Attributes:
        units: of the model, which is on `meta`.
        vocabulary: rows of the output matrix.
        grain: pages, and experts, of the run that are one here; see `coarser`.
    """

    config: RunConfig
    units: ModelUnits
    layout: Layout
    plan: Plan
    vocabulary: int
    grain: int = 1

    @property
    def expert_group(self) -> int:
        """Experts that are computed together; a GPU is taken for one that multiplies groups."""
        slots, on_gpu = self.plan.device.expert_slots, self.config.train.device != "cpu"
        return expert_group(slots[0]) if slots is not None and on_gpu else 1

    @cached_property
    def script(self) -> StepScript:
        """Of its steps."""
        return StepScript(self.units, self.layout, self.plan, self.config.optimizer, self.config.moe)


def case_of(config: RunConfig, machine: Machine, model: Model | None = None) -> Case:
    """The run of `config` on `machine`.

    Args:
        model: that of the run, if it is known already.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once, as the run itself would say.
        ConfigError, ModelSourceError: as before the first step of the run.
    """
    units, vocabulary = model or units_of(config)
    plan, layout = plan_for(config, machine, units)
    return Case(config, units, layout, plan, vocabulary)


def units_of(config: RunConfig) -> Model:
    """Units of the model, and rows of its output matrix; from a plan before this one, where they have not
    changed since. The kernels of the run need not be here.

    Raises:
        ConfigError, ModelSourceError: as before the first step of the run.
    """
    alone = _of_units_alone(config)
    name = known.name_of(alone)
    if name is not None and (model := known.find(name)) is not None:
        return model
    from tierstream.engine.model.build import build_model  # takes seconds, for torch and transformers
    from tierstream.engine.model.carve import units_of_run

    with ExitStack() as parts:
        built, hf_config = build_model(alone, parts)
        model = units_of_run(built, alone.moe, alone.optimizer), hf_config.get_text_config().vocab_size
    if name is not None:
        known.keep(name, model)
    return model


def _of_units_alone(config: RunConfig) -> RunConfig:
    """The run without settings that its units do not depend on, so that other values of these need no other
    units.
    """
    optimizer = config.optimizer
    return replace(
        config,
        train=replace(config.train, kernels="plain", compile=False),
        moe=replace(config.moe, gpu_cache=None, idle="dense"),
        optimizer=OptimizerConfig(
            weight_decay=optimizer.weight_decay,
            weight_decay_by_name=optimizer.weight_decay_by_name,
            lr_scale_by_name=optimizer.lr_scale_by_name,
        ),
    )


def plan_for(config: RunConfig, machine: Machine, units: ModelUnits) -> tuple[Plan, Layout]:
    """The plan on a machine.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
        ConfigError: see `plan_on`.
    """
    plan, layout = plan_on(
        config, units, machine.cores, machine.host_bytes, device_in_host=machine.gpu_bytes is None
    )
    if machine.gpu_bytes is not None and plan.gpu_bytes > machine.gpu_bytes:
        raise BudgetError(
            f"buffers of {format_bytes(plan.gpu_bytes)} are needed on the GPU, and it has "
            f"{format_bytes(machine.gpu_bytes)}; lower tiers.gpu, moe.gpu_cache or train.rows_per_step",
            need_bytes=plan.gpu_bytes,
            limit_bytes=machine.gpu_bytes,
        )
    return plan, layout
