"""The compute device and its lanes: one code path for a CUDA GPU and for the CPU.

A lane is an ordered queue of work: on CUDA a stream, on the CPU simply the thread that uses it. `record`
marks a point of a lane, `wait` orders another lane behind it, `when_done` runs a callback on the host once
the lane has come that far (a stream is watched by a thread of its own, so that the one who enqueues never
waits). Three lanes work from the begin: `compute`, `upload` (weights and boundary activations to the
device) and `download` (gradients and boundary activations from it).

The tests put random delays and NaN poison into this seam (`CopyFaults`): an ordering that holds only by luck
then breaks.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from tierstream.engine.device.kernels import CudaKernels, HostKernels, Kernels
from tierstream.io.errors import ConfigError

#: A matrix whose number of rows differs from step to step is multiplied with a multiple of so many. cuBLAS
#: takes 0.2 to 0.5 ms of the enqueuing thread to choose a kernel for a shape that it has not met, ten times
#: what a launch takes; and it computes in tiles of that many rows anyway.
PRODUCT_ROWS = {"cpu": 1, "cuda": 128}
#: Hopper. On others torch 2.11 multiplies group by group, and waits for the device to know where they end.
_GROUPED_CAPABILITY = (9, 0)


@dataclass
class CopyFaults:
    """Test tool: seeded random delays around every copy, and 0xFF (NaN) in every buffer that is given
    back.
    """

    seed: int
    max_delay_s: float = 0.002
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def delay_s(self) -> float:
        return self._random.random() * self.max_delay_s


class Event(Protocol):
    """A point of a lane."""

    def synchronize(self) -> None: ...


class Stamp(Protocol):
    """A point of a lane that can be told the time of, once it is past."""

    def wait(self) -> None: ...
    def seconds_since(self, earlier: Any) -> float: ...


class Lane(Protocol):
    """An ordered queue of device work. Methods may be called from one thread at a time.

    Copies, and whatever else the calling thread enqueues with torch, go to the lane within `active`.
    """

    def active(self) -> contextlib.AbstractContextManager[Any]: ...
    def copy_in(self, device: torch.Tensor, host: np.ndarray) -> None: ...
    def copy_out(self, host: np.ndarray, device: torch.Tensor) -> None: ...
    def record(self) -> Event: ...
    def stamp(self) -> Stamp: ...
    def wait(self, event: Event | None) -> None: ...
    def when_done(self, callback: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


class _Done:
    """The event of a lane that runs in the host's own order: always past."""

    def synchronize(self) -> None:
        return


class _HostStamp:
    """A reading of the host's clock."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: _HostStamp) -> float:
        return self._time_s - earlier._time_s


class _CudaStamp:
    """A timing event. It may be of another stream than the one that it is compared with."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: _CudaStamp) -> float:
        return earlier._event.elapsed_time(self._event) / 1e3


class HostLane:
    """A lane of the CPU: work is done when the call returns."""

    def __init__(self, faults: CopyFaults | None) -> None:
        self._faults = faults

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def copy_in(self, device: torch.Tensor, host: np.ndarray) -> None:
        self._copy(device.numpy(), host)

    def copy_out(self, host: np.ndarray, device: torch.Tensor) -> None:
        self._copy(host, device.numpy())

    def _copy(self, target: np.ndarray, source: np.ndarray) -> None:
        if self._faults:
            time.sleep(self._faults.delay_s())
        np.copyto(
            target, source
        )  # releases the GIL, and unlike torch's copy_ starts no OpenMP team in this thread

    def record(self) -> Event:
        return _Done()

    def stamp(self) -> Stamp:
        return _HostStamp()

    def wait(self, event: Event | None) -> None:
        return

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()

    def close(self) -> None:
        return


