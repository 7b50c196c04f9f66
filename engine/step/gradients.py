"""Sums a unit's gradient in fp32 on the device and sends it to its `grad` plane.

Autograd gives a gradient per row chunk in the compute dtype; they are added, in the order of the chunks, into
one flat fp32 buffer per unit. When the unit is complete its sum of squares is taken (for the norm and the
finite check), and the download lane writes the pages, rounded to the storage dtype where asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from tierstream.engine.device.device import Device, Event
from tierstream.engine.device.download import Downloader
from tierstream.engine.trace.trace import Trace
from tierstream.engine.update.queue import UpdateQueue
from tierstream.tiered.layout import Unit


class GradientSum:
    """fp32 views, one per tensor of a unit, over one flat buffer; elements between tensors are zero."""

    def __init__(self, unit: Unit, flat: torch.Tensor) -> None:
        self.flat = flat[: unit.numel]
        self._tensors = [flat[t.offset : t.end].view(t.shape) for t in unit.tensors]
        self._unwritten = set(range(len(self._tensors)))
        edges = [0, *(edge for t in unit.tensors for edge in (t.offset, t.end)), unit.numel]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if start < end:
                flat[start:end].zero_()

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One gradient per tensor, None: zero. The first one is written, which spares a pass over zeros."""
        for index, (total, gradient) in enumerate(zip(self._tensors, gradients, strict=True)):
            if gradient is None:
                continue
            if index in self._unwritten:
                total.copy_(gradient)
                self._unwritten.discard(index)
            else:
                total.add_(gradient)

    def views(self) -> list[torch.Tensor]:
        """The tensors themselves, to be added to; those without a gradient so far are zero."""
        for index in self._unwritten:
            self._tensors[index].zero_()
        self._unwritten.clear()
        return self._tensors


class GradientBuffers:
    """fp32 accumulators on the device, in groups of one size; a buffer is reused when its bytes are in DRAM.

    Args:
        units: all that have gradients.
        group_of: unit name -> group.
        groups: group -> (count, elements of one buffer).
        resident: units whose gradients stay on the device, until `free`.
        queue: says when a page may go to DRAM, and is told that it is there; in another thread.
        closed: called for every unit whose gradient is complete on the device.
        absent: called for every unit that gets no gradient in a step, which means zero.
    """

    def __init__(
        self,
        device: Device,
        downloader: Downloader,
        units: Sequence[Unit],
        group_of: Mapping[str, str],
        groups: Mapping[str, tuple[int, int]],
        trace: Trace,
        queue: UpdateQueue,
        *,
        closed: Callable[[Unit], None],
        absent: Callable[[Unit], None],
        resident: Collection[str] = (),
    ) -> None:
        self._resident, self._held = resident, dict[str, tuple[GradientSum, torch.Tensor]]()
        self._device, self._downloader, self._trace = device, downloader, trace
        self._group_of, self._closed, self.absent = group_of, closed, absent
        self._queue = queue
        self._free: dict[str, list[tuple[torch.Tensor, Event | None]]] = {
            group: [(device.buffer(4 * numel).view(torch.float32), None) for _ in range(count)]
            for group, (count, numel) in groups.items()
        }
        self._open: dict[str, tuple[GradientSum, torch.Tensor]] = {}
        self._state = threading.Condition()
        self._outstanding = 0
        self._index = {unit.name: index for index, unit in enumerate(units)}
        self._squares = torch.zeros(len(units), dtype=torch.float64, device=device.torch_device)

    def begin_step(self) -> None:
        """Units that get no gradient in the step that comes have a norm of zero."""
        with torch.no_grad():
            self._squares.zero_()

    def open(self, unit: Unit) -> GradientSum:
        """The sum of `unit`, empty at the unit's first use in a step."""
        if unit.name not in self._open:
            free = self._free[self._group_of[unit.name]]
            with self._trace.stall("gradients", unit.name), self._state:
                self._state.wait_for(lambda: free)
                flat, poisoned = free.pop()
            self._device.compute.wait(poisoned)
            self._downloader.raise_failure()
            self._open[unit.name] = GradientSum(unit, flat), flat
        return self._open[unit.name][0]

    def close(self, unit: Unit) -> None:
        """The unit's gradient is complete: send it away."""
        total, flat = self._open.pop(unit.name)
        total.views()
        index = self._index[unit.name]
        self._device.kernels.sum_squares(total.flat, self._squares[index : index + 1])
        if unit.name in self._resident:
            self._held[unit.name] = total, flat
            self._closed(unit)
            return

        def done() -> None:
            poisoned = self._device.poison(flat, self._device.download)
            with self._state:
                self._free[self._group_of[unit.name]].append((flat, poisoned))
                self._outstanding -= 1
                self._state.notify_all()

        with self._state:
            self._outstanding += 1
        self._closed(unit)
        ready, queue = self._device.compute.record(), self._queue
        self._downloader.submit(unit.name, "grad", total.flat, ready, done, queue.stored, queue.admit)

    def held(self, unit: Unit) -> torch.Tensor:
        """The complete gradient, fp32 and flat, of a unit that stays on the device."""
        return self._held[unit.name][0].flat

    def free(self, unit: Unit) -> None:
        """The compute lane has been given all that reads the gradient of a unit that stays on the device."""
        _, flat = self._held.pop(unit.name)
        poisoned = self._device.poison(flat, self._device.compute)
        with self._state:
            self._free[self._group_of[unit.name]].append((flat, poisoned))

    def losses_and_sums_of_squares(self, losses: torch.Tensor) -> tuple[list[float], list[float]]:
        """The step's losses (fp64 [n]) and the sums of squares of the units' gradients, in their order.

        This is the one point of a step where the host waits for the device.
        """
        self._downloader.raise_failure()
        values = torch.cat([losses, self._squares])
        with self._trace.stall("verdict"):
            self._device.compute.record().synchronize()
        numbers = values.tolist()
        return numbers[: len(losses)], numbers[len(losses) :]

    def wait_stored(self) -> None:
        """Wait until every closed gradient is in DRAM."""
        with self._state:
            self._state.wait_for(lambda: self._outstanding == 0)
        self._downloader.raise_failure()
