"""The bound of a step: no step can be faster than its slowest resource (docs/design.md section 6).

The rates are measured on this machine, through the very paths that training takes; the traffic to the drives
is counted by replaying the step's own schedule against an optimal cache of as many frames as the run has
(Belady, IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from tierstream.engine.adam_rates import update_rate
from tierstream.engine.compute_rates import matmul_rate
from tierstream.engine.copy_rates import upload_rate
from tierstream.engine.device import Device
from tierstream.io import seam
from tierstream.io.backend import Backend
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Intent

_PROBE_BYTES = 64 << 20
_PROBE_BLOCK_BYTES = 8 << 20
#: A drive with less free space than this (the two probe files, twice) is not measured.
_PROBE_SPARE_BYTES = 4 * _PROBE_BYTES

_DriveRates: TypeAlias = tuple[float | None, float | None, float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine gives, measured. Bytes per second unless the name says otherwise; None: not part of
    this run.
    """

    flop_per_s: float
    upload: float | None
    update_parameters_per_s: float
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_read_mixed: float | None = None
    nvme_write_mixed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds that each resource needs for one step, and the traffic behind them."""

    seconds: dict[str, float]
    nvme_read_bytes: int
    nvme_written_bytes: int

    @property
    def step_s(self) -> float:
        return max(self.seconds.values())

    @property
    def resource(self) -> str:
        """What sets the bound."""
        return max(self.seconds, key=self.seconds.__getitem__)


def drive_traffic(uses: Sequence[tuple[Page, Intent]], frames: int) -> tuple[int, int]:
    """Pages that an optimal cache of `frames` must read and write per step, once the cyclic schedule `uses`
    is in steady state.
    """
    length, cycles = len(uses), 3
    pages = [page for page, _ in uses]
    next_use = [0] * length
    upcoming: dict[Page, int] = {page: index + length for index, page in reversed(list(enumerate(pages)))}
    for index in range(length - 1, -1, -1):
        next_use[index] = upcoming[pages[index]] - index
        upcoming[pages[index]] = index
    resident: dict[Page, int] = {}
    dirty: set[Page] = set()
    on_drive: set[Page] = {page for page, intent in uses if intent in (Intent.READ, Intent.UPDATE)}
    furthest: list[tuple[int, Page]] = []
    reads = writes = 0
    for now in range(length * cycles):
        page, intent = uses[now % length]
        counted = now >= length * (cycles - 1)
        if page not in resident:
            if intent is not Intent.OVERWRITE and page in on_drive:
                reads += counted
            while len(resident) >= frames:
                due, victim = heapq.heappop(furthest)
                if resident.get(victim) != -due:
                    continue
                del resident[victim]
                if victim in dirty:
                    dirty.discard(victim)
                    on_drive.add(victim)
                    writes += counted
        if intent is Intent.CONSUME:
            resident.pop(page, None)
            dirty.discard(page)
            continue
        if intent is not Intent.READ:
            dirty.add(page)
        resident[page] = now + next_use[now % length]
        heapq.heappush(furthest, (-resident[page], page))
    return reads, writes


def step_bound(
    rates: Rates, *, flop: float, upload_bytes: int, parameters: int, read_bytes: int, written_bytes: int
) -> Bound:
    """Seconds per resource for one step. Reads and writes of the drives overlap at the mixed rates, the rest
    runs alone.
    """
    seconds = {"compute": flop / rates.flop_per_s, "update": parameters / rates.update_parameters_per_s}
    if rates.upload:
        seconds["upload"] = upload_bytes / rates.upload
    if rates.nvme_read and rates.nvme_write and rates.nvme_read_mixed and rates.nvme_write_mixed:
        together = min(read_bytes / rates.nvme_read_mixed, written_bytes / rates.nvme_write_mixed)
        alone_read = max(0.0, read_bytes - together * rates.nvme_read_mixed) / rates.nvme_read
        alone_write = max(0.0, written_bytes - together * rates.nvme_write_mixed) / rates.nvme_write
        seconds["nvme"] = together + alone_read + alone_write
    return Bound(seconds=seconds, nvme_read_bytes=read_bytes, nvme_written_bytes=written_bytes)


def measure_rates(
    device: Device, dtype: torch.dtype, threads: int, backend: Backend | None, directories: Sequence[Path]
) -> Rates:
    """Measure this machine in about two seconds: matrix product, upload, AdamW, and the drives through the
    run's own backend.

    Args:
        directories: the state's folders. Those on one drive are measured once.
    """
    drive: _DriveRates = (None, None, None, None)
    if backend is not None:
        drive = _together([_drive_rates(backend, path) for path in _one_per_drive(directories)])
    return Rates(
        flop_per_s=matmul_rate(device, dtype),
        upload=upload_rate(device) if device.is_cuda else None,
        update_parameters_per_s=update_rate(threads),
        nvme_read=drive[0],
        nvme_write=drive[1],
        nvme_read_mixed=drive[2],
        nvme_write_mixed=drive[3],
    )


def _best_seconds(run: Callable[[], object], rounds: int) -> float:
    """Least of several rounds after a warm-up: a bound asks what the machine can give, and others only ever
    slow it down.
    """
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _drive_rates(backend: Backend, directory: Path) -> _DriveRates:
    """(read, write, read while writing, write while reading) in bytes per second, of incompressible data that
    is really written; not measured where the drive has little to spare, since the state comes first.
    """
    usage = seam.current().statvfs(str(directory))
    if usage.f_bavail * usage.f_frsize < _PROBE_SPARE_BYTES:
        return None, None, None, None
    blocks = _PROBE_BYTES // _PROBE_BLOCK_BYTES
    names = [directory / ".probe-a", directory / ".probe-b"]
    for name in names:
        name.unlink(missing_ok=True)  # of a run that was killed while it measured
    source = np.random.default_rng(0).integers(0, 256, _PROBE_BLOCK_BYTES + 4096, np.uint8)
    shift = -source.ctypes.data % 4096
    source = source[shift : shift + _PROBE_BLOCK_BYTES]
    targets = [_aligned_block() for _ in range(blocks)]
    with ExitStack() as made:
        files = []
        for name in names:
            made.callback(name.unlink, missing_ok=True)
            backend.create(name, _PROBE_BYTES)
            files.append(backend.open(name, writable=True))
            made.callback(files[-1].close)

        def wait(futures: list) -> None:
            for future in futures:
                future.result()

        def write(which: int) -> list:
            return [files[which].write_from(source, i * _PROBE_BLOCK_BYTES) for i in range(blocks)]

        def read(which: int) -> list:
            return [
                files[which].read_into(target, i * _PROBE_BLOCK_BYTES) for i, target in enumerate(targets)
            ]

        wait(write(1))
        write_s = _best_seconds(lambda: wait(write(0)), rounds=2)
        read_s = _best_seconds(lambda: wait(read(1)), rounds=2)
        mixed_s = _best_seconds(lambda: wait(read(1) + write(0)), rounds=2)
    return _PROBE_BYTES / read_s, _PROBE_BYTES / write_s, _PROBE_BYTES / mixed_s, _PROBE_BYTES / mixed_s


def _one_per_drive(directories: Sequence[Path]) -> list[Path]:
    return list({path.stat().st_dev: path for path in reversed(directories)}.values())


def _together(drives: Sequence[_DriveRates]) -> _DriveRates:
    """What several drives give side by side: each carries the same bytes, so the slowest sets the pace."""
    known = [[rate for rate in rates if rate is not None] for rates in zip(*drives, strict=True)]
    if not drives or any(len(rates) < len(drives) for rates in known):
        return None, None, None, None
    read, write, read_mixed, write_mixed = (len(drives) * min(rates) for rates in known)
    return read, write, read_mixed, write_mixed


def _aligned_block() -> np.ndarray:
    """A page-aligned host buffer of one probe block."""
    spare = np.empty(_PROBE_BLOCK_BYTES + 4096, np.uint8)
    shift = -spare.ctypes.data % 4096
    return spare[shift : shift + _PROBE_BLOCK_BYTES]