class CudaLane:
    """A CUDA stream. Host memory in copies must be registered (pinned), or the copy is not asynchronous."""

    def __init__(self, stream: torch.cuda.Stream, faults: CopyFaults | None) -> None:
        self.stream = stream
        self._faults = faults
        self._watched: SimpleQueue[tuple[Event, Callable[[], None]] | None] = SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="lane", daemon=True)
        self._watcher.start()
        self._failure: BaseException | None = None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def copy_in(self, device: torch.Tensor, host: np.ndarray) -> None:
        self._delay()
        device.copy_(torch.from_numpy(host), non_blocking=True)

    def copy_out(self, host: np.ndarray, device: torch.Tensor) -> None:
        self._delay()
        torch.from_numpy(host).copy_(device, non_blocking=True)

    def _delay(self) -> None:
        if self._faults:
            torch.cuda._sleep(int(self._faults.delay_s() * 1e9))  # cycles: about 2e9 a second

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # a waiting host thread sleeps and leaves its core to AdamW
        event.record(self.stream)
        return event  # type: ignore[return-value]

    def stamp(self) -> Stamp:
        return _CudaStamp(self.stream)

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.stream.wait_event(event)  # type: ignore[arg-type]

    def when_done(self, callback: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        self._watched.put((self.record(), callback))

    def _watch(self) -> None:
        while (watched := self._watched.get()) is not None:
            self._finish(*watched)
            del watched  # and what the callback holds: device memory, perhaps

    def _finish(self, event: Event, callback: Callable[[], None]) -> None:
        for call in (event.synchronize, callback):  # others wait for the callback, after an error too
            try:
                call()
            except BaseException as error:
                self._failure = self._failure or error

    def close(self) -> None:
        self._watched.put(None)
        self._watcher.join()


class Device:
    """The device that computes, with its lanes and the few operations that differ between CUDA and the CPU.

    Attributes:
        compute, upload, download: its lanes.
        still: a lane that nothing is enqueued on, so that a stamp of it is of the moment. One of another lane
            waits for its turn: on an H200 behind copies of `download`, after `compute` had read a number.
        kernels: the optimizer's arithmetic.
        product_rows: of `PRODUCT_ROWS`.
    """

    def __init__(self, name: str = "cpu", faults: CopyFaults | None = None) -> None:
        self.faults = faults
        self.torch_device = torch.device(name)
        self.is_cuda = self.torch_device.type == "cuda"
        self.product_rows = PRODUCT_ROWS[self.torch_device.type]
        if self.is_cuda:
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"train.device is {name!r}, but torch sees no CUDA device; use cpu, or check the driver"
                )
            count = torch.cuda.device_count()
            if (self.torch_device.index or 0) >= count:
                raise ConfigError(
                    f"train.device is {name!r}, but torch sees {count} CUDA devices; use one of cuda:0 to "
                    f"cuda:{count - 1}"
                )
            if self.torch_device.index is None:
                self.torch_device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.set_device(self.torch_device)
        self.kernels: Kernels = CudaKernels(self.torch_device) if self.is_cuda else HostKernels()
        self._lanes: list[Lane] = []
        self.compute = self.lane(torch.cuda.current_stream() if self.is_cuda else None)
        self.upload, self.download, self.still = self.lane(), self.lane(), self.lane()

    def lane(self, stream: torch.cuda.Stream | None = None) -> Lane:
        """One more lane, closed with the device. `stream`: what it works on; None: one of its own."""
        lane = CudaLane(stream or torch.cuda.Stream(), self.faults) if self.is_cuda else HostLane(self.faults)
        self._lanes.append(lane)
        return lane

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A persistent byte buffer on the device, aligned for direct I/O on the CPU and for any dtype view on
        both.
        """
        if self.is_cuda:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        spare = np.empty(nbytes + 4096, np.uint8)
        start = -spare.ctypes.data % 4096
        return torch.from_numpy(spare[start : start + nbytes])

    @property
    def multiplies_groups(self) -> bool:
        """torch has a kernel here that multiplies groups of rows with a matrix each."""
        return self.is_cuda and torch.cuda.get_device_capability(self.torch_device) >= _GROUPED_CAPABILITY

    def int32(self, values: Sequence[int]) -> torch.Tensor:
        """These numbers on the device, in the order of the current stream; the host does not wait."""
        made = torch.tensor(values, dtype=torch.int32, pin_memory=self.is_cuda)
        return made.to(self.torch_device, non_blocking=True)

    def poison(self, buffer: torch.Tensor, lane: Lane) -> Event | None:
        """With faults on, fill a buffer that nobody may read any more with NaN, in the order of `lane`; the
        point after which another lane may write it again.
        """
        if not self.faults:
            return None
        with lane.active():
            buffer.view(torch.uint8).fill_(0xFF)
        return lane.record()

    @contextlib.contextmanager
    def replayed_rng(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
        """Run a recompute with the random numbers that the forward drew, and leave the generators as they
        were.
        """
        now = self.rng_state()
        self.set_rng_state(state)
        try:
            yield
        finally:
            self.set_rng_state(now)

    def rng_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        cuda = torch.cuda.get_rng_state(self.torch_device) if self.is_cuda else None
        return torch.get_rng_state(), cuda

    def set_rng_state(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.torch_device)

    def pinning(self) -> tuple[Callable[[int, int], None] | None, Callable[[int], None] | None]:
        """Functions that register host memory with the driver (address, bytes) and take it back (address);
        None on the CPU.
        """
        if not self.is_cuda:
            return None, None
        runtime = torch.cuda.cudart()

        def register(address: int, nbytes: int) -> None:
            status = int(runtime.cudaHostRegister(address, nbytes, 0))
            if status:
                raise OSError(f"cudaHostRegister gave error {status}")

        def unregister(address: int) -> None:
            runtime.cudaHostUnregister(address)

        return register, unregister

    def peak_bytes(self) -> int:
        """Peak bytes that torch has allocated on the GPU; 0 on the CPU."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.is_cuda else 0

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
