"""Sums of gradients: what a buffer holds, whatever it held before; when it is handed out again; the norm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tierstream.engine.device.device import CopyFaults, Device, Event
from tierstream.engine.step.gradients import GradientBuffers, GradientSum
from tierstream.engine.trace.trace import Trace
from tierstream.tiered.layout import Page, Unit, pack_unit

SHAPES = [(5, 7), (3,), (11, 2)]


def unit_of(name: str) -> Unit:
    """With gaps: between its tensors, which begin at multiples of 128 elements, and at its end."""
    return pack_unit(name, "bfloat16", [(f"{name}.{i}", shape, 0) for i, shape in enumerate(SHAPES)])


def dirty(numel: int) -> torch.Tensor:
    return torch.full((numel,), torch.nan)


def some_gradients(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flat_of(unit: Unit, values: list[np.ndarray]) -> np.ndarray:
    """Tensors at their places, zeros between them."""
    flat = np.zeros(unit.numel, np.float32)
    for tensor, value in zip(unit.tensors, values, strict=True):
        flat[tensor.offset : tensor.end] = value.reshape(-1)
    return flat


def summed(*gradients: list[torch.Tensor]) -> list[np.ndarray]:
    """In fp32, in this order."""
    totals = [gradient.float().numpy().copy() for gradient in gradients[0]]
    for following in gradients[1:]:
        for total, gradient in zip(totals, following, strict=True):
            total += gradient.float().numpy()
    return totals


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_gradient_is_written_and_later_ones_are_added_in_fp32(dtype: torch.dtype) -> None:
    unit, parts = unit_of("u"), [some_gradients(seed, dtype) for seed in range(4)]
    total = GradientSum(unit, dirty(unit.numel))
    for part in parts:
        total.add(part)
    assert total.flat.numpy().tobytes() == flat_of(unit, summed(*parts)).tobytes()


def test_many_small_gradients_in_bf16_count() -> None:
    """C07: 64 times 1e-3 onto 1; bf16 would stay at 1."""
    unit = pack_unit("u", "bfloat16", [("u.0", (1,), True)])
    total = GradientSum(unit, dirty(unit.numel))
    total.add([torch.ones(1, dtype=torch.bfloat16)])
    small = torch.full((1,), 1e-3, dtype=torch.bfloat16)
    for _ in range(64):
        total.add([small])
    assert total.flat[0].item() == pytest.approx(1 + 64 * small.item(), rel=1e-6)
    assert round(total.flat[0].item(), 5) == 1.06396


def test_a_gradient_that_is_missing_is_zero() -> None:
    """Of one chunk, or of all: an expert that no token went to."""
    unit = unit_of("u")
    (first, _, third), (again, _, _) = some_gradients(1), some_gradients(2)
    total = GradientSum(unit, dirty(unit.numel))
    total.add([first, None, None])
    total.add([again, None, third])
    assert all(view.shape == shape for view, shape in zip(total.views(), SHAPES, strict=True))
    expected = [summed([first], [again])[0], np.zeros(3), third.float().numpy()]
    assert total.flat.numpy().tobytes() == flat_of(unit, expected).tobytes()


def test_views_are_added_to_in_place() -> None:
    """As the head does: some tensors have a gradient already, the others begin at zero."""
    unit, (first, second, third) = unit_of("u"), some_gradients(1)
    total = GradientSum(unit, dirty(unit.numel))
    total.add([first, None, None])
    for view, gradient in zip(total.views(), (first, second, third), strict=True):
        view += gradient
    total.add([None, second, None])
    expected = summed([first, second, third], [first, second, torch.zeros_like(third)])
    assert total.flat.numpy().tobytes() == flat_of(unit, expected).tobytes()


def test_a_buffer_may_be_larger_than_its_unit_and_keeps_nothing_of_its_last_use() -> None:
    unit = unit_of("u")
    buffer = dirty(unit.numel + 1000)
    for seed in range(2):
        total = GradientSum(unit, buffer)
        total.add(some_gradients(seed))
        assert total.flat.numpy().tobytes() == flat_of(unit, summed(some_gradients(seed))).tobytes()
    assert buffer[unit.numel :].isnan().all()


class HeldDownloader:
    """Keeps what was submitted until the test lets it go, in order. `failure` is raised to whoever asks."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.seen: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1)

    def submit(
        self,
        unit: str,
        plane: str,
        source: torch.Tensor,
        ready: Event,
        done: Callable[[], None],
        stored: Callable[[Page], None],
        admit: Callable[[], None],
    ) -> Future[None]:
        def run() -> None:
            self.gate.acquire()
            self.seen[unit] = source.numpy().tobytes()
            stored(Page(unit, plane, 0))
            done()

        return self._thread.submit(run)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


