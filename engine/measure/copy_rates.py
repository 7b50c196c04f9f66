"""How fast bytes move between host memory and the device: up, down and both at once, from memory that is
pinned by the arena, pinned by torch, and not pinned.

The copies go through the lanes that training uses, one thread for each. A copy of a small size is repeated
over a whole buffer, so that no cache is measured and the wait at the end counts little; what enqueuing a copy
costs is part of the figure, as it is in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream.engine.device.device import Device, Lane
from tierstream.engine.measure.compute_rates import QUICK_ROUNDS
from tierstream.io.errors import InvariantError
from tierstream.io.measure import Case, Sample, measure, timed
from tierstream.tiered.arena import Arena

Direction: TypeAlias = Literal["H2D", "D2H", "both"]
DIRECTIONS: tuple[Direction, ...] = ("H2D", "D2H", "both")
#: A run moves at least so much in each direction.
RUN_BYTES = 256 << 20
_QUICK_BYTES = 64 << 20
_ALIGN_BYTES = 4096
_Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class HostMemory:
    """Two blocks of host memory of one kind: what is uploaded, and where downloads go."""

    kind: str
    source: _Bytes
    target: _Bytes
    note: str = ""


@contextmanager
def arena_memory(device: Device, nbytes: int) -> Iterator[HostMemory]:
    """Memory as training has it: an arena, registered with the driver."""
    register, unregister = device.pinning()
    arena = Arena([nbytes, nbytes], register=register, unregister=unregister)
    try:
        source, target = arena.frames
        yield HostMemory("arena", source, target, arena.pageable_reason)
    finally:
        arena.close()


def other_memories(device: Device, nbytes: int) -> list[HostMemory]:
    """What the arena is compared with: torch's pinned memory (where there is CUDA) and plain memory."""
    pageable = HostMemory("pageable", np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8))
    if not device.is_cuda:
        return [pageable]
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(2))
    return [HostMemory("torch", source, target), pageable]


class CopyBench:
    """Copies between host memories and two buffers on the device.

    Args:
        nbytes: of each buffer; multiple of 4096.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._target, self._source = device.buffer(nbytes), device.buffer(nbytes)
        self._pattern = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._source.copy_(torch.from_numpy(self._pattern))

    def cases(self, memory: HostMemory, sizes: Sequence[int]) -> list[Case]:
        """One case per direction and size (bytes, at most `nbytes`). "both" counts the bytes of both ways.

        The first run of a case checks every byte that it moved.

        Raises:
            InvariantError: (when run) a byte is not what it should be.
        """
        memory.source[:] = self._pattern
        return [self._case(memory, direction, size) for direction in DIRECTIONS for size in sizes]

    def _case(self, memory: HostMemory, direction: Direction, size: int) -> Case:
        ends = range(size, self._nbytes + 1, size)
        moved_bytes = len(ends) * size
        up = [(self._target[end - size : end], memory.source[end - size : end]) for end in ends]
        down = [(memory.target[end - size : end], self._source[end - size : end]) for end in ends]
        unchecked = True

        def upload() -> None:
            with self._device.upload.active():
                for target, source in up:
                    self._device.upload.copy_in(target, source)
            _finish(self._device.upload)

        def download() -> None:
            with self._device.download.active():
                for target, source in down:
                    self._device.download.copy_out(target, source)
            _finish(self._device.download)

        copy = {"H2D": upload, "D2H": download, "both": lambda: _side_by_side(upload, download)}[direction]

        def run() -> Sample:
            nonlocal unchecked
            if unchecked:
                self._spoil(memory)
            sample = timed(moved_bytes * (2 if direction == "both" else 1), copy)
            if unchecked:
                self._check(memory, direction, size, moved_bytes)
                unchecked = False
            return Sample(sample.amount, sample.seconds, sample.cpu_s, memory.note)

        return Case({"direction": direction, "memory": memory.kind, "size_bytes": size}, "B", run)

    def _spoil(self, memory: HostMemory) -> None:
        """Makes every byte of the targets wrong."""
        np.invert(self._pattern, out=memory.target)
        self._target.copy_(torch.from_numpy(memory.target))
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.torch_device)

    def _check(self, memory: HostMemory, direction: Direction, size: int, moved_bytes: int) -> None:
        results = {"H2D": self._target.cpu().numpy(), "D2H": memory.target}
        for way in ("H2D", "D2H") if direction == "both" else (direction,):
            wrong = np.flatnonzero(results[way][:moved_bytes] != self._pattern[:moved_bytes])
            if len(wrong):
                raise InvariantError(
                    f"{way} in copies of {size} bytes, {memory.kind} memory: {len(wrong)} of {moved_bytes} "
                    f"bytes are wrong, the first at {wrong[0]}"
                )


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Size of the buffers for copies of these sizes."""
    return -(-max(*sizes, RUN_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES


def quick_rates(device: Device) -> dict[str, float]:
    """Bytes per second of copies as training makes them, the best of several rounds: "upload", "download",
    and "both" at once.
    """
    with arena_memory(device, _QUICK_BYTES) as memory:
        cases = CopyBench(device, _QUICK_BYTES).cases(memory, [_QUICK_BYTES])
        found = measure(cases, rounds=QUICK_ROUNDS)
    return dict(zip(("upload", "download", "both"), (max(m.rates) for m in found), strict=True))


def upload_rate(device: Device) -> float:
    """Bytes per second of an upload, from `quick_rates`."""
    return quick_rates(device)["upload"]


def _finish(lane: Lane) -> None:
    lane.record().synchronize()


def _side_by_side(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Both at once; the second in a thread of its own, as copies of pageable memory hold their thread up."""
    with ThreadPoolExecutor(1, thread_name_prefix="copy") as other:
        done = other.submit(second)
        first()
        done.result()
