"""What is downloaded lives, untouched, until its last copy is done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import torch

from tierstream.engine.device.device import Device, HostLane
from tierstream.engine.device.download import Downloader
from tierstream.engine.trace.trace import Trace
from tierstream.tiered.layout import Layout, PlaneSpec
from tierstream.tiered.store import Store

PAGE_BYTES, NBYTES = 4096, 3 * 4096 - 100


class LateLane(HostLane):
    """A lane that says when its work is done only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.enqueued: list[Callable[[], None]] = []

    def when_done(self, callback: Callable[[], None]) -> None:
        self.enqueued.append(callback)

    def catch_up(self) -> None:
        while self.enqueued:
            self.enqueued.pop(0)()


def test_a_tensor_lives_until_its_last_copy_is_done() -> None:
    """Whoever submits it forgets it at once, as forward does with the input of a layer."""
    spec = PlaneSpec("boundary.0", "activation", "uint8", NBYTES, False)
    layout = Layout(PAGE_BYTES, {("boundary.0", "activation"): spec})
    store = Store(layout, dram_bytes=4 * PAGE_BYTES, directory=None, prefetch_bytes=0, writeback_bytes=0)
    device, lane, done = Device(), LateLane(), []
    device.download = lane
    downloader = Downloader(device, store, layout, Trace(), lambda error: None)
    source = torch.randint(256, (NBYTES,), dtype=torch.uint8)
    expected, alive = source.clone(), weakref.ref(source)
    ready = device.compute.record()
    job = downloader.submit("boundary.0", "activation", source, ready, lambda: done.append(1))
    del source
    job.result()
    downloader.close()
    del job
    gc.collect()
    assert alive() is not None, "its copies are still under way"
    assert done == []
    lane.catch_up()
    gc.collect()
    assert alive() is None
    assert done == [1]
    found = np.empty(NBYTES, np.uint8)
    store.read_range("boundary.0", "activation", 0, found)
    assert np.array_equal(found, expected.numpy())
    store.close()
