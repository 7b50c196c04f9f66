"""Throughput of the AdamW kernels against torch's, in the same process, in rounds that take turns.

    python benchmarks/adamw.py [--parameters 33554432] [--threads 2] [--rounds 9]

Prints per variant the median, the range, parameters per second, and bytes per second (what the update must
read and write). Use more parameters than the last-level cache holds. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstream import _native

SETTINGS: dict[str, Any] = {
    "step": 100,
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 1.0,
}


class Variant(NamedTuple):
    step: Callable[[], object]
    bytes_per_parameter: int


def random(n: int, scale: float) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(n, dtype=np.float32) * np.float32(scale)


def native_variants(n: int, threads: int) -> dict[str, Variant]:
    master, exp_avg, exp_avg_sq = random(n, 0.02), random(n, 1e-4), random(n, 1e-4) ** 2
    weight, low, grad_bf16 = (np.empty(n, np.uint16) for _ in range(3))
    grad = random(n, 1e-3)
    _native.split_master(master, weight, low)
    _native.round_bf16(grad, grad_bf16)

    def split() -> None:
        _native.adamw_split(weight, low, exp_avg, exp_avg_sq, grad_bf16, **SETTINGS, threads=threads)

    def fp32_and_weight() -> None:
        _native.adamw_fp32(master, weight, exp_avg, exp_avg_sq, grad_bf16, **SETTINGS, threads=threads)

    def fp32() -> None:
        _native.adamw_fp32(master, None, exp_avg, exp_avg_sq, grad, **SETTINGS, threads=threads)

    return {
        "native split, bf16 grad": Variant(split, 2 * 12 + 2),
        "native fp32 + bf16 weight, bf16 grad": Variant(fp32_and_weight, 2 * 12 + 2 + 2),
        "native fp32, fp32 grad": Variant(fp32, 2 * 12 + 4),
    }


def torch_variant(n: int, *, fused: bool) -> Variant:
    parameter = torch.nn.Parameter(torch.from_numpy(random(n, 0.02)))
    parameter.grad = torch.from_numpy(random(n, 1e-3))
    optimizer = torch.optim.AdamW(
        [parameter], lr=SETTINGS["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=False
    )
    return Variant(optimizer.step, 2 * 12 + 4)


def measure(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step; a round runs each variant once, so that a slow moment hits all."""
    for variant in variants.values():
        variant.step()  # first touch of memory, start of threads
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            start_s = time.perf_counter()
            variant.step()
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the AdamW kernels against torch's.")
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    variants = native_variants(args.parameters, args.threads) | {
        "torch fused, fp32": torch_variant(args.parameters, fused=True),
        "torch single-tensor, fp32": torch_variant(args.parameters, fused=False),
    }
    print(f"{platform.machine()}, {_native.cpu_isa()}, {args.threads} threads, torch {torch.__version__}")
    print(f"{args.parameters:,} parameters, {args.rounds} interleaved rounds")
    report = {}
    for name, seconds in measure(variants, args.rounds).items():
        median_s = statistics.median(seconds)
        parameters_per_s = args.parameters / median_s
        gigabytes_per_s = parameters_per_s * variants[name].bytes_per_parameter / 1e9
        print(
            f"{name:38s} {median_s * 1e3:8.1f} ms  [{min(seconds) * 1e3:.1f}, {max(seconds) * 1e3:.1f}]"
            f"  {parameters_per_s / 1e9:6.3f} Gparam/s  {gigabytes_per_s:6.1f} GB/s"
        )
        report[name] = {"median_s": median_s, "parameters_per_s": parameters_per_s, "seconds": seconds}
    print(json.dumps({"isa": _native.cpu_isa(), "threads": args.threads, "variants": report}))


if __name__ == "__main__":
    main()
