"""Copies pages of the store into buffers on the device, on a lane, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierstream.engine.device.memory import IN_FLIGHT_PAGES
from tierstream.engine.trace.trace import Trace, Track
from tierstream.tiered.layout import Layout
from tierstream.tiered.lease import Lease
from tierstream.tiered.store import Intent, Store

if TYPE_CHECKING:
    import torch

    from tierstream.engine.device.device import Device, Event, Lane


class PageCopies:
    """One thread at a time may use it.

    Args:
        lane: the copies go there; nobody else uses it.
        waits, copies: where a trace shows the thread's waits, and the lane's work.

    Attributes:
        bytes_up: copied so far.
    """

    def __init__(
        self,
        device: Device,
        lane: Lane,
        store: Store,
        layout: Layout,
        trace: Trace,
        *,
        waits: Track,
        copies: Track,
    ) -> None:
        self._device, self._lane, self._store, self._layout = device, lane, store, layout
        self._trace, self._waits, self._copies = trace, waits, copies
        self._credits = threading.BoundedSemaphore(IN_FLIGHT_PAGES)
        self.bytes_up = 0

    def fill(
        self, buffer: torch.Tensor, idle: Event | None, unit: str, plane: str, gate: Callable[[int], None]
    ) -> Event:
        """Enqueue the copy of a plane of a unit to the begin of `buffer`.

        Args:
            idle: the point after which the buffer may be written; None: now.
            gate: is called with the index of each page before it is read, and blocks until it may be.

        Returns:
            The point after which the buffer has its content.
        """
        lane, layout, trace = self._lane, self._layout, self._trace
        activation = plane == "activation"
        cause, intent = ("download", Intent.CONSUME) if activation else ("update", Intent.READ)
        end = layout.spec(unit, plane).nbytes
        lane.wait(idle)
        self._device.poison(buffer, lane)
        with lane.active(), trace.on_lane(self._copies, lane, plane, unit):
            for page in layout.pages(unit, plane):
                start = page.index * layout.page_bytes
                size = min(layout.page_bytes, end - start)
                with trace.wait(self._waits, cause, unit):
                    gate(page.index)
                with trace.wait(self._waits, "copies", unit):
                    self._credits.acquire()
                with trace.wait(self._waits, "page", unit):
                    lease = self._store.acquire([(page, intent)])
                lane.copy_in(buffer[start : start + size], lease.arrays[0][:size])
                lane.when_done(lambda lease=lease: self._give_back(lease))  # type: ignore[misc]
                self.bytes_up += size
        return lane.record()

    def _give_back(self, lease: Lease) -> None:
        self._store.release(lease)
        self._credits.release()
