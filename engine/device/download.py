"""Writes finished device buffers (gradients, boundary activations) to pages of the store, in order, in a
thread of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from tierstream.engine.device.device import Device, Event
from tierstream.engine.device.memory import IN_FLIGHT_PAGES, rounds_gradients
from tierstream.engine.trace.trace import Trace, Track
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Lease
from tierstream.tiered.store import Intent, Store


class Downloader:
    """Takes buffers in the order of `submit`.

    fp32 sums whose plane is bfloat16 are rounded on the device, page by page.

    Args:
        failed: called, in another thread, with what made a download fail: its pages will not come.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        layout: Layout,
        trace: Trace,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._device, self._store, self._layout, self._trace = device, store, layout, trace
        self._report_failure = failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="downloader")
        self._credits = threading.BoundedSemaphore(IN_FLIGHT_PAGES)
        # A page's turn comes again when its copy is done: no more are in flight than there are buffers.
        self._rounded = itertools.cycle(
            [device.buffer(layout.page_bytes).view(torch.bfloat16) for _ in range(IN_FLIGHT_PAGES)]
            if rounds_gradients(layout)
            else []
        )
        self._failed: BaseException | None = None
        self.bytes_down = 0
        """Of all that was submitted."""

    def submit(
        self,
        unit: str,
        plane: str,
        source: torch.Tensor,
        ready: Event,
        done: Callable[[], None],
        stored: Callable[[Page], None] = lambda page: None,
        admit: Callable[[], None] = lambda: None,
    ) -> Future[None]:
        """Queue the plane's content for its pages.

        Args:
            source: flat, on the device; of the plane's dtype, or fp32 for a bfloat16 one. Held until `done`.
            ready: point of the compute lane after which the source is whole.
            done: called on the host when all is in DRAM and the source may be reused.
            stored: called on the host for every page that is in DRAM.
            admit: called in the downloader's thread for every page before it takes a frame; may block.
        """
        self.raise_failure()
        self.bytes_down += source.numel() * (2 if self._rounds(unit, plane, source) else source.itemsize)
        return self._thread.submit(self._run, unit, plane, source, ready, done, stored, admit)

    def raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _run(
        self,
        unit: str,
        plane: str,
        source: torch.Tensor,
        ready: Event,
        done: Callable[[], None],
        stored: Callable[[Page], None],
        admit: Callable[[], None],
    ) -> None:
        try:
            self.raise_failure()
            lane, trace = self._device.download, self._trace
            lane.wait(ready)
            with lane.active(), trace.on_lane(Track.DOWNLOAD, lane, plane, unit):
                for page in self._layout.pages(unit, plane):
                    with trace.wait(Track.DOWNLOADER, "update", unit):
                        admit()
                    with trace.wait(Track.DOWNLOADER, "copies", unit):
                        self._credits.acquire()
                    with trace.wait(Track.DOWNLOADER, "page", unit):
                        lease = self._store.acquire([(page, Intent.OVERWRITE)])
                    content = self._content(page, source)
                    lane.copy_out(lease.arrays[0][: content.numel()], content)
                    lane.when_done(lambda page=page, lease=lease: self._give_back(page, lease, stored))  # type: ignore[misc]
            lane.when_done(partial(_finish, done, source))
        except BaseException as error:
            self._failed = self._failed or error
            self._report_failure(error)
            done()
            raise

    def _content(self, page: Page, source: torch.Tensor) -> torch.Tensor:
        """The bytes of one page."""
        start, end = self._layout.page_span(page)
        part = source[start : min(end, source.numel())]
        if not self._rounds(page.unit, page.plane, source):
            return part.view(torch.uint8)
        rounded = next(self._rounded)[: part.numel()]
        self._device.kernels.round_bf16(part, rounded)
        return rounded.view(torch.uint8)

    def _rounds(self, unit: str, plane: str, source: torch.Tensor) -> bool:
        return source.dtype == torch.float32 and self._layout.spec(unit, plane).dtype == "bfloat16"

    def _give_back(self, page: Page, lease: Lease, stored: Callable[[Page], None]) -> None:
        self._store.release(lease)
        self._credits.release()
        stored(page)


def _finish(done: Callable[[], None], source: torch.Tensor) -> None:
    """Called with `source`, which so lives until its last copy is done: torch would give the memory of a
    tensor that nobody holds to the next kernel of the compute lane.
    """
    done()
