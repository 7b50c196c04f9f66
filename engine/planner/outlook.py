"""A run before it is begun: whether it fits, what it takes of each tier, how long its steps take and why, and
what would make them shorter. Works from the configuration alone: no weights, no data, no drive.

    outlook = look_ahead(RunConfig.from_file("run.yaml"), Machine.from_profile("machine.json"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from tierstream.engine.bound import Bound, Rates, plan_bound, side_by_side
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import TierPlan
from tierstream.engine.page_size import AUTO_DRAM_SHARE
from tierstream.engine.plan_tiers import dtypes_of, tier_plans
from tierstream.engine.planner.aside import aside
from tierstream.engine.planner.case import Case, units_of
from tierstream.engine.planner.coarse import PAGES_COMPARED, coarser, grain_for, in_whole_planes
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.planner.known import Model
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.needs import Peak, arenas, device_peak, disk, planes, step_local
from tierstream.engine.planner.remedies import check_fits, with_remedies
from tierstream.engine.planner.simulate import foresee
from tierstream.engine.planner.what_if import Setting
from tierstream.io.errors import BudgetError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import round_up

_GIB = 1 << 30
#: DRAM is raised by this part of what it would hold, or of what there is: a gigabyte alone may be less than a
#: page of those that are simulated.
_STATE_PART, _HOST_PART = 64, 8
#: By so much the device's memory is raised.
_GPU_GIB = 8


@dataclass(frozen=True, kw_only=True)
class Help:
    """What a change would do to a step."""

    change: str
    """What is changed, for people."""
    step_s: float
    """Seconds of a step then."""
    tokens_per_s: float
    """Tokens of a step, by its seconds."""
    gain: float
    """Tokens per second, by those without the change, less 1."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known of a run on a machine before it begins. Sizes are bytes, times seconds."""

    machine: str
    """What it was planned for."""
    parameters: int
    """Of the model."""
    frozen_parameters: int
    """Those of them that are not trained."""
    tokens_per_step: int
    """Positions of a full step, padding included."""
    page_bytes: int
    """Of a page of the store."""
    dtypes: Mapping[str, str]
    """Plane -> dtype: weight, master, moments, gradient sum."""
    tiers: tuple[TierPlan, ...]
    """From the fastest down, as the plan of the run itself has them."""
    planes: Mapping[str, Mapping[str, int]]
    """Tier -> plane or kind of buffer -> bytes, of DRAM at most; durable planes are named where they are at
    home, and of others what spills, as it is foreseen."""
    step_local: Mapping[str, int]
    """Plane -> bytes that each step makes and uses up, which are never all there at once."""
    device: Peak
    """Device memory at its peak."""
    device_bytes: int | None
    """Memory of the GPU; None: the device is the CPU."""
    dram_bytes: int
    """Arenas in host memory: pages, and copies for checkpoints; with the device's buffers where that is the
    CPU. Python and CUDA take some GB beside it."""
    host_bytes: int
    """Host memory that the run may use."""
    disk: Mapping[str, int]
    """store, checkpoint, checkpoints -> bytes of the state on the drives, of one checkpoint, and of all that
    stand side by side."""
    bound_s: Mapping[str, float]
    """Seconds that each resource needs for one step: none is faster than the largest."""
    traffic: Mapping[str, int]
    """Link -> bytes of a step: upload, download, nvme read, nvme write."""
    step_s: float
    """Seconds of a step, predicted."""
    tokens_per_s: float
    """Likewise."""
    tflop_per_s_6pt: float
    """Forward and backward; attention is not counted."""
    tflop_per_s_8pt: float
    """With the recompute."""
    resource: str
    """What is busy longest in a step: it sets the pace."""
    busy_s: Mapping[str, float]
    """Resource -> seconds at work in a step."""
    idle_s: Mapping[str, float]
    """Cause -> seconds that the device waits for it in a step."""
    helps: tuple[Help, ...]
    """What would make steps faster, the best first."""
    days_per_billion_tokens: float
    """Days that a billion tokens take."""
    cost_per_billion_tokens: float | None
    """Their price; None: no price per hour was given."""
    steps: int | None
    """Of the run; None: as many as its data give."""
    days: float | None
    """That these steps take."""
    grain: int
    """Pages, and experts, of the run that were simulated as one; 1: each for itself."""


@dataclass(frozen=True)
class Ahead:
    """An outlook with what a picture of it needs.

    Attributes:
        forecast: of a step, with its spans.
    """

    outlook: Outlook
    forecast: Forecast = field(repr=False)


