"""The bound of a step: no step can be faster than its slowest resource (docs/design.md section 6).

The rates are those of this machine (machine.py). The traffic to the drives is what no order of a step's page
uses and no policy of the cache can do without: what the DRAM cannot hold at two instants of each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tierstream.engine.device.memory import ACTIVATION_GROUP, WAITING_TENSORS
from tierstream.engine.plan import Plan
from tierstream.engine.step.script import StepScript
from tierstream.tiered.layout import ITEM_BYTES, Layout, Page, PlaneSpec
from tierstream.tiered.store import Intent


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine gives. Bytes per second unless the name says otherwise; None: not part of this run.

    Attributes:
        upload, download: between host memory and a GPU.
        device_memory: read and written, of the device that computes.
        launch_s: of one operation of torch, on the host.
        host_memory: read and written by all cores, as an update does.
        host_copy: of a copy within host memory, by one thread.
        page_s: what Python takes for the use of a page. wake_s: what a thread takes to wake up another.
    """

    flop_per_s: float
    upload: float | None
    update_parameters_per_s: float
    download: float | None = None
    device_memory: float = math.inf
    launch_s: float = 0.0
    host_memory: float = math.inf
    host_copy: float = math.inf
    page_s: float = 0.0
    wake_s: float = 0.0
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_read_mixed: float | None = None
    nvme_write_mixed: float | None = None


class DriveThroughput(Protocol):
    """What a drive gives, bytes per second: alone, and while the other direction is busy as well."""

    @property
    def read(self) -> float: ...
    @property
    def write(self) -> float: ...
    @property
    def read_mixed(self) -> float: ...
    @property
    def write_mixed(self) -> float: ...


