"""Boundary activations on their way to DRAM: how many wait, and what becomes of those that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tierstream.engine.device.device import Device, Event
from tierstream.engine.device.memory import WAITING_TENSORS
from tierstream.engine.step.activations import ActivationStash
from tierstream.engine.trace.trace import Trace
from tierstream.io.errors import InvariantError


class SlowDownloader:
    """Takes a boundary only when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.seen: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(1)

    def submit(
        self,
        unit: str,
        plane: str,
        source: torch.Tensor,
        ready: Event,
        done: Callable[[], None],
    ) -> Future[None]:
        def run() -> None:
            self.gate.acquire()
            self.seen.append(source.clone())
            done()

        return self._thread.submit(run)


def test_forward_waits_when_the_tiers_are_slower() -> None:
    """However deep the model, no more than WAITING_TENSORS boundaries stay on the device."""
    downloader = SlowDownloader()
    stash = ActivationStash(Device(), downloader, 6, Trace(), on_device=False)  # type: ignore[arg-type]
    stash.begin_step()
    hidden = [torch.full((2, 3, 4), float(i)) for i in range(6)]
    put = []

    def forward() -> None:
        for i in range(6):
            stash.put(i, hidden[i])
            put.append(i)

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join(0.2)
    assert put == list(range(WAITING_TENSORS))
    for expected in range(WAITING_TENSORS + 1, 7):
        downloader.gate.release()
        stash.wait_stored(expected - WAITING_TENSORS - 1)
    for _ in range(6):
        downloader.gate.release()
    thread.join()
    stash.wait_stored(5)
    assert put == list(range(6))
    expected_bytes = [values.view(-1).view(torch.uint8) for values in hidden]
    assert all(torch.equal(a, b) for a, b in zip(downloader.seen, expected_bytes, strict=True))


def test_abort_wakes_whoever_waits_for_an_activation_that_will_not_come() -> None:
    stash = ActivationStash(Device(), SlowDownloader(), 3, Trace(), on_device=False)  # type: ignore[arg-type]
    stash.begin_step()
    waiting = ThreadPoolExecutor(1).submit(stash.wait_stored, 2)
    stash.abort()
    with pytest.raises(InvariantError, match="aborted"):
        waiting.result(5)