def look_ahead(
    config: RunConfig,
    machine: Machine,
    *,
    price_per_hour: float | None = None,
    compare: bool = True,
    show: Callable[[Ahead], object] | None = None,
) -> Ahead:
    """What a run on a machine comes to.

    Args:
        price_per_hour: of the machine.
        compare: find out what would help, by simulating that too.
        show: is given all but that, as soon as it is known.

    Raises:
        BudgetError: it cannot fit; says how many bytes are missing, and what would do.
        ConfigError, ModelSourceError: as before the first step of the run.
    """
    model, setting = units_of(config), Setting(config, machine)
    try:
        case = check_fits(setting, model)
    except BudgetError as error:
        raise with_remedies(error, setting, model) from error
    grain = grain_for(case)
    with _compared(case, setting, model, grain) if compare else nullcontext() as helps:
        forecast = foresee(case, machine, grain)
        ahead = _ahead(case, machine, forecast, grain, price_per_hour)
        if show is not None:
            show(ahead)
        found = () if helps is None else helps(forecast)
    return replace(ahead, outlook=replace(ahead.outlook, helps=found))


def _ahead(
    case: Case, machine: Machine, forecast: Forecast, grain: int, price_per_hour: float | None
) -> Ahead:
    """Without what would help."""
    bound = step_bound(case, machine)
    if grain > 1:
        forecast = _no_faster(forecast, max(bound.seconds.values()))
    flop = case.plan.flop_per_step
    days, steps = 1e9 / forecast.tokens_per_s / 86400, case.config.train.steps
    outlook = Outlook(
        machine=machine.name,
        parameters=case.plan.parameters,
        frozen_parameters=case.plan.frozen_parameters,
        tokens_per_step=case.plan.tokens_per_step,
        page_bytes=case.plan.page_bytes,
        dtypes=dtypes_of(case.layout),
        tiers=tier_plans(case.config, case.units, case.plan),
        planes=planes(case, forecast),
        step_local=step_local(case),
        device=device_peak(case),
        device_bytes=machine.gpu_bytes,
        dram_bytes=arenas(case, device_in_host=machine.gpu_bytes is None),
        host_bytes=machine.host_bytes,
        disk=disk(case),
        bound_s=bound.seconds,
        traffic=forecast.nbytes,
        step_s=forecast.step_s,
        tokens_per_s=forecast.tokens_per_s,
        tflop_per_s_6pt=0.75 * flop / forecast.step_s / 1e12,
        tflop_per_s_8pt=flop / forecast.step_s / 1e12,
        resource=forecast.resource,
        busy_s=forecast.busy_s,
        idle_s=forecast.idle_s,
        helps=(),
        days_per_billion_tokens=days,
        cost_per_billion_tokens=None if price_per_hour is None else 24 * days * price_per_hour,
        steps=steps,
        days=None if steps is None else steps * forecast.step_s / 86400,
        grain=grain,
    )
    return Ahead(outlook, forecast)


def step_bound(case: Case, machine: Machine) -> Bound:
    """The bound of a step; where there are many pages, without the padding of the last ones of planes."""
    directories, grain = case.config.tiers.nvme_dirs or [], grain_for(case)
    counted = case if grain == 1 else in_whole_planes(case, grain)
    rates = _rates(machine, directories)
    return plan_bound(rates, counted.plan, counted.layout, counted.script, on_drives=bool(directories))


def _no_faster(forecast: Forecast, bound_s: float) -> Forecast:
    """Of large pages DRAM may hold a little more than it has."""
    step_s = max(forecast.step_s, bound_s)
    return replace(forecast, step_s=step_s, tokens_per_s=forecast.tokens_per_s * forecast.step_s / step_s)


def _rates(machine: Machine, directories: Sequence[str]) -> Rates:
    """With those of the drives side by side: the one that is done last sets the pace."""
    used = machine.drives_of(directories)
    if machine.rates.nvme_read is not None or not used:
        return machine.rates
    return side_by_side(machine.rates, [(drive, drive.weight) for drive in used])


class _Change(NamedTuple):
    """What is changed, and how many times over."""

    what: str
    setting: Setting
    times: float


class _Changed(NamedTuple):
    """A change that fits, and the steps with it; None: they are as without."""

    what: str
    times: float
    tokens_per_step: int
    tokens_per_s: float | None


