"""Sums a unit's gradient in fp32 on the device and sends it to its `grad` plane.

Autograd gives a gradient per row chunk in the compute dtype; they are added, in the order of the chunks, into
one flat fp32 buffer per unit. When the unit is complete the download lane takes its sum of squares (for the
norm and the finite check), rounds to the storage dtype where asked, and writes the pages.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from tierstream.engine.device import Device
from tierstream.engine.trace import Trace
from tierstream.engine.transfer import Downloader
from tierstream.tiered.layout import Unit


class GradientBuffers:
    """fp32 accumulators on the device, in groups of one size; a buffer is reused when its bytes are in DRAM.

    Args:
        group_of: unit name -> group.
        groups: group -> (count, elements of one buffer).
        grad_dtype: dtype of the `grad` planes, "float32" or "bfloat16".
    """

    def __init__(
        self,
        device: Device,
        downloader: Downloader,
        group_of: Mapping[str, str],
        groups: Mapping[str, tuple[int, int]],
        grad_dtype: str,
        trace: Trace,
    ) -> None:
        self._device, self._downloader, self._trace = device, downloader, trace
        self._group_of, self._grad_dtype = group_of, grad_dtype
        self._free = {
            group: [device.buffer(4 * numel).view(torch.float32) for _ in range(count)]
            for group, (count, numel) in groups.items()
        }
        self._open: dict[str, torch.Tensor] = {}
        self._state = threading.Condition()
        self._outstanding = 0
        self._sums: dict[str, torch.Tensor] = {}

    def open(self, unit: Unit) -> list[torch.Tensor]:
        """fp32 views, one per tensor of `unit`, that the caller adds to; zero at the unit's first use in a
        step.
        """
        flat = self._open.get(unit.name)
        if flat is None:
            free = self._free[self._group_of[unit.name]]
            with self._trace.stall("gradients", unit.name), self._state:
                self._state.wait_for(lambda: free)
                flat = free.pop()
            self._downloader.raise_failure()
            self._open[unit.name] = flat
            flat.zero_()
        return [flat[t.offset : t.end].view(t.shape) for t in unit.tensors]

    def close(self, unit: Unit) -> None:
        """The unit's gradient is complete: send it away."""
        flat = self._open.pop(unit.name)
        ready = self._device.compute.record()
        gradient = flat[: unit.numel]

        def produce() -> torch.Tensor:
            self._sums[unit.name] = self._device.sum_squares(gradient)
            return gradient if self._grad_dtype == "float32" else self._device.round_to_bf16(gradient)

        def done() -> None:
            self._device.poison(flat, self._device.download)
            with self._state:
                self._free[self._group_of[unit.name]].append(flat)
                self._outstanding -= 1
                self._state.notify_all()

        with self._state:
            self._outstanding += 1
        self._downloader.submit(unit.name, "grad", produce, ready, done)

    def sums_of_squares(self, units: Sequence[Unit]) -> dict[str, float]:
        """Wait until every closed gradient is in DRAM; the sums of squares of the step, in the order of
        `units`.

        This is the one point of a step where the host waits for the device.
        """
        with self._trace.stall("verdict"), self._state:
            self._state.wait_for(lambda: self._outstanding == 0)
        self._downloader.raise_failure()
        sums, self._sums = self._sums, {}
        return {unit.name: sums[unit.name].item() for unit in units}
