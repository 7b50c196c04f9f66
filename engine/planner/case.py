"""A run that need not be run: its model without memory, its plan, its script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from tierstream.engine import assemble
from tierstream.engine.config import RunConfig
from tierstream.engine.model.units import ModelUnits, units_of_run
from tierstream.engine.plan import Plan
from tierstream.engine.planner.machine import Machine
from tierstream.engine.step.script import StepScript
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

    @cached_property
    def script(self) -> StepScript:
        """Of its steps."""
        return StepScript(self.units, self.layout, self.plan, self.config.optimizer, self.config.moe)


#: Units of a model, and rows of its output matrix.
Model: TypeAlias = tuple[ModelUnits, int]


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
    """Units of the model, and rows of its output matrix. The kernels of the run need not be here.

    Raises:
        ConfigError, ModelSourceError: as before the first step of the run.
    """
    with ExitStack() as parts:
        plain = replace(config, train=replace(config.train, kernels="plain", compile=False))
        model, hf_config = assemble.build_model(plain, parts)
        units = units_of_run(model, config.moe, config.optimizer)
    return units, hf_config.get_text_config().vocab_size


def plan_for(config: RunConfig, machine: Machine, units: ModelUnits) -> tuple[Plan, Layout]:
    """The plan on a machine.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
        ConfigError: see `assemble.check_rows`.
    """
    plan, layout = assemble.plan_on(
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
