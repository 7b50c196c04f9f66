"""How fast the host runs AdamW: the kernels of `tierstream._native`, torch's fused one beside them, and what
memory gives to the same traffic over the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream import _native
from tierstream.engine.measure.compute_rates import QUICK_ROUNDS
from tierstream.engine.measure.memory_rates import host_array
from tierstream.io.measure import Case, Sample, measure, timed
from tierstream.io.memory import memory_budget

#: More than a last-level cache holds, of which some have 500 MB: in a run every page comes from memory.
_QUICK_PARAMETERS = 1 << 25
#: Share of the free memory that a quick measurement may take, in bytes per byte taken.
_QUICK_MEMORY_SHARE = 16
_SPLIT_STATE_BYTES = 2 + 2 + 4 + 4 + 2
#: Parameters in one call of the kernel in training: a page of moments.
PAGE_PARAMETERS = (16 << 20) // 4
SPLIT = "split master, bf16 gradient"
SPLIT_BY_PAGES = f"{SPLIT}, page by page"
SPLIT_FP32_GRADIENT = "split master, fp32 gradient"
FP32_AND_WEIGHT = "fp32 master + bf16 weight, bf16 gradient"
FP32_AND_WEIGHT_FP32_GRADIENT = "fp32 master + bf16 weight, fp32 gradient"
FP32 = "fp32"
TORCH = "torch fused, fp32"
#: Memory traffic per parameter: state read and written, gradient read; a bf16 weight beside its master is
#: only written.
BYTES_PER_PARAMETER = {
    SPLIT: 2 * (2 + 2 + 4 + 4) + 2,
    SPLIT_BY_PAGES: 2 * (2 + 2 + 4 + 4) + 2,
    SPLIT_FP32_GRADIENT: 2 * (2 + 2 + 4 + 4) + 4,
    FP32_AND_WEIGHT: 2 * (4 + 4 + 4) + 2 + 2,
    FP32_AND_WEIGHT_FP32_GRADIENT: 2 * (4 + 4 + 4) + 2 + 4,
    FP32: 2 * (4 + 4 + 4) + 4,
    TORCH: 2 * (4 + 4 + 4) + 4,
}
#: Values of the label "part": the update, and memory's bandwidth for the same arrays.
UPDATE, MEMORY = "AdamW", "memory"
_Update: TypeAlias = Callable[[int], object]
_Planes: TypeAlias = tuple[NDArray[Any], ...]
_SETTINGS: dict[str, Any] = {
    "step": 100,
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 1.0,
}


def adam_cases(parameters: int, threads: Sequence[int]) -> list[Case]:
    """Cases of two parts, for each number of threads: `UPDATE`, one step over all `parameters` by each
    kernel, and `MEMORY`, the traffic of such a step over the same arrays. The kernels share what state they
    can: it is their speed that matters, not what they compute.
    """
    arrays = _arrays(parameters)
    updates: dict[str, _Update] = {name: _update_of(name, planes) for name, planes in arrays.items()}
    updates[SPLIT_BY_PAGES] = _by_pages(arrays[SPLIT])
    updates[TORCH] = _torch(parameters)
    return [
        Case(_labels(UPDATE, name, count), "parameters", _runner(updates[name], count, parameters))
        for name in BYTES_PER_PARAMETER
        for count in threads
    ] + [
        Case(_labels(MEMORY, name, count), "parameters", _runner(_traffic(planes), count, 2 * parameters))
        for name, planes in arrays.items()
        for count in threads
    ]


def traffic_of(kernel: str) -> str:
    """The kernel whose memory case has the same traffic."""
    return {SPLIT_BY_PAGES: SPLIT, TORCH: FP32}.get(kernel, kernel)


def update_rate(threads: int) -> float:
    """Parameters per second of the update that training makes, the best of several rounds; fewer parameters
    where memory is short.
    """
    affordable = memory_budget().available_bytes // (_QUICK_MEMORY_SHARE * _SPLIT_STATE_BYTES)
    parameters = min(_QUICK_PARAMETERS, max(1 << 16, affordable))
    update = _update_of(SPLIT, _split_planes(parameters))
    case = Case(_labels(UPDATE, SPLIT, threads), "parameters", _runner(update, threads, parameters))
    (measurement,) = measure([case], rounds=QUICK_ROUNDS)
    return max(measurement.rates)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on below `cores`, and `cores`."""
    return [1 << power for power in range(cores.bit_length()) if 1 << power < cores] + [cores]


