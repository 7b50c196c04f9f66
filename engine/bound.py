"""The bound of a step: no step can be faster than its slowest resource (docs/design.md section 6).

The rates are those of this machine (machine.py). The traffic to the drives is counted by replaying the step's
own schedule against an optimal cache of as many frames as the run has (Belady, IBM Systems Journal 5(2),
1966).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierstream.engine.plan import Plan
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.store import Intent


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine gives. Bytes per second unless the name says otherwise; None: not part of this run.

    Attributes:
        upload, download: between host memory and a GPU.
        device_memory: read and written, of the device that computes.
        launch_s: of one operation of torch, on the host.
        host_copy: of a copy within host memory, by one thread.
        page_s: what Python takes for the use of a page. wake_s: what a thread takes to wake up another.
    """

    flop_per_s: float
    upload: float | None
    update_parameters_per_s: float
    download: float | None = None
    device_memory: float = math.inf
    launch_s: float = 0.0
    host_copy: float = math.inf
    page_s: float = 0.0
    wake_s: float = 0.0
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_read_mixed: float | None = None
    nvme_write_mixed: float | None = None


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


def drive_traffic(uses: Sequence[tuple[Page, Intent]], frames: int) -> tuple[int, int]:
    """Pages that an optimal cache of `frames` must read and write per step, once the cyclic schedule `uses`
    is in steady state.
    """
    length, cycles = len(uses), 3
    pages = [page for page, _ in uses]
    next_use = [0] * length
    upcoming: dict[Page, int] = {page: index + length for index, page in reversed(list(enumerate(pages)))}
    for index in range(length - 1, -1, -1):
        next_use[index] = upcoming[pages[index]] - index
        upcoming[pages[index]] = index
    resident: dict[Page, int] = {}
    dirty: set[Page] = set()
    on_drive: set[Page] = {page for page, intent in uses if intent in (Intent.READ, Intent.UPDATE)}
    furthest: list[tuple[int, Page]] = []
    reads = writes = 0
    for now in range(length * cycles):
        page, intent = uses[now % length]
        counted = now >= length * (cycles - 1)
        if page not in resident:
            if intent is not Intent.OVERWRITE and page in on_drive:
                reads += counted
            while len(resident) >= frames:
                due, victim = heapq.heappop(furthest)
                if resident.get(victim) != -due:
                    continue
                del resident[victim]
                if victim in dirty:
                    dirty.discard(victim)
                    on_drive.add(victim)
                    writes += counted
        if intent is Intent.CONSUME:
            resident.pop(page, None)
            dirty.discard(page)
            continue
        if intent is not Intent.READ:
            dirty.add(page)
        resident[page] = now + next_use[now % length]
        heapq.heappush(furthest, (-resident[page], page))
    return reads, writes


def step_bound(
    rates: Rates,
    *,
    flop: float,
    upload_bytes: int,
    parameters: int,
    read_bytes: int,
    written_bytes: int,
    device_update_bytes: int = 0,
    cpu_updates: bool = True,
) -> Bound:
    """Seconds per resource for one step. Reads and writes of the drives overlap at the mixed rates, the rest
    runs alone.

    Args:
        upload_bytes: weights that must go to the device.
        device_update_bytes: what goes to the device to update all parameters there; 0: none is updated there.
        cpu_updates: the CPU updates as well, or alone.
    """
    seconds = {"compute": flop / rates.flop_per_s}
    on_cpu_s = parameters / rates.update_parameters_per_s
    share = 0.0  # of the parameters that are updated on the device
    if rates.upload:
        on_device_s, upload_s = device_update_bytes / rates.upload, upload_bytes / rates.upload
        if device_update_bytes:
            # Where the CPU and the link are busy equally long, neither could take over anything.
            share = max(0.0, on_cpu_s - upload_s) / (on_cpu_s + on_device_s) if cpu_updates else 1.0
        seconds["upload"] = upload_s + share * on_device_s
    seconds["update"] = (1 - share) * on_cpu_s
    if rates.nvme_read and rates.nvme_write and rates.nvme_read_mixed and rates.nvme_write_mixed:
        together = min(read_bytes / rates.nvme_read_mixed, written_bytes / rates.nvme_write_mixed)
        alone_read = max(0.0, read_bytes - together * rates.nvme_read_mixed) / rates.nvme_read
        alone_write = max(0.0, written_bytes - together * rates.nvme_write_mixed) / rates.nvme_write
        seconds["nvme"] = together + alone_read + alone_write
    return Bound(seconds=seconds, nvme_read_bytes=read_bytes, nvme_written_bytes=written_bytes)


def plan_bound(
    rates: Rates, plan: Plan, layout: Layout, schedule: Sequence[tuple[Page, Intent]], *, on_drives: bool
) -> Bound:
    """The bound of a run's step.

    Args:
        schedule: page uses of a step in steady state (`Runtime.steady_schedule`).
        on_drives: the state lies on drives; else DRAM holds all of it.
    """
    reads, writes = drive_traffic(schedule, plan.dram_bytes // plan.page_bytes) if on_drives else (0, 0)
    return traffic_bound(rates, plan, layout, reads * plan.page_bytes, writes * plan.page_bytes)


def traffic_bound(rates: Rates, plan: Plan, layout: Layout, read_bytes: int, written_bytes: int) -> Bound:
    """`plan_bound`, where it is known what the drives must read and write."""
    streamed = [spec for spec in layout.planes.values() if spec.unit not in plan.device.resident]
    updated = [spec for spec in streamed if (spec.unit, "exp_avg") in layout.planes]
    return step_bound(
        rates,
        flop=plan.flop_per_step - plan.spared_flop,
        upload_bytes=sum(spec.nbytes for spec in streamed if spec.plane == "weight"),
        parameters=sum(t.numel for spec in updated if spec.plane == "weight" for t in spec.tensors),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        device_update_bytes=sum(spec.nbytes for spec in updated) if plan.gpu_updates else 0,
        cpu_updates=plan.cpu_updates,
    )
