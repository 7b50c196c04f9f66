"""What the planner may choose: values of keys that change no bit of a run, and which of them are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.engine.planner.activations import inputs_bytes
from tierstream.engine.planner.case import plan_for
from tierstream.engine.planner.machine import Machine
from tierstream.io.errors import BudgetError

#: Dotted key -> value, as in a run file.
Values = Mapping[str, Any]

#: Shares that are tried of the units that could stay, and of the device's budget for experts, in quarters.
_QUARTERS = (4, 3, 2, 1, 0)
#: Shares of the DRAM, one in so many, beside those of a run without a planner.
_PREFETCH, _WRITEBACK = (8, 4), (4, 16)
_POLICIES = ("lookahead", "lru")


@dataclass(frozen=True)
class Refused:
    """Values that do not fit, and why."""

    values: Values
    why: str


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """A run with other values of some keys."""
    changed: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = value
    return replace(
        config, **{section: replace(getattr(config, section), **own) for section, own in changed.items()}
    )


def divisions(config: RunConfig, machine: Machine, units: ModelUnits) -> Iterator[Values | Refused]:
    """Ways to divide the device's memory and the work beside it, of what the run leaves open: who updates,
    where activations wait, slots for experts, units that stay. The first is that of a run without a planner.
    """
    for values in product(_placements(config, machine), _activations(config, units), _caches(config, units)):
        chosen = {key: value for each in values for key, value in each.items()}
        try:
            plan, _ = plan_for(with_values(config, chosen), machine, units)
        except BudgetError as error:
            yield Refused(chosen, str(error))
            continue
        for resident in _residents(config, plan):
            yield chosen | resident


def store_settings(config: RunConfig, plan: Plan) -> list[Values]:
    """How the DRAM is used, of what the run leaves open; the first as without a planner."""
    tiers = config.tiers
    if tiers.nvme_dirs is None or plan.dram_bytes >= plan.durable_bytes + plan.step_local_bytes:
        return [{}]
    policies = _open("tiers.policy", tiers.policy, _POLICIES)
    prefetch, writeback = (
        _open(key, given, [ByteSize(n) for n in dict.fromkeys((own, *(plan.dram_bytes // p for p in parts)))])
        for key, given, own, parts in (
            ("tiers.prefetch", tiers.prefetch, plan.prefetch_bytes, _PREFETCH),
            ("tiers.writeback", tiers.writeback, plan.writeback_bytes, _WRITEBACK),
        )
    )
    return [dict(a | b | c) for a, b, c in product(policies, prefetch, writeback)]


def _open(key: str, given: Any, values: Sequence[Any]) -> list[dict[str, Any]]:
    return [{key: value} for value in values] if given is None else [{}]


def _placements(config: RunConfig, machine: Machine) -> list[dict[str, Any]]:
    optimizer = config.optimizer
    if optimizer.placement != "auto":
        return [{}]
    if machine.gpu_bytes is None:
        return [{"optimizer.placement": "cpu"}]
    threads = optimizer.threads_of(machine.cores)
    usual = "both" if optimizer.updates_on_device(device_in_host=False, threads=threads) else "cpu"
    places = [usual, *(place for place in ("cpu", "both", "gpu") if place != usual)]
    return [{"optimizer.placement": place} for place in places]


def _activations(config: RunConfig, units: ModelUnits) -> list[dict[str, Any]]:
    """On the device they take a part of its budget, so without one they wait in DRAM."""
    if config.tiers.activations is not None:
        return [{}]
    places: list[dict[str, Any]] = [{"tiers.activations": "dram"}]
    if config.tiers.gpu is not None:
        left = config.tiers.gpu - inputs_bytes(config, units)
        if left > 0:
            places.append({"tiers.activations": "gpu", "tiers.gpu": ByteSize(left)})
    return places


def _caches(config: RunConfig, units: ModelUnits) -> list[dict[str, Any]]:
    gpu = config.tiers.gpu
    if gpu is None or config.moe.gpu_cache is not None or not any(units.experts):
        return [{}]
    return [{}, *({"moe.gpu_cache": ByteSize(gpu * part // 4)} for part in _QUARTERS[1:-1])]


def _residents(config: RunConfig, plan: Plan) -> list[dict[str, Any]]:
    if config.tiers.resident is not None:
        return [{}]
    most = len(plan.device.resident)
    return [{"tiers.resident": count} for count in dict.fromkeys(most * part // 4 for part in _QUARTERS)]
