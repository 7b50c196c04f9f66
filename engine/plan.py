"""Sizes of everything, decided before step 0: page size, frames, device buffers, bytes per tier and per step.

What can be known to be impossible is refused here, with the numbers and the remedy.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.device.memory import IN_FLIGHT_PAGES, DeviceMemory, divide, rounds_gradients
from tierstream.engine.page_size import AUTO_DRAM_SHARE, paged
from tierstream.engine.update.granules import DEVICE_GRANULES, device_granule_nbytes
from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.sizes import format_bytes
from tierstream.io.throttle import Limits
from tierstream.tiered.capture import READS_AHEAD
from tierstream.tiered.layout import ITEM_BYTES, PAGE_ALIGN_BYTES, Layout

if TYPE_CHECKING:
    from tierstream.engine.model.units import ModelUnits
    from tierstream.engine.update.optimizer import OptimizerConfig

#: Folder that a run makes in each of `tiers.nvme_dirs`; nothing else there is touched.
STATE_FOLDER = "tierstream-state"
#: Fewest frames with which all go on: an update granule (9 pages in the widest mode; workers take turns where
#: frames are few), 4 pages on their way up, 4 on their way down, and some to read ahead and to write back.
_FRAMES_MIN = 24
#: Write-backs on their way to a drive at once: what its threads have in hand (16 calls of 4 MiB), or so many
#: pages that it need not wait until the next is asked for.
_WRITEBACK_BYTES, _WRITEBACK_PAGES = 64 << 20, 4
#: Share of what is then still free for copies of pages that change while a checkpoint is written.
_AUTO_COPY_SHARE = 0.25


@dataclass(kw_only=True, slots=True)
class ThrottleConfig:
    """How the run would be on slower drives: each of `nvme_dirs` gives no more than this, as if it were a
    drive of its own.
    """

    read: ByteSize | None = None
    """Bytes read per second; null: no limit."""
    write: ByteSize | None = None
    """Bytes written per second; null: no limit."""
    total: ByteSize | None = None
    """Bytes read and written per second, both together; null: no limit."""
    latency_s: float = 0.0
    """Seconds that a request takes beside the time of its bytes."""

    def __post_init__(self) -> None:
        for key in ("read", "write", "total"):
            if getattr(self, key) == 0:
                raise ConfigError(
                    f"tiers.throttle.{key} is 0, so nothing would ever move; give bytes per second"
                )
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"tiers.throttle.latency_s is {self.latency_s}; it must be a number >= 0")

    @property
    def limits(self) -> Limits | None:
        """None: drives are as they are."""
        given = {key: float(value) for key in ("read", "write", "total") if (value := getattr(self, key))}
        return Limits(**given, latency_s=self.latency_s) if given or self.latency_s else None


@dataclass(kw_only=True, slots=True)
class TiersConfig:
    """Byte budgets of the three tiers and how they are used."""

    gpu: ByteSize | None = None
    """Device memory for streamed weights, gradient sums, staged activations and pages that pass through
    (without the work space of kernels); null: two layers. In a larger budget the first units stay on the
    device with all of their state, as many as fit: nothing of them moves."""
    dram: ByteSize | None = None
    """Host memory that caches the model's state; null: all of the state, or 70 % of what is free."""
    nvme_dirs: list[str] | None = None
    """Directories, one per drive, that hold the state; null: the state lives in DRAM. Contents of a dead run
    are replaced.
    """
    resident: int | None = None
    """Units that stay on the device with all of their state, the first in forward order, and the rest of
    `gpu` are slots for layers; null: chosen if there is a `profile`, else as many as `gpu` holds."""
    policy: Literal["lookahead", "lru"] | None = None
    """What leaves DRAM first: the page whose next scheduled use is furthest (Belady; gradients and boundaries
    after the others), or the least recently used; null: chosen if there is a `profile`, else lookahead."""
    prefetch: ByteSize | None = None
    """How far the reads run ahead of the computation; 0: no prefetch; null: chosen if there is a `profile`,
    else a sixteenth of `dram`, at least 16 pages, at most a quarter."""
    writeback: ByteSize | None = None
    """Bytes of dirty pages on their way to the drives at once; null: chosen if there is a `profile`, else
    64 MiB a drive, at least 4 pages, at most an eighth of `dram`."""
    page: ByteSize | None = None
    """Size of a page, a multiple of 4096 bytes; null: up to 64 MiB, a whole fraction of a layer or expert."""
    activations: Literal["dram", "gpu"] | None = None
    """Where the inputs of the layers wait for backward: in the store (DRAM, spilling to NVMe), or on the
    device, beside `gpu`; null: chosen, within `gpu`, if there is a `profile`, else dram."""
    backend: Literal["auto", "posix", "kvikio"] = "auto"
    """What moves bytes to and from the drives; auto: kvikio where CUDA is, else posix (O_DIRECT)."""
    io_threads: int | None = None
    """Threads that read and write each drive; null: what the machine profile found best, or 16."""
    profile: str | None = None
    """Machine profile of `tierstream bench --profile`: tunes the drives, spares measuring at the start, and
    lets the planner choose what is open; null: what is needed is measured then, and nothing chosen."""
    require_path: Literal["posix-direct", "kvikio-compat", "gds"] | None = None
    """Refuse to start unless the bytes of every drive really take this way. "gds" is never granted today:
    pages go through host memory, where the optimizer runs.
    """
    readback: Literal["off", "sampled", "full"] = "sampled"
    """Compare what the drives give back with checksums of what was written: never, of one write of a page in
    eight, or of every page. A page that came back wrong ends the run before anything is computed with it. Per
    GB read or written, "full" takes 0.11 s of a core and "sampled" 0.014 s, in the threads that move the
    bytes: at 5 GB/s half a core, or 7 % of one.
    """
    throttle: ThrottleConfig = field(default_factory=ThrottleConfig)

    def __post_init__(self) -> None:
        names = self.nvme_dirs
        if names is not None and not (
            names and all(names) and len(set(map(os.path.abspath, names))) == len(names)
        ):
            raise ConfigError(
                f"tiers.nvme_dirs is {self.nvme_dirs}; name each directory once, or null for none"
            )
        if self.require_path is not None and self.nvme_dirs is None:
            raise ConfigError(
                f"tiers.require_path is {self.require_path}, but no drive is named; name some in "
                "tiers.nvme_dirs, or leave it out"
            )
        if self.throttle.limits is not None and self.nvme_dirs is None:
            raise ConfigError(
                "tiers.throttle is set, but no drive is named; name some in tiers.nvme_dirs, or leave it out"
            )
        if self.resident is not None and self.resident < 0:
            raise ConfigError(f"tiers.resident is {self.resident}; it must be >= 0")
        if self.page is not None and (self.page <= 0 or self.page % PAGE_ALIGN_BYTES):
            raise ConfigError(
                f"tiers.page is {int(self.page)} bytes; it must be a positive multiple of {PAGE_ALIGN_BYTES}"
            )
        if self.io_threads is not None and self.io_threads < 1:
            raise ConfigError(f"tiers.io_threads is {self.io_threads}; it must be >= 1")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run, all in bytes unless the name says otherwise."""

    parameters: int
    frozen_parameters: int
    """Those of them that are not trained."""
    tokens_per_step: int
    page_bytes: int
    dram_bytes: int
    copy_bytes: int
    """Host memory beside it, for pages that change while a checkpoint is written."""
    durable_bytes: int
    step_local_bytes: int
    policy: Literal["lookahead", "lru"]
    prefetch_bytes: int
    writeback_bytes: int
    device: DeviceMemory
    boundary_nbytes: int | None
    flop_per_step: float
    spared_flop: float
    """Most of `flop_per_step` that the recompute can leave out (engine/step/recompute.py)."""
    forward_flop: float
    """What of `flop_per_step` comes before backward."""
    cpu_updates: bool
    gpu_updates: bool
    updates_in_backward: bool
    """Else all updates of a step come after its backward: in the next forward."""

    @property
    def gpu_bytes(self) -> int:
        """Persistent buffers on the device."""
        return self.device.nbytes

    @property
    def spill_bytes(self) -> int:
        """Most bytes of files of step-local planes: in each step other pages may go there, and files stay."""
        fits = self.dram_bytes >= self.durable_bytes + self.step_local_bytes
        return 0 if fits else self.step_local_bytes


def size_dram(config: TiersConfig, layout: Layout, free: int) -> int:
    """Bytes of the DRAM tier: the budget, or what is best, never more than the state needs; whole pages.

    Args:
        free: bytes of host memory that may still be used, less the buffers of a device that is the CPU.
    """
    page, free = layout.page_bytes, max(free, 0)
    or_page = "" if config.page is None else f", or lower tiers.page ({format_bytes(page)})"
    everything = layout.page_total * page
    if config.dram is None:
        budget = everything if everything <= AUTO_DRAM_SHARE * free else int(AUTO_DRAM_SHARE * free)
    else:
        budget = int(config.dram)
    if config.nvme_dirs is None and min(budget, free) < everything:
        raise _without_drives(config, everything, budget, free, or_page)
    if min(budget, everything) > free:
        taken = "" if budget <= everything else f", of which the state takes {format_bytes(everything)}"
        raise BudgetError(
            f"tiers.dram is {format_bytes(budget)}{taken}, but only {format_bytes(free)} of host memory are "
            f"free (least of machine and cgroup limits, minus use); lower tiers.dram{or_page}",
            need_bytes=min(budget, everything), limit_bytes=free,
        )  # fmt: skip
    pages, least = min(budget, everything) // page, _FRAMES_MIN * page
    if config.nvme_dirs is not None and pages * page < min(least, everything):
        raise BudgetError(
            f"tiers.dram is {format_bytes(config.dram or budget)}: {pages} pages of {format_bytes(page)}, "
            f"and at least {_FRAMES_MIN} are needed; raise tiers.dram to {ByteSize(least)}{or_page}",
            need_bytes=least, limit_bytes=pages * page, key="tiers.dram",
        )  # fmt: skip
    return pages * page


def _without_drives(
    config: TiersConfig, everything: int, budget: int, free: int, or_page: str
) -> BudgetError:
    """What to say where DRAM must hold everything and cannot. `budget`: of DRAM, else as in `size_dram`."""
    given = "host memory" if config.dram is None else "tiers.dram"
    holds = f"{given} holds {format_bytes(budget)}"
    if budget > free:
        memory = f"{format_bytes(free)} of host memory are free"
        holds = f"only {memory} (least of machine and cgroup limits, minus use)"
    lower = " and lower tiers.dram" if budget > free else ""
    or_raise = ", or raise tiers.dram" if everything <= free else ""
    return BudgetError(
        f"the state needs {format_bytes(everything)} where no drive holds it, and {holds}; put it on drives "
        f"in tiers.nvme_dirs{lower}{or_raise}{or_page}",
        need_bytes=everything, limit_bytes=min(budget, free), key="tiers.dram",
    )  # fmt: skip


def size_copies(wanted: int | None, config: TiersConfig, layout: Layout, spare_bytes: int) -> int:
    """Bytes for copies of pages that change while a checkpoint is written; whole pages, never more than all
    that is durable. Pages that are on drives pass through them as well, so then there are some.

    Args:
        wanted: `checkpoint.copy_memory`.
        spare_bytes: host memory that is free beside the DRAM tier.

    Raises:
        BudgetError: more is wanted than is free.
    """
    page = layout.page_bytes
    if wanted is not None and wanted > spare_bytes:
        raise BudgetError(
            f"checkpoint.copy_memory is {format_bytes(wanted)}, but only {format_bytes(max(spare_bytes, 0))} "
            "of host memory are free beside the DRAM tier; lower it, or tiers.dram",
            need_bytes=wanted, limit_bytes=max(spare_bytes, 0),
        )  # fmt: skip
    most = sum(count * -(-nbytes // page) for (nbytes, durable), count in layout.sizes.items() if durable)
    budget = max(0, int(_AUTO_COPY_SHARE * spare_bytes)) if wanted is None else wanted
    return page * min(most, max(budget // page, READS_AHEAD if config.nvme_dirs else 0))


def spared_flop(units: ModelUnits, tokens: int) -> float:
    """FLOP of `flop_per_token` that no step needs: the head's recompute, and that of a product with the
    largest matrix of each dense layer, for which one ends it is not known beforehand.
    """
    recomputed = range(units.backward_from, len(units.layers))
    dense = (units.of_layer(index) for index in recomputed if not units.passed_by[index])
    largest = sum(max(t.numel for unit in own for t in unit.tensors) for own in dense)
    return 2.0 * tokens * (units.head.parameters + largest)


def make_plan(
    tiers: TiersConfig,
    optimizer: OptimizerConfig,
    units: ModelUnits,
    *,
    rows: int,
    seq_len: int,
    device_in_host: bool,
    update_threads: int,
    available_bytes: int,
    expert_nbytes: int | None = None,
    copy_memory: int | None = 0,
) -> tuple[Plan, Layout]:
    """Plan of a run and the layout of its planes.

    Args:
        rows, seq_len: tokens of a step. device_in_host: the device is the CPU, its buffers take host memory.
        update_threads: CPU threads of the update. available_bytes: host memory that may still be used.
        expert_nbytes: device memory for weights of experts; None: a few. copy_memory: see `size_copies`.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
    """
    tokens = rows * seq_len
    boundary = tokens * units.anatomy.boundary_width * ITEM_BYTES[units.embed.dtype]
    boundary_nbytes = None if tiers.activations == "gpu" else boundary
    on_device = optimizer.updates_on_device(device_in_host=device_in_host, threads=update_threads)
    layout, memory = _placed(
        units, tiers, optimizer, boundary_nbytes=boundary_nbytes, expert_nbytes=expert_nbytes,
        available_bytes=available_bytes, on_device=on_device,
    )  # fmt: skip
    free = available_bytes - (memory.nbytes if device_in_host else 0)
    dram = size_dram(tiers, layout, free)
    plan = Plan(
        parameters=units.numel,
        frozen_parameters=units.frozen,
        tokens_per_step=tokens,
        page_bytes=layout.page_bytes,
        dram_bytes=dram,
        copy_bytes=size_copies(copy_memory, tiers, layout, free - dram),
        durable_bytes=layout.nbytes(durable=True),
        step_local_bytes=layout.nbytes(durable=False),
        policy=tiers.policy or "lookahead",
        prefetch_bytes=_ahead(tiers, dram, layout.page_bytes),
        writeback_bytes=size_writeback(tiers, dram, layout.page_bytes),
        device=memory,
        boundary_nbytes=boundary_nbytes,
        flop_per_step=float(units.flop_per_token * tokens),
        spared_flop=spared_flop(units, tokens),
        forward_flop=float(units.forward_flop_per_token * tokens),
        cpu_updates=optimizer.placement != "gpu",
        gpu_updates=on_device,
        updates_in_backward=optimizer.updates_in_backward,
    )
    return plan, layout


def _placed(
    units: ModelUnits,
    tiers: TiersConfig,
    optimizer: OptimizerConfig,
    *,
    boundary_nbytes: int | None,
    expert_nbytes: int | None,
    available_bytes: int,
    on_device: bool,
) -> tuple[Layout, DeviceMemory]:
    """What the store holds, in pages, and the device's buffers. `on_device`: updates pass through it."""
    from tierstream.engine.model.units import build_layout

    layout_of = partial(
        build_layout, units, page_bytes=PAGE_ALIGN_BYTES, boundary_nbytes=boundary_nbytes,
        master=optimizer.master, grad_dtype=optimizer.grad_dtype,
    )  # fmt: skip
    layout = paged(units, layout_of(), tiers, available_bytes)
    memory = divide(
        units, layout, boundary_nbytes=boundary_nbytes, expert_nbytes=expert_nbytes, budget=tiers.gpu,
        stay=tiers.resident, passing_nbytes=_passing_nbytes(units, layout, on_device=on_device),
    )  # fmt: skip
    if memory.resident:
        layout = layout_of(page_bytes=layout.page_bytes, resident=memory.resident)
    return layout, memory


def _ahead(tiers: TiersConfig, dram: int, page: int) -> int:
    """How far reads run ahead: two granules, else little, for a page that comes early keeps another out."""
    return min(dram // 4, max(dram // 16, 16 * page)) if tiers.prefetch is None else int(tiers.prefetch)


def size_writeback(tiers: TiersConfig, dram: int, page: int) -> int:
    """Bytes of write-backs at once: what keeps the drives busy, for a page that waits to be written keeps
    another one out of DRAM.
    """
    if tiers.writeback is not None:
        return int(tiers.writeback)
    return min(dram // 8, max(_WRITEBACK_BYTES, _WRITEBACK_PAGES * page) * len(tiers.nvme_dirs or ()))


def _passing_nbytes(units: ModelUnits, layout: Layout, *, on_device: bool) -> int:
    """Device memory for pages that pass through. `on_device`: the planes of updates do."""
    trained = (unit for unit in units.in_forward_order if unit.trained)
    granules = DEVICE_GRANULES * device_granule_nbytes(layout, trained) if on_device else 0
    rounded = IN_FLIGHT_PAGES * layout.page_bytes if rounds_gradients(layout) else 0
    return granules + rounded
