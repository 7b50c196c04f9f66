"""Whether a run fits, and what would make one fit that does not: remedies that were planned themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.planner.case import Case, case_of
from tierstream.engine.planner.drive import DriveRates
from tierstream.engine.planner.known import Model
from tierstream.engine.planner.needs import device_peak
from tierstream.engine.planner.what_if import Setting
from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, round_up

#: So many are named.
_NAMED = 3
_MIB, _GIB = 1 << 20, 1 << 30
#: Memory of GPUs that there are.
_GPUS_GIB = (16, 24, 32, 48, 80, 96, 141, 192, 288)


def check_fits(setting: Setting, model: Model) -> Case:
    """The case of a run that fits.

    Raises:
        BudgetError: a tier cannot hold what it must.
        ConfigError: the machine has fewer drives than the run names, or computes elsewhere.
    """
    config, machine = setting.config, setting.machine
    _check_machine(setting)
    case = case_of(config, machine, model)
    peak = device_peak(case)
    if machine.gpu_bytes is not None and peak.nbytes > machine.gpu_bytes:
        inputs = " or tiers.gpu, or leave out tiers.activations" if peak.inputs_bytes else " or tiers.gpu"
        raise BudgetError(
            f"the GPU needs about {format_bytes(peak.nbytes)} at its peak ({peak.describe()}), and it has "
            f"{format_bytes(machine.gpu_bytes)}; lower train.rows_per_chunk, train.rows_per_step{inputs}",
            need_bytes=peak.nbytes,
            limit_bytes=machine.gpu_bytes,
        )
    return case


def _check_machine(setting: Setting) -> None:
    config, machine = setting.config, setting.machine
    wanted = len(config.tiers.nvme_dirs or [])
    if wanted > len(machine.drives):
        raise ConfigError(
            f"tiers.nvme_dirs names {wanted} drives, and the machine to plan for ({machine.name}) has "
            f"{len(machine.drives)}; name as many, or ask --what-if drives={wanted}"
        )
    if config.train.device == "cpu" and machine.gpu_bytes is not None:
        raise ConfigError(
            f"train.device is cpu, and the machine to plan for ({machine.name}) computes on its GPU; use "
            "train.device: cuda, or the profile of a machine without one"
        )
    if config.train.device != "cpu" and machine.gpu_bytes is None:
        raise ConfigError(
            f"train.device is {config.train.device}, and the machine to plan for ({machine.name}) has no "
            "GPU; use train.device: cpu, or the profile of another machine"
        )


def with_remedies(error: BudgetError, setting: Setting, model: Model) -> BudgetError:
    """The error with the cheapest remedies: settings before hardware."""
    found = list(islice(_that_fit(error, setting, model), _NAMED))
    lines = [str(error), *([] if found else ["no single change that was tried would do"])]
    if found:
        lines += ["any of these would do:", *(f"  {remedy}" for remedy in found)]
    return BudgetError("\n".join(lines))


def _that_fit(error: BudgetError, setting: Setting, model: Model) -> Iterator[str]:
    """Of each kind the first that fits."""
    for kind in _kinds(error, setting, model):
        named = (remedy for remedy, changed in kind if _fits(changed, model))
        yield from islice(named, 1)


def _fits(setting: Setting, model: Model) -> bool:
    try:
        check_fits(setting, model)
    except (BudgetError, ConfigError):
        return False
    return True


#: Remedies of one kind, the least first, each with the run as it would be.
Candidates: TypeAlias = Iterable[tuple[str, Setting]]


def _kinds(error: BudgetError, setting: Setting, model: Model) -> Iterator[Candidates]:
    """The cheapest first: budgets and what else changes no bit, then what changes the run, then hardware."""
    config, host_bytes = setting.config, setting.machine.host_bytes
    tiers, need_bytes = config.tiers, error.need_bytes or 0

    def one(key: str, value: object) -> Candidates:
        yield f"{key}: {'null' if value is None else value}", setting.with_config({key: value})

    if tiers.dram is not None and tiers.dram < need_bytes <= host_bytes:
        yield one("tiers.dram", ByteSize(min(host_bytes, -(-need_bytes // _MIB) * _MIB)))
    for key, current in (
        ("tiers.resident", tiers.resident), ("tiers.page", tiers.page), ("tiers.gpu", tiers.gpu),
        ("moe.gpu_cache", config.moe.gpu_cache), ("tiers.dram", tiers.dram),
        ("checkpoint.copy_memory", config.checkpoint.copy_memory),
    ):  # fmt: skip
        if current is not None:
            yield one(key, None)
    yield _fewer_experts(setting, model[0])
    if tiers.activations == "gpu":
        yield one("tiers.activations", "dram")
    yield _fewer_rows_at_once(setting)
    yield _drive(setting)
    if config.optimizer.grad_dtype != "bfloat16":
        yield one("optimizer.grad_dtype", "bfloat16")
    yield _fewer_rows(setting)
    yield _more_dram(setting)
    yield _larger_gpu(setting)


def _fewer_experts(setting: Setting, units: ModelUnits) -> Candidates:
    """On the device at once, so that fewer are computed together; more than now, where those were none."""
    sizes = [unit.numel * ITEM_BYTES[unit.dtype] for experts in units.experts for unit in experts]
    now = setting.config.moe.gpu_cache
    for count in (8, 4, 2, 1) if sizes else ():
        cache = ByteSize(round_up(count * max(sizes), _MIB))
        if cache != now:
            yield f"moe.gpu_cache: {cache}", setting.with_config({"moe.gpu_cache": cache})


def _fewer_rows_at_once(setting: Setting) -> Candidates:
    train = setting.config.train
    rows = train.rows_per_chunk or train.rows_per_step
    while rows > 1:
        rows //= 2
        yield f"train.rows_per_chunk: {rows}", setting.with_config({"train.rows_per_chunk": rows})


def _fewer_rows(setting: Setting) -> Candidates:
    train = setting.config.train
    rows = train.rows_per_step
    while rows > 1:
        rows //= 2
        chunk = None if train.rows_per_chunk is None else min(rows, train.rows_per_chunk)
        changes = {"train.rows_per_chunk": chunk, "train.rows_per_step": rows}
        yield f"train.rows_per_step: {rows}", setting.with_config(changes)


def _drive(setting: Setting) -> Candidates:
    if setting.config.tiers.nvme_dirs is None:
        drives = setting.machine.drives or (DriveRates.unknown("a directory on a drive"),)
        machine = replace(setting.machine, drives=drives)
        yield f"tiers.nvme_dirs: [{drives[0].directory}]", replace(setting, machine=machine).with_drives(1)


def _more_dram(setting: Setting) -> Candidates:
    sizes = (setting.machine.host_bytes * factor // 4 for factor in (5, 6, 8, 12, 16, 24, 32, 64, 128, 256))
    for size in (-(-size // _GIB) * _GIB for size in sizes):
        yield from _hardware(f"{format_bytes(size)} of host memory", setting, setting.with_dram(size), "dram")


def _larger_gpu(setting: Setting) -> Candidates:
    machine = setting.machine
    for size in (gib * _GIB for gib in _GPUS_GIB):
        if machine.gpu_bytes is not None and size > machine.gpu_bytes:
            yield from _hardware(f"a GPU with {format_bytes(size)}", setting, setting.with_gpu(size), "gpu")


def _hardware(what: str, setting: Setting, grown: Setting, tier: str) -> Candidates:
    """The run as it is on the better machine, then with the budget of the tier grown as well."""
    yield what, replace(setting, machine=grown.machine)
    if grown.config != setting.config:
        yield f"{what}, and tiers.{tier}: {getattr(grown.config.tiers, tier)}", grown