UNITS = [unit_of(f"layers.{index}") for index in range(4)]


class Room:
    """A queue with room for every page; tells whose have come."""

    def __init__(self) -> None:
        self.units: list[str] = []

    def admit(self) -> None: ...

    def stored(self, page: Page) -> None:
        self.units.append(page.unit)


class Buffers:
    """Two buffers for four units; freed ones are filled with NaN."""

    def __init__(self) -> None:
        self.downloader, self.queue = HeldDownloader(), Room()
        self.closed: list[str] = []
        self.buffers = GradientBuffers(
            Device("cpu", CopyFaults(0)), self.downloader, UNITS,  # type: ignore[arg-type]
            {unit.name: "layers" for unit in UNITS}, {"layers": (2, UNITS[0].numel)}, Trace(),
            self.queue,  # type: ignore[arg-type]
            closed=lambda unit: self.closed.append(unit.name), absent=lambda unit: None,
        )  # fmt: skip

    def fill(self, index: int, scale: float = 1.0) -> None:
        total = self.buffers.open(UNITS[index])
        assert self.buffers.open(UNITS[index]) is total
        total.add([scale * gradient for gradient in some_gradients(index)])
        self.buffers.close(UNITS[index])


@pytest.mark.timeout(60)
def test_a_buffer_is_not_handed_out_before_its_bytes_are_in_dram() -> None:
    made = Buffers()

    def backward() -> None:
        for index in reversed(range(4)):
            made.fill(index)

    thread = threading.Thread(target=backward)
    thread.start()
    for stored in range(3):
        thread.join(0.2)
        assert made.closed == ["layers.3", "layers.2", "layers.1", "layers.0"][: stored + 2]
        made.downloader.gate.release()
    made.downloader.gate.release()
    thread.join()
    made.buffers.wait_stored()
    assert made.queue.units == made.closed
    for index, unit in enumerate(UNITS):
        assert made.downloader.seen[unit.name] == flat_of(unit, summed(some_gradients(index))).tobytes()


@pytest.mark.parametrize("spoiled", [None, np.nan, np.inf])
def test_the_verdict_gets_the_loss_and_the_sums_in_the_order_of_the_units(spoiled: float | None) -> None:
    """In fp64, where no finite gradient overflows; only the unit that is not finite says so."""
    made = Buffers()
    made.downloader.gate.release(4)
    scale = 2.0**60
    for index in reversed(range(4)):
        made.fill(index, spoiled if spoiled is not None and index == 2 else scale)
    losses, sums = made.buffers.losses_and_sums_of_squares(torch.tensor([2.5, 3.5], dtype=torch.float64))
    made.buffers.wait_stored()
    flats = [flat_of(unit, summed(some_gradients(i))).astype(np.float64) for i, unit in enumerate(UNITS)]
    expected = [float(np.sum((scale * flat) ** 2)) for flat in flats]
    assert losses == [2.5, 3.5]
    for index, (found, right) in enumerate(zip(sums, expected, strict=True)):
        if spoiled is not None and index == 2:
            assert not np.isfinite(found)
        else:
            assert found == pytest.approx(right, rel=1e-12)


def test_a_failed_download_is_told_to_whoever_comes_next() -> None:
    made = Buffers()
    made.downloader.gate.release(4)
    made.fill(3)
    made.downloader.failure = OSError("no space")
    for ask in (
        lambda: made.buffers.open(UNITS[2]),
        lambda: made.buffers.losses_and_sums_of_squares(torch.zeros(2, dtype=torch.float64)),
        made.buffers.wait_stored,
    ):
        with pytest.raises(OSError, match="no space"):
            ask()
