"""Puts a run's parts together: the drives, the store, and the runtime over it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstream.engine import checkpoint
from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import KnownDrive
from tierstream.engine.metrics import DriveTotals
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import STATE_FOLDER, Plan
from tierstream.engine.plan_on import plan_on
from tierstream.engine.step.runtime import Runtime
from tierstream.engine.trace.trace import Trace, TracedDirectory
from tierstream.engine.weights import source
from tierstream.io import drives, memory
from tierstream.io.backend import Backend, TransferPath, open_backend
from tierstream.io.errors import ConfigError
from tierstream.io.spread import Root, Spread
from tierstream.io.throttle import ThrottledBackend
from tierstream.tiered.filled import Identity
from tierstream.tiered.layout import Layout
from tierstream.tiered.store import Directory, Store
from tierstream.tiered.zarrdir import ZarrDirectory


@dataclass(frozen=True)
class Drives:
    """The NVMe tier of a run.

    Attributes:
        known: how each directory is worked on, and what its drive gives.
        paths: directory -> the way that its bytes take.
    """

    directory: ZarrDirectory
    known: list[KnownDrive]
    paths: dict[str, TransferPath]
    backends: list[Backend]
    opened: ExitStack

    def totals(self) -> dict[str, DriveTotals]:
        """Directory -> what was moved there so far."""
        moved = self.directory.traffic().values()
        return {
            drive.directory: DriveTotals(
                path=str(self.paths[drive.directory]),
                bytes_read=traffic.bytes_read,
                bytes_written=traffic.bytes_written,
                bytes_checked=traffic.bytes_checked,
                bytes_buffered=backend.counts().bytes_buffered,
            )
            for drive, traffic, backend in zip(self.known, moved, self.backends, strict=True)
        }

    def close(self) -> None:
        self.opened.close()


def plan_run(config: RunConfig, units: ModelUnits, device: Device) -> tuple[Plan, Layout]:
    """`make_plan` for this run, on what memory is free now.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
        ConfigError: see `plan_on`.
    """
    available_bytes = memory.memory_budget().available_bytes
    return plan_on(config, units, torch.get_num_threads(), available_bytes, device_in_host=not device.is_cuda)


def check_paths(config: RunConfig) -> dict[str, TransferPath]:
    """Directory of `tiers.nvme_dirs` -> the way between its files and host memory, found by trying it.

    Raises:
        StorageError: a directory is missing, or cannot be written or read.
        ConfigError: it is not the way that `tiers.require_path` demands.
    """
    if config.tiers.nvme_dirs is None:
        return {}
    required = config.tiers.require_path
    backend = open_backend(config.tiers.backend, threads=1)
    try:
        taken = {name: backend.transfer_path(name) for name in config.tiers.nvme_dirs}
    finally:
        backend.close()
    for name, path in taken.items():
        if required is not None and path.name != required:
            raise ConfigError(
                f"tiers.require_path is {required}, but bytes of {name} take the way {path}: name another "
                "directory or backend, or leave tiers.require_path out"
            )
    return taken


def check_space(config: RunConfig, plan: Plan, run_dir: Path) -> None:
    """Refuse a run whose files cannot fit, before anything is written.

    Needs of folders on one file system are added: the state and what may spill on the drives, and the
    checkpoints that stand side by side in the run directory, without those that are there already. The state
    of a run that ended makes place, or stays as a part of this one.

    Raises:
        StorageError: names the directory, the bytes needed and the bytes free.
    """
    folder, most = run_dir / "checkpoints", config.checkpoint.most_at_once
    saves = max(most - len(checkpoint.checkpoints(folder)), min(most, 1))
    checkpoints = (os.path.abspath(folder if folder.is_dir() else run_dir), saves * plan.durable_bytes)
    roots = [os.path.realpath(name) for name in config.tiers.nvme_dirs or []]
    state_bytes = plan.durable_bytes + plan.spill_bytes
    held = [drives.held_bytes(os.path.join(root, STATE_FOLDER)) for root in roots]
    if len(roots) < 2:
        drives.check_directories(
            [*((root, max(0, state_bytes - old)) for root, old in zip(roots, held, strict=True)), checkpoints]
        )
        return
    # Several drives share the state by their speed, and by their space where that is short.
    *infos, own = drives.check_directories([*((root, 0) for root in roots), checkpoints])
    Spread(
        [
            Root(
                directory=info.path,
                weight=1.0,
                capacity_bytes=info.free_bytes
                + sum(old for other, old in zip(infos, held, strict=True) if other.device == info.device)
                - (checkpoints[1] if info.device == own.device else 0),
                volume=info.device,
            )
            for info in infos
        ],
        ((index, plan.page_bytes) for index in range(-(-state_bytes // plan.page_bytes))),
    )


def open_drives(
    config: RunConfig,
    layout: Layout,
    attributes: dict[str, object],
    known: list[KnownDrive],
    paths: dict[str, TransferPath],
    values: Identity | None = None,
) -> Drives | None:
    """Create the state's files on the drives; None where the state lives in DRAM.

    Args:
        known: of `tiers.nvme_dirs`, in order. paths: as `check_paths` found them.
        values: what the first values follow from; see `ZarrDirectory.create`.

    Raises:
        StorageError: a directory is missing, full, not writable, or in use by another run.
    """
    if not known:
        return None
    limits = config.tiers.throttle.limits
    with ExitStack() as opened:
        parts, backends = [], []
        for drive in known:
            backend = drive.tuning.open_backend(config.tiers.backend)
            if limits is not None:
                backend = ThrottledBackend(backend, limits)
            opened.callback(backend.close)
            backends.append(backend)
            root = os.path.join(drive.directory, STATE_FOLDER)
            parts.append(drives.Drive(root, backend, drive.weight))
        directory = ZarrDirectory.create(
            parts, layout, attributes, readback=config.tiers.readback, values=values
        )
        opened.callback(directory.close)
        return Drives(directory, known, paths, backends, opened.pop_all())


def build_store(
    config: RunConfig,
    layout: Layout,
    plan: Plan,
    tier: Drives | None,
    device: Device,
    debug: bool,
    trace: Trace | None = None,
) -> Store:
    """The store, with its DRAM pinned where the device is a GPU, and its drives followed by `trace`."""
    register, unregister = device.pinning()
    directory: Directory | None = tier.directory if tier else None
    if directory is not None and trace is not None:
        directory = TracedDirectory(directory, trace)
    return Store(
        layout,
        dram_bytes=plan.dram_bytes,
        directory=directory,
        stored=tier.directory.filled.pages if tier else (),
        policy=plan.policy,
        prefetch_bytes=plan.prefetch_bytes,
        writeback_bytes=plan.writeback_bytes,
        copy_bytes=plan.copy_bytes,
        register=register,
        unregister=unregister,
        debug=debug,
    )


def plan_weights(config: RunConfig, model: Any) -> source.LoadPlan | None:
    """Where the weights of `model.path` lie, by its headers alone; None: the run starts from random ones.

    Raises:
        ModelSourceError: a shard or tensor that is missing, cut off, or of another shape.
    """
    if config.model.path is None:
        return None
    return source.plan_source(model, config.model)


def build_runtime(
    config: RunConfig,
    model: Any,
    units: ModelUnits,
    layout: Layout,
    plan: Plan,
    store: Store,
    device: Device,
    *,
    total_updates: int,
    applied_updates: int = 0,
    trace: Trace | None = None,
) -> Runtime:
    return Runtime(
        model,
        units,
        layout,
        plan,
        store,
        device,
        config.optimizer,
        config.moe,
        rows_per_chunk=config.train.rows_per_chunk or config.train.rows_per_step,
        loss_chunk_tokens=config.train.loss_chunk(model.config.vocab_size),
        z_loss_coef=config.train.z_loss_coef,
        total_updates=total_updates,
        applied_updates=applied_updates,
        threads=update_threads(config),
        trace=trace,
    )


def update_threads(config: RunConfig) -> int:
    """CPU threads of the update, on this machine."""
    return config.optimizer.threads_of(torch.get_num_threads())


def set_determinism(config: RunConfig) -> None:
    """Deterministic kernels, as torch documents them; must run before the first CUDA call."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)
    # Else every new tensor is first filled with NaN: a kernel and a pass over memory for each operation.
    torch.utils.deterministic.fill_uninitialized_memory = config.train.debug  # type: ignore[attr-defined]
