"""How fast the host runs AdamW: the kernels of `tierstream._native`, and torch's fused one beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream import _native
from tierstream.engine.compute_rates import QUICK_ROUNDS
from tierstream.io.measure import Case, Sample, measure, timed
from tierstream.io.memory import memory_budget

#: More than a last-level cache holds, of which some have 500 MB: in a run every page comes from memory.
_QUICK_PARAMETERS = 1 << 25
#: Share of the free memory that a quick measurement may take, in bytes per byte taken.
_QUICK_MEMORY_SHARE = 16
_SPLIT_STATE_BYTES = 2 + 2 + 4 + 4 + 2
SPLIT = "split master, bf16 gradient"
FP32_AND_WEIGHT = "fp32 master + bf16 weight, bf16 gradient"
FP32 = "fp32"
TORCH = "torch fused, fp32"
#: Memory traffic per parameter: state read and written, gradient read; a bf16 weight beside its master is
#: only written.
BYTES_PER_PARAMETER = {
    SPLIT: 2 * (2 + 2 + 4 + 4) + 2,
    FP32_AND_WEIGHT: 2 * (4 + 4 + 4) + 2 + 2,
    FP32: 2 * (4 + 4 + 4) + 4,
    TORCH: 2 * (4 + 4 + 4) + 4,
}
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
    """One case per kernel and number of threads; a run updates all `parameters` once.

    The kernels share what state they can: it is their speed that matters, not what they compute.
    """
    kernels: dict[str, Callable[[int], object]] = {**_native_kernels(parameters), TORCH: _torch(parameters)}
    return [
        Case(_labels(kernel, count), "parameters", _runner(update, count, parameters))
        for kernel, update in kernels.items()
        for count in threads
    ]


def update_rate(threads: int) -> float:
    """Parameters per second of the update that training makes, the best of several rounds; fewer parameters
    where memory is short.
    """
    affordable = memory_budget().available_bytes // (_QUICK_MEMORY_SHARE * _SPLIT_STATE_BYTES)
    parameters = min(_QUICK_PARAMETERS, max(1 << 16, affordable))
    update = _split_kernel(parameters)
    case = Case(_labels(SPLIT, threads), "parameters", _runner(update, threads, parameters))
    (measurement,) = measure([case], rounds=QUICK_ROUNDS)
    return max(measurement.rates)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on below `cores`, and `cores`."""
    return [1 << power for power in range(cores.bit_length()) if 1 << power < cores] + [cores]


def _labels(kernel: str, threads: int) -> dict[str, str | int]:
    isa = torch.backends.cpu.get_cpu_capability().lower() if kernel == TORCH else _native.cpu_isa()
    return {
        "kernel": kernel,
        "isa": isa,
        "threads": threads,
        "bytes_per_parameter": BYTES_PER_PARAMETER[kernel],
    }


def _runner(update: Callable[[int], object], threads: int, parameters: int) -> Callable[[], Sample]:
    return lambda: timed(parameters, lambda: update(threads))


def _split_kernel(n: int) -> Callable[[int], object]:
    """One step of `SPLIT` with so many threads."""
    weight, low, grad = (np.empty(n, np.uint16) for _ in range(3))
    _native.split_master(_normal(n, 0.02), weight, low)
    _native.round_bf16(_normal(n, 1e-3), grad)
    moments = _normal(n, 1e-4), _normal(n, 1e-4) ** 2
    return lambda threads: _native.adamw_split(weight, low, *moments, grad, **_SETTINGS, threads=threads)


def _native_kernels(n: int) -> dict[str, Callable[[int], object]]:
    """Kernel -> one step of it with so many threads."""
    master, exp_avg, exp_avg_sq = _normal(n, 0.02), _normal(n, 1e-4), _normal(n, 1e-4) ** 2
    weight, grad_bf16 = (np.empty(n, np.uint16) for _ in range(2))
    grad = _normal(n, 1e-3)
    _native.round_bf16(master, weight)
    _native.round_bf16(grad, grad_bf16)
    moments = exp_avg, exp_avg_sq
    return {
        SPLIT: _split_kernel(n),
        FP32_AND_WEIGHT: lambda threads: _native.adamw_fp32(
            master, weight, *moments, grad_bf16, **_SETTINGS, threads=threads
        ),
        FP32: lambda threads: _native.adamw_fp32(master, None, *moments, grad, **_SETTINGS, threads=threads),
    }


def _torch(n: int) -> Callable[[int], object]:
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
    return np.resize(drawn, n)
