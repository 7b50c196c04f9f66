"""Carries out verdicts: AdamW over the planes of every unit, granule after granule, by CPU, GPU or both.

With clipping or the finite check, the update of a step is deferred into the next forward, in forward order,
just ahead of the uploads (docs/design.md section 5); its result is the same to the bit as an update at the
end of the step, since nothing reads a weight in between. Without both, a unit is updated during backward,
as soon as its gradient is complete; what is left then goes on in the next forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tierstream.engine.device.device import Device, Lane
from tierstream.engine.device.kernels import NUMPY_DTYPES, TORCH_DTYPES, cpu_adamw, cpu_adamw_idle
from tierstream.engine.trace.trace import Trace, Track
from tierstream.engine.update.granules import (
    DEVICE_GRANULES,
    Granule,
    UnitGranules,
    device_granule_nbytes,
    device_nbytes,
)
from tierstream.engine.update.optimizer import AdamW, Group, OptimizerConfig, Verdict, adamw_settings
from tierstream.engine.update.order import UNITS_AHEAD, Work
from tierstream.engine.update.queue import UpdateQueue
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout, Page, Unit, round_up
from tierstream.tiered.lease import Lease
from tierstream.tiered.store import Intent, Store

#: While one computes, with all threads, the other gets the next pages.
_CPU_WORKERS = (Track.UPDATER, Track.SECOND_UPDATER)


class UpdateDriver:
    """Threads that update granules; see `UpdateQueue` for their order.

    Args:
        units: those whose state is in the store, in forward order; of what is frozen there is nothing to do.
        groups: by the index that tensors have.
        threads: CPU threads of the kernel.
        gradient_pages: see `UpdateOrder`.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        units: Sequence[Unit],
        granules: UnitGranules,
        device: Device,
        config: OptimizerConfig,
        groups: Sequence[Group],
        threads: int,
        trace: Trace,
        gradient_pages: int | None,
    ) -> None:
        self._config, self._groups, self._trace = config, groups, trace
        self._granules = granules
        self.queue = UpdateQueue(granules.own, gradient_pages)
        dtypes: dict[str, dict[str, str]] = {unit.name: {} for unit in units}
        for spec in layout.planes.values():
            if spec.unit in dtypes:
                dtypes[spec.unit][spec.plane] = spec.dtype
        self._on_device: _DeviceWorker | None = None
        workers: list[tuple[Track, _Worker]] = []
        trained = [unit for unit in units if unit.trained]
        if trained and config.placement != "gpu":
            worker = _CpuWorker(store, dtypes, threads)
            workers += [(track, worker) for track in _CPU_WORKERS]
        if trained and config.updates_on_device(device_in_host=not device.is_cuda, threads=threads):
            nbytes = device_granule_nbytes(layout, trained)
            alone = config.placement == "gpu"
            self._on_device = _DeviceWorker(store, layout, dtypes, device, nbytes, last_first=not alone)
            workers.append((Track.DEVICE_UPDATER, self._on_device))
        self._threads = [
            threading.Thread(target=self._work, args=pair, name=pair[0], daemon=True) for pair in workers
        ]
        for thread in self._threads:
            thread.start()

    def work(self, unit: str, verdict: Verdict) -> Work:
        """One update of a unit, with its gradient."""
        return Work(self._granules.own[unit], (verdict,))

    def idle_work(self, unit: str, verdicts: Sequence[Verdict]) -> Work:
        """Updates of a unit whose gradient is zero in each."""
        return Work(self._granules.idle[unit], tuple(verdicts))

    def grad_pages(self) -> list[Page]:
        return [page for own in self._granules.own.values() for granule in own for page in granule.gradient]

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes that updates have moved to the device and back."""
        return (self._on_device.bytes_up, self._on_device.bytes_down) if self._on_device else (0, 0)

    def begin(self, works: Mapping[str, Work], *, unlimited: bool = False) -> None:
        """Start the update of these units. `unlimited`: do not wait for uploads."""
        self.queue.decide(works, ahead=None if unlimited else UNITS_AHEAD)

    def close(self) -> None:
        self.queue.close()
        for thread in self._threads:
            thread.join()

    def _work(self, track: Track, worker: _Worker) -> None:
        queue, trace = self.queue, self._trace
        try:
            while True:
                with trace.wait(track, "work"):
                    taken = queue.take(last_first=worker.last_first)
                if taken is None:
                    return
                granule, verdicts = taken
                settings = [
                    [adamw_settings(self._config, own, self._groups[call.group]) for own in verdicts]
                    for call in granule.calls
                ]
                worker.update(granule, settings, queue, trace, track)
        except BaseException as error:
            queue.failed(error)


#: Unit -> plane -> name of its dtype.
_Dtypes = Mapping[str, Mapping[str, str]]
#: For each call of a granule those of its updates, one after another.
_Settings = Sequence[Sequence[AdamW]]


def _translated(dtypes: _Dtypes, to: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {unit: {plane: to[name] for plane, name in own.items()} for unit, own in dtypes.items()}


class _Worker(Protocol):
    """Updates granules somewhere.

    Attributes:
        last_first: it takes those that are wanted last.
    """

    last_first: bool

    def update(
        self, granule: Granule, settings: _Settings, queue: UpdateQueue, trace: Trace, track: Track
    ) -> None:
        """Update one granule, and tell the queue when it is finished, now or later from another thread."""


class _CpuWorker:
    """In place, in DRAM. May be called from several threads."""

    last_first = False

    def __init__(self, store: Store, dtypes: _Dtypes, threads: int) -> None:
        self._store, self._threads = store, threads
        self._dtypes = _translated(dtypes, NUMPY_DTYPES)

    def update(
        self, granule: Granule, settings: _Settings, queue: UpdateQueue, trace: Trace, track: Track
    ) -> None:
        with trace.wait(track, "page", granule.unit):
            lease = self._store.acquire(granule.uses)
        with lease, trace.span(track, "adamw", granule.unit):
            for call, updates in zip(granule.calls, settings, strict=True):
                planes = call.planes(lease.arrays, self._dtypes[granule.unit])
                if granule.gradient:
                    (own,) = updates
                    cpu_adamw(planes, own, self._threads)
                else:
                    cpu_adamw_idle(planes, updates, self._threads)
        queue.finished(granule)


class _DeviceWorker:
    """Through buffers on the device. Each has a lane of its own: while one granule comes, another goes.

    Args:
        last_first: begin with what is wanted last. Beside workers who begin with the first, no upload then
            waits for a granule that is on its way through here.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        dtypes: _Dtypes,
        device: Device,
        nbytes: int,
        *,
        last_first: bool,
    ) -> None:
        self.last_first = last_first
        self._store, self._layout, self._device = store, layout, device
        self._dtypes = _translated(dtypes, TORCH_DTYPES)
        self._free = threading.Semaphore(DEVICE_GRANULES)
        self._slots: list[tuple[Lane, torch.Tensor]] = [
            (device.lane(), device.buffer(nbytes)) for _ in range(DEVICE_GRANULES)
        ]
        self.bytes_up = self.bytes_down = 0

    def update(
        self, granule: Granule, settings: _Settings, queue: UpdateQueue, trace: Trace, track: Track
    ) -> None:
        with trace.wait(track, "copies", granule.unit):
            self._free.acquire()
        lane, buffer = slot = self._slots.pop(0)
        with trace.wait(track, "page", granule.unit):
            lease = self._store.acquire(granule.uses)
        with (
            trace.span(track, "adamw", granule.unit),
            trace.on_lane(Track.DEVICE_UPDATES, lane, "adamw", granule.unit),
            self._cleared_on_error(lease),
            lane.active(),
        ):
            parts = self._parts(granule, buffer)
            for part, array in zip(parts, lease.arrays, strict=True):
                lane.copy_in(part[: array.nbytes], array)
                # The device copies in the order of the calls: weights that are wanted now wait for one page
                # of planes at most.
                lane.record().synchronize()
                self.bytes_up += array.nbytes
            self._compute(granule, settings, parts, buffer)
            for part, array, (_, intent) in zip(parts, lease.arrays, granule.uses, strict=True):
                if intent is Intent.UPDATE:
                    lane.copy_out(array, part[: array.nbytes])
                    self.bytes_down += array.nbytes

        def done() -> None:
            self._device.poison(buffer, lane)
            self._store.release(lease)
            self._slots.append(slot)
            self._free.release()
            queue.finished(granule)

        lane.when_done(done)

    def _compute(
        self, granule: Granule, settings: _Settings, parts: list[torch.Tensor], buffer: torch.Tensor
    ) -> None:
        dtypes = self._dtypes[granule.unit]
        zeros = None
        if not granule.gradient:  # zeros in the buffer where else its pages lie, behind the others
            zeros = buffer[device_nbytes(self._layout, granule) :].zero_().view(dtypes["grad"])
        for call, updates in zip(granule.calls, settings, strict=True):
            planes = call.planes(parts, dtypes)
            if zeros is not None:
                planes["grad"] = zeros[: planes["exp_avg"].numel()]
            for own in updates:
                self._device.kernels.adamw(planes, own)

    def _parts(self, granule: Granule, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where each page of the granule lies in a device buffer."""
        parts, start = [], 0
        for page, _ in granule.uses:
            size = self._layout.page_nbytes(page)
            parts.append(buffer[start : start + size])
            start += round_up(size, PAGE_ALIGN_BYTES)
        return parts

    @contextmanager
    def _cleared_on_error(self, lease: Lease) -> Iterator[None]:
        """Within, an error gives the lease back, so that nobody waits for it."""
        try:
            yield
        except BaseException:
            self._store.release(lease)
            raise