@contextmanager
def _compared(
    case: Case, setting: Setting, model: Model, grain: int
) -> Iterator[Callable[[Forecast], tuple[Help, ...]]]:
    """Begins to find out what would help, and yields what does the rest of that, given a step of the run:
    beside the run itself in pages as large, where there are many.
    """
    machine = setting.machine
    alike = grain_for(case, PAGES_COMPARED)
    changes, like = list(_changes(case, setting, alike)), _matters(coarser(case, alike), machine)
    # The run itself once more takes about as long as one of the changes.
    here = 0 if alike > grain else 1
    with aside(partial(_with, changes[here:], model, alike, like)) as others:

        def helps(forecast: Forecast) -> tuple[Help, ...]:
            before = foresee(case, machine, alike) if alike > grain else forecast
            changed = [*_with(changes[:here], model, alike, like), *others()]
            return _helps(forecast.tokens_per_s, before.tokens_per_s, changed)

        yield helps


def _matters(case: Case, machine: Machine) -> tuple[object, ...]:
    """What the steps of a run depend on, of all that is changed here. In the large pages of a state of which
    DRAM holds next to nothing, a little more of it is not seen.
    """
    return replace(case.plan, copy_bytes=0), machine.rates, machine.drives, machine.cores


def _with(changes: Iterable[_Change], model: Model, grain: int, like: tuple[object, ...]) -> list[_Changed]:
    found = []
    for what, setting, times in changes:
        try:
            after = check_fits(setting, model)
        except BudgetError:
            continue  # twice the tokens need not fit
        alike = _matters(coarser(after, grain), setting.machine) == like
        tokens_per_s = None if alike else foresee(after, setting.machine, grain).tokens_per_s
        found.append(_Changed(what, times, after.plan.tokens_per_step, tokens_per_s))
    return found


def _helps(tokens_per_s: float, before: float, changed: Iterable[_Changed]) -> tuple[Help, ...]:
    """Args: `before`: tokens per second without a change, in pages as large as with it."""
    found = []
    for what, times, tokens, after in changed:
        gain = 0.0 if after is None else (after / before - 1) / times
        then = (1 + gain) * tokens_per_s
        found.append(Help(change=what, step_s=tokens / then, tokens_per_s=then, gain=gain))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _changes(case: Case, setting: Setting, grain: int) -> Iterator[_Change]:
    if grain > 1:  # in pages of one size, or a part of the difference would be theirs
        setting = setting.with_config({"tiers.page": ByteSize(case.plan.page_bytes)})
    config, machine = setting.config, setting.machine
    more_rows = setting.with_config({"train.rows_per_step": 2 * config.train.rows_per_step})
    yield _Change("twice the tokens per step", more_rows, 1.0)
    if config.tiers.nvme_dirs is not None:
        more = _more_dram(case, setting)
        yield _Change("+1 GiB of DRAM", setting.with_dram(machine.host_bytes + more), more / _GIB)
        yield _Change("+1 drive", setting.with_drives(len(config.tiers.nvme_dirs) + 1), 1.0)
    if machine.gpu_bytes is not None:
        yield _more_gpu(case, setting, machine.gpu_bytes)


def _more_dram(case: Case, setting: Setting) -> int:
    """By how many bytes DRAM is raised, of which a gigabyte has its share: few, for the next ones gain less
    where little is missing, and no more than hold everything, or others would count that are not needed.
    """
    everything = case.layout.page_total * case.layout.page_bytes
    missing = everything - case.plan.dram_bytes
    if setting.config.tiers.dram is None:
        missing = math.ceil(missing / AUTO_DRAM_SHARE)
    return max(_GIB, min(missing, everything // _STATE_PART, setting.machine.host_bytes // _HOST_PART))


def _more_gpu(case: Case, setting: Setting, gpu_bytes: int) -> _Change:
    """A larger budget costs nothing for as long as the GPU has the bytes."""
    budget = round_up(setting.config.tiers.gpu or case.plan.gpu_bytes, _GIB // 8)
    taken = device_peak(case).nbytes - case.plan.gpu_bytes + budget
    more = min(_GPU_GIB, (gpu_bytes - taken) // _GIB)
    if more > 0:
        larger = ByteSize(budget + more * _GIB)
        what = f"tiers.gpu: {larger} (+{more} GiB, which the GPU has)"
        return _Change(what, setting.with_config({"tiers.gpu": larger}), 1.0)
    grown = setting.with_gpu(gpu_bytes + _GPU_GIB * _GIB, budget)
    what = f"a GPU with {format_bytes(gpu_bytes + _GPU_GIB * _GIB)}, tiers.gpu: {grown.config.tiers.gpu}"
    return _Change(what, grown, 1.0)
