"""Runs every kernel on fixed inputs and prints as JSON the instruction set and a digest of each result.

Started by tests/csrc/test_isa.py once per instruction set, since the choice is made once per process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.native import LENGTHS, Planes, bit_patterns, from_bf16, to_bf16

from tierstream import _native

SETTINGS = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 0.3,
    "threads": 2,
}


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def adamw(n: int) -> str:
    planes = Planes.random(n, steps=4, seed=n)
    other = planes.copy()
    weight, low = planes.split()
    for step, grad in enumerate(planes.grads, start=1):
        sent = to_bf16(grad) if step % 2 else grad
        _native.adamw_split(weight, low, planes.exp_avg, planes.exp_avg_sq, sent, step=step, **SETTINGS)
        _native.adamw_fp32(other.master, None, other.exp_avg, other.exp_avg_sq, sent, step=step, **SETTINGS)
    split = (weight, low, planes.exp_avg, planes.exp_avg_sq)
    return digest(*split, other.master, other.exp_avg, other.exp_avg_sq)


def casts() -> str:
    values = bit_patterns(100_003)
    rounded, weight, low = (np.empty(values.size, np.uint16) for _ in range(3))
    _native.round_bf16(values, rounded)
    _native.split_master(values, weight, low)
    # Any pair can be joined, also one that no split writes.
    any_weight, any_low = np.random.default_rng(1).integers(0, 2**16, (2, 100_003), dtype=np.uint16)
    joined = np.empty(any_weight.size, np.float32)
    _native.join_master(any_weight, any_low, joined)
    return digest(rounded, weight, low, joined)


def sums(n: int) -> list[str]:
    values = Planes.random(n, steps=1, seed=n).grads[0]
    bf16 = to_bf16(values)
    return [_native.sum_squares(grad, threads=2).hex() for grad in (values, bf16, from_bf16(bf16))]


def checksums() -> list[int]:
    data = np.random.default_rng(3).integers(0, 256, 100_000, dtype=np.uint8)
    lengths = (0, 1, 9, 6143, 6144, 90_000)
    return [_native.crc32c(data[start : start + n], seed=n) for start in (0, 1, 7) for n in lengths]


def main() -> None:
    results = {
        "adamw": [adamw(n) for n in LENGTHS],
        "casts": casts(),
        "sums": [sums(n) for n in LENGTHS],
        "checksums": checksums(),
    }
    print(json.dumps({"isa": _native.cpu_isa(), "results": results}))


if __name__ == "__main__":
    main()