def side_by_side(rates: Rates, drives: Sequence[tuple[DriveThroughput, float]]) -> Rates:
    """With what drives give side by side, each its share, which is the second: the one that is done last sets
    the pace.
    """
    whole = sum(share for _, share in drives)

    def together(kind: str) -> float | None:
        return min((getattr(drive, kind) * whole / share for drive, share in drives), default=None)

    return replace(
        rates,
        nvme_read=together("read"),
        nvme_write=together("write"),
        nvme_read_mixed=together("read_mixed"),
        nvme_write_mixed=together("write_mixed"),
    )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds that each resource needs for one step, and the traffic behind them."""

    seconds: dict[str, float]
    nvme_read_bytes: int
    nvme_written_bytes: int

    @property
    def step_s(self) -> float:
        return max(self.seconds.values())

    @property
    def resource(self) -> str:
        """What sets the bound."""
        return max(self.seconds, key=self.seconds.__getitem__)


#: A chain, no resource: where updates wait for the whole gradient, the last layer's forward waits for them,
#: and backward for that.
UPDATE_THEN_BACKWARD = "update + backward"
#: Page uses in order.
Uses = Sequence[tuple[Page, Intent]]


def least_traffic(uses: Uses, plan: Plan, layout: Layout) -> tuple[int, int]:
    """Bytes that a step in steady state reads from the drives, and writes to them, at least
    (docs/design.md section 6 proves it).

    Args:
        uses: page uses of a step (`StepScript.steady_uses`).
    """
    turn = next((at for at, use in enumerate(uses) if _in_backward(use)), len(uses))
    first, then = list(uses[:turn]), list(uses[turn:])
    if all(intent is not Intent.UPDATE for _, intent in first):
        first, then = then, first  # updates may begin in backward, and are finished at the next turn
    begins, goes_on = _wanted(first + then), _first(then)
    between = {page for page, intent in first if intent is not Intent.UPDATE}.intersection(goes_on)
    needed = (_read(begins), _read({page: goes_on[page] for page in between}))
    made = (_made(first + then), _made(then + first))
    reads, writes = ([_beyond(pages, plan, layout) for pages in each] for each in (needed, made))
    return sum(reads), max(writes)


def _in_backward(use: tuple[Page, Intent]) -> bool:
    page, intent = use
    return (page.plane, intent) in (("activation", Intent.CONSUME), ("grad", Intent.OVERWRITE))


def _first(uses: Uses) -> dict[Page, Intent]:
    return dict(reversed(uses))


def _wanted(uses: Uses) -> dict[Page, Intent]:
    """Their first use; of pages that are updated later that, for it wants content in DRAM whether or not a
    buffer of the device has it meanwhile.
    """
    return _first(uses) | {page: intent for page, intent in uses if intent is Intent.UPDATE}


def _read(uses: Mapping[Page, Intent]) -> dict[Page, Intent]:
    return {page: intent for page, intent in uses.items() if intent is not Intent.OVERWRITE}


def _made(uses: Uses) -> dict[Page, Intent]:
    """Pages that got content, and have it at the end."""
    changed, last = (page for page, intent in uses if intent is not Intent.READ), dict(uses)
    return {page: Intent.UPDATE for page in changed if last[page] is not Intent.CONSUME}


def _beyond(pages: Mapping[Page, Intent], plan: Plan, layout: Layout) -> int:
    """Bytes of pages that at one instant neither the DRAM nor buffers of the device can hold."""
    device: dict[tuple[str, str], int] = {}
    memory = plan.device
    for unit, plane in {(page.unit, page.plane) for page in pages}:
        group = memory.group_of.get(unit, ACTIVATION_GROUP)
        count, size = memory.slots.get(group, memory.expert_slots or (0, 0))
        if plane == "grad":
            count, numel = memory.sums[group]
            device[plane, group] = count * numel * ITEM_BYTES[layout.spec(unit, plane).dtype]
        elif plane == "activation":
            device[plane, group] = (count + WAITING_TENSORS) * size
        elif plane == "weight" and pages[Page(unit, plane, 0)] is Intent.READ:
            device[plane, group] = count * size
    return max(0, sum(map(layout.page_nbytes, pages)) - plan.dram_bytes - sum(device.values()))


def step_bound(
    rates: Rates,
    *,
    flop: float,
    upload_bytes: int,
    parameters: int,
    read_bytes: int,
    written_bytes: int,
    host_update_bytes: int = 0,
    device_update_bytes: int = 0,
    cpu_updates: bool = True,
    after_updates_flop: float | None = None,
) -> Bound:
    """Seconds per resource for one step. Reads and writes of the drives overlap at the mixed rates, the rest
    runs alone.

    Args:
        upload_bytes: weights that must go to the device.
        host_update_bytes: what an update of all moves through host memory, wherever it is computed.
        device_update_bytes: what goes to the device to update all parameters there; 0: none is updated there.
        cpu_updates: the CPU updates as well, or alone.
        after_updates_flop: what begins only when all updates of the step are done; None: they may come any
            time.
    """
    seconds = {"compute": flop / rates.flop_per_s}
    on_cpu_s, on_device_s = parameters / rates.update_parameters_per_s, 0.0
    share = 0.0  # of the parameters that are updated on the device
    if rates.upload:
        on_device_s, upload_s = device_update_bytes / rates.upload, upload_bytes / rates.upload
        if device_update_bytes:
            # Where the CPU and the link are busy equally long, neither could take over anything.
            share = max(0.0, on_cpu_s - upload_s) / (on_cpu_s + on_device_s) if cpu_updates else 1.0
        seconds["upload"] = upload_s + share * on_device_s
    seconds["update"] = max((1 - share) * on_cpu_s, host_update_bytes / rates.host_memory)
    if after_updates_flop is not None and parameters:
        update_s = max(seconds["update"], share * on_device_s)
        seconds[UPDATE_THEN_BACKWARD] = update_s + after_updates_flop / rates.flop_per_s
    if rates.nvme_read and rates.nvme_write and rates.nvme_read_mixed and rates.nvme_write_mixed:
        together = min(read_bytes / rates.nvme_read_mixed, written_bytes / rates.nvme_write_mixed)
        alone_read = max(0.0, read_bytes - together * rates.nvme_read_mixed) / rates.nvme_read
        alone_write = max(0.0, written_bytes - together * rates.nvme_write_mixed) / rates.nvme_write
        seconds["nvme"] = together + alone_read + alone_write
    return Bound(seconds=seconds, nvme_read_bytes=read_bytes, nvme_written_bytes=written_bytes)


def plan_bound(rates: Rates, plan: Plan, layout: Layout, script: StepScript, *, on_drives: bool) -> Bound:
    """The bound of a run's step; of experts, where as many have tokens as are expected to.

    Args:
        on_drives: the state lies on drives; else DRAM holds all of it.
    """
    read_bytes, written_bytes = least_traffic(script.steady_uses(), plan, layout) if on_drives else (0, 0)
    streamed, idle = _streamed(plan, layout), script.expected_idle
    updated = [
        spec
        for spec in _updated(streamed)
        if spec.unit not in script.not_updated and not (spec.plane == "grad" and spec.unit in idle)
    ]
    uploaded = (spec for spec in streamed if spec.plane == "weight" and spec.unit not in idle)
    flop = plan.flop_per_step - plan.spared_flop
    return step_bound(
        rates,
        flop=flop,
        upload_bytes=sum(spec.nbytes for spec in uploaded),
        parameters=sum(t.numel for spec in updated if spec.plane == "weight" for t in spec.tensors),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        host_update_bytes=_through_host(updated),
        device_update_bytes=sum(spec.nbytes for spec in updated) if plan.gpu_updates else 0,
        cpu_updates=plan.cpu_updates,
        after_updates_flop=None if plan.updates_in_backward else flop - plan.forward_flop,
    )


def update_bytes(plan: Plan, layout: Layout) -> float:
    """Bytes that the update of a parameter moves through host memory, wherever it is computed: state is read
    and written, the gradient is read. 0 where nothing is updated but what stays on the device.
    """
    updated = _updated(_streamed(plan, layout))
    elements = sum(spec.numel for spec in updated if spec.plane == "weight")
    return _through_host(updated) / elements if elements else 0.0


def _streamed(plan: Plan, layout: Layout) -> list[PlaneSpec]:
    resident = set(plan.device.resident)
    return [spec for (unit, _), spec in layout.planes.items() if unit not in resident]


def _updated(planes: Sequence[PlaneSpec]) -> list[PlaneSpec]:
    """Planes of units that are trained."""
    trained = {spec.unit for spec in planes if spec.plane == "exp_avg"}
    return [spec for spec in planes if spec.unit in trained]


def _through_host(updated: Sequence[PlaneSpec]) -> int:
    return sum((2 if spec.durable else 1) * spec.nbytes for spec in updated)
