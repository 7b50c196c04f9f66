"""What else a step takes of a machine: Python for each page, host memory and copies within it, the device's
own memory, launching operations, and threads that wake each other. Medians, since a forecast is of what a
run meets; all of it in a few seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch

from tierstream import _native
from tierstream.engine.device.device import Device
from tierstream.engine.device.page_copies import PageCopies
from tierstream.engine.measure.compute_rates import QUICK_ROUNDS
from tierstream.engine.measure.memory_rates import host_array, memory_rate
from tierstream.engine.trace.trace import Trace, Track
from tierstream.io.measure import Case, measure, timed
from tierstream.io.memory import memory_budget
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout, PlaneSpec
from tierstream.tiered.store import Store

_COPY_BYTES, _CUDA_BYTES, _CPU_BYTES = 64 << 20, 1 << 30, 64 << 20
_PAGES, _LAUNCHES, _WAKES = 256, 1000, 1000


def host_figures() -> dict[str, float]:
    """For `MachineProfile.host`."""
    source, target = (host_array(_COPY_BYTES // 4, np.float32) for _ in range(2))
    cores = len(os.sched_getaffinity(0))
    return {
        "bytes": memory_budget().tightest.limit_bytes,
        "cores": cores,
        "memory": memory_rate(cores),
        "copy": _rate(_COPY_BYTES, "B", lambda: _native.memory_copy(source, target, 1)),
        "page_s": 1 / _page_rate(),
        "wake_s": 1 / _wake_rate(),
    }


def device_figures(device: Device) -> dict[str, float]:
    """For `MachineProfile.device`."""
    where = device.torch_device
    nbytes = _CUDA_BYTES if device.is_cuda else _CPU_BYTES
    a, b = (torch.ones(nbytes // 4, device=where) for _ in range(2))
    little = torch.ones(8, device=where)

    def add() -> None:
        torch.add(a, b, out=a)
        device.compute.record().synchronize()

    def launch() -> None:
        for _ in range(_LAUNCHES):
            little.add_(1)
        device.compute.record().synchronize()

    own_bytes = torch.cuda.mem_get_info(where)[1] if device.is_cuda else None
    return {
        "bytes": own_bytes or memory_budget().tightest.limit_bytes,
        "memory": _rate(3 * nbytes, "B", add),
        "launch_s": 1 / _rate(_LAUNCHES, "operations", launch),
    }


def _page_rate() -> float:
    """Pages per second that go from the store to a buffer, and hold next to nothing."""
    device, nbytes = Device("cpu"), _PAGES * PAGE_ALIGN_BYTES
    plane = PlaneSpec("unit", "weight", "uint8", nbytes, True)
    layout = Layout(PAGE_ALIGN_BYTES, {("unit", "weight"): plane})
    store = Store(layout, dram_bytes=nbytes, directory=None, prefetch_bytes=0, writeback_bytes=0)
    copies = PageCopies(
        device, device.upload, store, layout, Trace(), waits=Track.UPLOADER, copies=Track.UPLOAD
    )
    buffer = device.buffer(nbytes)
    try:
        return _rate(
            _PAGES, "pages", lambda: copies.fill(buffer, None, "unit", "weight", lambda page: None)
        )
    finally:
        store.close()
        device.close()


def _wake_rate() -> float:
    """How often in a second two threads can wake each other in turn."""
    there, back = SimpleQueue[bool](), SimpleQueue[bool]()

    def answer() -> None:
        while there.get():
            back.put(True)

    def play() -> None:
        for _ in range(_WAKES // 2):
            there.put(True)
            back.get()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        return _rate(_WAKES, "wakes", play)
    finally:
        there.put(False)
        thread.join()


def _rate(amount: float, unit: str, run: Callable[[], object]) -> float:
    (found,) = measure([Case({}, unit, lambda: timed(amount, run))], rounds=QUICK_ROUNDS)
    return found.median
