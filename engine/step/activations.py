"""Keeps the input of every layer from its forward to its recompute: on the device, or in the store's tiers.

In the store a boundary activation is a step-local plane like a gradient: written page by page in forward,
read and forgotten in backward, spilled to NVMe only where DRAM is short. GPU memory then does not grow with
depth.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

import torch

from tierstream.engine.device.device import Device
from tierstream.engine.device.download import Downloader
from tierstream.engine.device.memory import WAITING_TENSORS
from tierstream.engine.model.units import activation_unit
from tierstream.engine.trace.trace import Trace
from tierstream.io.errors import InvariantError


class ActivationStash:
    """`put` in forward; `wait_stored` is the gate of the upload that brings it back; `take_local` where it
    stayed on the device.

    At most `WAITING_TENSORS` boundaries wait on the device for their download: forward runs as fast as the
    tiers take them, and device memory does not grow with depth even where a drive is the slowest part.
    """

    def __init__(
        self, device: Device, downloader: Downloader, layers: int, trace: Trace, *, on_device: bool
    ) -> None:
        self._device, self._downloader, self._layers, self._trace = device, downloader, layers, trace
        self._room = threading.BoundedSemaphore(WAITING_TENSORS)
        self.on_device = on_device
        self._local: dict[int, torch.Tensor] = {}
        self._stored: list[Future[None]] = []

    def begin_step(self) -> None:
        self._local.clear()
        self._stored = [Future() for _ in range(self._layers)]

    def put(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep `hidden` [rows, seq_len, hidden_size] as the input of `layer`."""
        if self.on_device:
            self._local[layer] = hidden
            return
        with self._trace.stall("activations", activation_unit(layer)):
            self._room.acquire()
        # The downloader holds it until its bytes are in DRAM, whatever the layers do meanwhile.
        content = hidden.contiguous().view(-1).view(torch.uint8)
        job = self._downloader.submit(
            activation_unit(layer), "activation", content, self._device.compute.record(), self._room.release
        )
        job.add_done_callback(lambda job: _settle(self._stored[layer], job.exception()))

    def wait_stored(self, layer: int) -> None:
        """Block until the store knows the pages of `layer`'s input; raises what kept them from being
        written.
        """
        self._stored[layer].result()

    def take_local(self, layer: int) -> torch.Tensor:
        return self._local.pop(layer)

    def abort(self) -> None:
        """After an error elsewhere: whoever waits for an activation that will not come is woken with an
        error.
        """
        for stored in self._stored:
            _settle(stored, InvariantError("the step was aborted before this activation was made"))


def _settle(stored: Future[None], error: BaseException | None) -> None:
    """Resolve a future that another thread may have resolved already."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            stored.set_result(None)
        else:
            stored.set_exception(error)
