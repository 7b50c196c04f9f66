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
from tierstream.engine.planner.needs import arenas, device_peak
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
    taken = arenas(case, device_in_host=True) + peak.beside_bytes
    if machine.gpu_bytes is None and taken > machine.host_bytes:
        raise BudgetError(
            f"host memory needs about {format_bytes(taken)} at its peak "
            f"({format_bytes(taken - peak.nbytes)} for pages, {peak.describe()}), and "
            f"{format_bytes(machine.host_bytes)} of it are free; lower data.seq_len, train.rows_per_chunk, "
            "train.rows_per_step or tiers.dram",
            need_bytes=taken,
            limit_bytes=machine.host_bytes,
        )
    return case


def _check_machine(setting: Setting) -> None:
    config, machine = setting.config, setting.machine
    wanted = len(config.tiers.nvme_dirs or [])
    if wanted > len(machine.drives):
        more = f"name as many, or ask --what-if drives={wanted}"
        none = "leave it out, or use the profile of a machine with drives"
        raise ConfigError(
            f"tiers.nvme_dirs names {wanted} drives, and the machine to plan for ({machine.name}) has "
            f"{len(machine.drives)}; {more if machine.drives else none}"
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
    config, tiers = setting.config, setting.config.tiers

    def one(key: str, value: object) -> Candidates:
        yield f"{key}: {'null' if value is None else value}", setting.with_config({key: value})

    if error.key is not None and error.need_bytes is not None:
        least, host_bytes = round_up(error.need_bytes, _MIB), setting.machine.host_bytes
        sizes = {"tiers.page": error.need_bytes, "tiers.dram": min(least, host_bytes)}
        yield one(error.key, ByteSize(sizes.get(error.key, least)))
    for key, current in (
        ("tiers.resident", tiers.resident), ("tiers.page", tiers.page), ("tiers.gpu", tiers.gpu),
        ("moe.gpu_cache", config.moe.gpu_cache), ("tiers.dram", tiers.dram),
        ("checkpoint.copy_memory", config.checkpoint.copy_memory),
    ):  # fmt: skip
        if current is not None:
            yield one(key, None)
    if tiers.resident is not None and tiers.gpu is not None:
        nothing = {"tiers.resident": None, "tiers.gpu": None}
        yield [("tiers.resident: null, and tiers.gpu: null", setting.with_config(nothing))]
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
        changes, what = {"train.rows_per_step": rows}, f"train.rows_per_step: {rows}"
        if train.rows_per_chunk is not None and train.rows_per_chunk > rows:
            changes = {"train.rows_per_chunk": rows, **changes}
            what = f"train.rows_per_chunk: {rows}, and {what}"
        yield what, setting.with_config(changes)


def _drive(setting: Setting) -> Candidates:
    """One that the machine has, or one beside; then with a budget of DRAM that is no longer too large."""
    if setting.config.tiers.nvme_dirs is not None:
        return
    drives = setting.machine.drives
    what = f"tiers.nvme_dirs: [{drives[0].directory}]" if drives else "a drive, named in tiers.nvme_dirs"
    machine = replace(setting.machine, drives=drives or (DriveRates.unknown("a directory on a drive"),))
    with_one = replace(setting, machine=machine).with_drives(1)
    yield what, with_one
    if setting.config.tiers.dram is not None:
        yield f"{what}, and tiers.dram: null", with_one.with_config({"tiers.dram": None})


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
