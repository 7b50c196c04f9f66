"""A store that is filled with first values, and what interrupts that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from support.stores import drives_in

from tierstream.engine import assemble, config_file
from tierstream.engine.config import RunConfig
from tierstream.engine.data.progress import Progress
from tierstream.engine.device.device import Device
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.model.units import build_layout
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.weights import fill
from tierstream.engine.weights.fill import FirstValues
from tierstream.io.posix import PosixBackend
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.store import Store
from tierstream.tiered.zarrdir import ZarrDirectory

Planes = dict[tuple[str, str], bytes]


class Heard(Callback):
    """Remembers what it is told."""

    def __init__(self, on_progress: Callable[[Progress], object] = lambda progress: None) -> None:
        self.told: list[Progress] = []
        self.events: list[str] = []
        self._on_progress = on_progress

    def on_progress(self, progress: Progress) -> None:
        self.told.append(progress)
        self._on_progress(progress)

    def on_event(self, text: str) -> None:
        self.events.append(text)


class Filling:
    """What a run has when its state is filled: on drives, or in DRAM if there are none."""

    def __init__(self, config: RunConfig, snapshot: Snapshot | None = None) -> None:
        model, _ = build_meta_model(config.model)
        self.units = find_units(model)
        self.layout = build_layout(
            self.units, page_bytes=int(config.tiers.page or 8192), master="split", grad_dtype="float32",
            boundary_nbytes=None,
        )  # fmt: skip
        weights = assemble.plan_weights(config, model)
        self._values = FirstValues(config, model, self.units, snapshot, weights)
        self._drives = [Path(name) for name in config.tiers.nvme_dirs or []]
        self.store: Store

    def fill(self, heard: Heard) -> Planes:
        """All durable planes."""
        with ExitStack() as parts:
            directory = None
            if self._drives:
                backend = PosixBackend(threads=2)
                parts.callback(backend.close)
                directory = ZarrDirectory.create(
                    drives_in(self._drives, backend), self.layout, {}, values=self._values.identity
                )
            store = Store(
                self.layout,
                dram_bytes=8 << 20,
                directory=directory,
                stored=directory.filled.pages if directory else (),
                prefetch_bytes=0,
                writeback_bytes=1 << 20,
            )
            self.store = parts.enter_context(store)
            self._values.fill(self.layout, store, Device("cpu"), directory, heard)
            return self._planes(store)

    def _planes(self, store: Store) -> Planes:
        found = {}
        for (unit, plane), spec in self.layout.planes.items():
            if spec.durable:
                out = np.empty(spec.numel, {2: np.uint16, 4: np.float32}[spec.item_bytes])
                store.read_range(unit, plane, 0, out)
                found[unit, plane] = out.tobytes()
        return found


class Interrupted(Exception):
    pass


def interrupt(config: RunConfig, share: float) -> None:
    """Fill the store of a run until this share is done."""

    def stop(progress: Progress) -> None:
        if progress.done >= share * (progress.total or 0):
            raise Interrupted

    try:
        Filling(config).fill(Heard(stop))
    except Interrupted:
        return
    raise AssertionError("it was not interrupted")


def fill_and_be_killed(path: str, share: float) -> None:
    """As `interrupt`, by SIGKILL, in a process of its own; every layer is recorded."""

    def kill(progress: Progress) -> None:
        if progress.done >= share * (progress.total or 0):
            os.kill(os.getpid(), signal.SIGKILL)

    fill.PORTION_BYTES = 1
    Filling(config_file.load(RunConfig, Path(path))).fill(Heard(kill))
