"""Keeps the input of every layer from its forward to its recompute: on the device, or in the store's tiers.

In the store a boundary activation is a step-local plane like a gradient: written page by page in forward,
read and forgotten in backward, spilled to NVMe only where DRAM is short. GPU memory then does not grow with
depth.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from tierstream.engine.device import Device
from tierstream.engine.transfer import Downloader
from tierstream.engine.units import activation_unit
from tierstream.io.errors import InvariantError


class ActivationStash:
    """`put` in forward; `wait_stored` is the gate of the upload that brings it back; `take_local` where it
    stayed on the device.
    """

    def __init__(self, device: Device, downloader: Downloader, layers: int, *, on_device: bool) -> None:
        self._device, self._downloader, self._layers = device, downloader, layers
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
        kept = [
            hidden
        ]  # the tensor lives until its bytes are in DRAM; then its memory goes back to the compute lane
        flat = hidden.contiguous().view(-1)
        job = self._downloader.submit(
            activation_unit(layer), "activation", lambda: flat, self._device.compute.record(), kept.clear
        )
        stored = self._stored[layer]

        def settle(job: Future[None]) -> None:
            error = job.exception()
            if error is None:
                stored.set_result(None)
            elif not stored.done():
                stored.set_exception(error)

        job.add_done_callback(settle)

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
            if not stored.done():
                stored.set_exception(InvariantError("the step was aborted before this activation was made"))