def _labels(part: str, kernel: str, threads: int) -> dict[str, str | int]:
    isa = torch.backends.cpu.get_cpu_capability().lower() if kernel == TORCH else _native.cpu_isa()
    return {
        "part": part,
        "kernel": kernel,
        "isa": isa,
        "threads": threads,
        "bytes_per_parameter": BYTES_PER_PARAMETER[kernel],
    }


def _runner(update: _Update, threads: int, parameters: int) -> Callable[[], Sample]:
    return lambda: timed(parameters, lambda: update(threads))


def _split_planes(n: int) -> _Planes:
    """weight, low, exp_avg, exp_avg_sq, grad."""
    weight, low, grad = (host_array(n, np.uint16) for _ in range(3))
    _native.split_master(_normal(n, 0.02), weight, low)
    _native.round_bf16(_normal(n, 1e-3), grad)
    exp_avg, exp_avg_sq = _normal(n, 1e-4), _normal(n, 1e-4)
    np.square(exp_avg_sq, out=exp_avg_sq)
    return weight, low, exp_avg, exp_avg_sq, grad


def _arrays(n: int) -> dict[str, _Planes]:
    """Kernel -> what it updates, and last the gradient."""
    weight, low, *moments, grad_bf16 = split = _split_planes(n)
    master, grad = _normal(n, 0.02), _normal(n, 1e-3)
    return {
        SPLIT: split,
        SPLIT_FP32_GRADIENT: (weight, low, *moments, grad),
        FP32_AND_WEIGHT: (master, weight, *moments, grad_bf16),
        FP32_AND_WEIGHT_FP32_GRADIENT: (master, weight, *moments, grad),
        FP32: (master, *moments, grad),
    }


def _update_of(kernel: str, planes: _Planes) -> _Update:
    if kernel in (SPLIT, SPLIT_FP32_GRADIENT):
        return lambda threads: _native.adamw_split(*planes, **_SETTINGS, threads=threads)
    if kernel == FP32:
        master, *others = planes
        return lambda threads: _native.adamw_fp32(master, None, *others, **_SETTINGS, threads=threads)
    return lambda threads: _native.adamw_fp32(*planes, **_SETTINGS, threads=threads)


def _by_pages(planes: _Planes) -> _Update:
    pages = [
        _update_of(SPLIT, tuple(plane[start : start + PAGE_PARAMETERS] for plane in planes))
        for start in range(0, planes[0].size, PAGE_PARAMETERS)
    ]

    def update(threads: int) -> None:
        for page in pages:
            page(threads)

    return update


def _traffic(planes: _Planes) -> _Update:
    """Reads and writes what an update does, twice: the second time undoes the first."""

    def update(threads: int) -> None:
        for _ in range(2):
            _native.memory_update(planes[:-1], planes[-1], threads)

    return update


def _torch(n: int) -> _Update:
    parameter = torch.nn.Parameter(torch.from_numpy(_normal(n, 0.02)))
    parameter.grad = torch.from_numpy(_normal(n, 1e-3))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=_SETTINGS["lr"],
        betas=(_SETTINGS["beta1"], _SETTINGS["beta2"]),
        eps=_SETTINGS["eps"],
        weight_decay=_SETTINGS["weight_decay"],
        fused=True,
    )

    def update(threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            optimizer.step()
        finally:
            torch.set_num_threads(before)

    return update


def _normal(n: int, scale: float) -> NDArray[np.float32]:
    """Normal numbers, the same ones again and again: making millions of them would take longer than what is
    measured.
    """
    drawn = np.random.default_rng(0).standard_normal(min(n, 1 << 20), dtype=np.float32) * np.float32(scale)
    numbers = host_array(n, np.float32)
    for start in range(0, n, drawn.size):
        numbers[start : start + drawn.size] = drawn[: n - start]
    return numbers
