"""Sends all 2**32 fp32 bit patterns through the split master and back, on every instruction set of this CPU.

    python benchmarks/exhaustive_split.py [--this-isa]

Prints one line of counts per instruction set, and exits with status 1 if a pattern breaks a promise of
`tierstream._native.split_master`. Takes some minutes. `--this-isa` checks only the one in use, which
TIERSTREAM_ISA can lower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from tierstream import _native

PATTERNS_PER_ROUND = 1 << 24
SIGN, HALF_ULP = np.uint32(0x80000000), np.uint16(0x8000)


def check_range(first: int) -> Counter[str]:
    """Counts what became of the patterns [first, first + PATTERNS_PER_ROUND)."""
    bits = np.arange(first, first + PATTERNS_PER_ROUND, dtype=np.uint32)
    master = bits.view(np.float32)
    weight, low, nearest_even = (np.empty(bits.size, np.uint16) for _ in range(3))
    back = np.empty(bits.size, np.float32)
    _native.split_master(master, weight, low)
    _native.join_master(weight, low, back)
    _native.round_bf16(master, nearest_even)
    return count_outcomes(bits, weight, low, back.view(np.uint32), nearest_even)


def count_outcomes(
    bits: NDArray[np.uint32],
    weight: NDArray[np.uint16],
    low: NDArray[np.uint16],
    back: NDArray[np.uint32],
    nearest_even: NDArray[np.uint16],
) -> Counter[str]:
    magnitude = bits & ~SIGN
    nan = magnitude > 0x7F800000
    same = back == bits
    weight_magnitude = weight & np.uint16(0x7FFF)
    same_sign = ((back ^ bits) & SIGN) == 0
    nan_kept = nan & ((back & ~SIGN) > 0x7F800000) & (weight_magnitude > 0x7F80) & same_sign
    tie = low == HALF_ULP
    rounded_right = (weight == nearest_even) | (tie & (weight == nearest_even + np.uint16(1)))
    finite = magnitude < 0x7F800000
    return Counter(
        {
            "patterns": bits.size,
            "exact": int(np.count_nonzero(same & ~nan)),
            "nan": int(np.count_nonzero(nan)),
            "nan_kept": int(np.count_nonzero(nan_kept)),
            "finite_with_infinite_weight": int(np.count_nonzero(finite & (weight_magnitude == 0x7F80))),
            "weight_differs_from_nearest_even": int(np.count_nonzero(~nan & (weight != nearest_even))),
            "broken": int(np.count_nonzero(np.where(nan, ~nan_kept, ~(same & rounded_right)))),
        }
    )


def check_all() -> bool:
    """Checks every pattern on the instruction set of this process; True if no promise is broken."""
    start_s = time.perf_counter()
    counts: Counter[str] = Counter()
    for first in range(0, 2**32, PATTERNS_PER_ROUND):
        counts.update(check_range(first))
    figures = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print(f"{_native.cpu_isa()}: {figures} ({time.perf_counter() - start_s:.0f} s)", flush=True)
    return counts["broken"] == 0 and counts["patterns"] == 2**32


def main() -> int:
    parser = argparse.ArgumentParser(description="All fp32 bit patterns through the split master and back.")
    parser.add_argument("--this-isa", action="store_true", help="check the instruction set in use only")
    if parser.parse_args().this_isa:
        return 0 if check_all() else 1
    names = ("avx512", "avx2", "scalar")
    # The instruction set is chosen once per process.
    command = [sys.executable, __file__, "--this-isa"]
    return max(
        subprocess.run(command, env=os.environ | {"TIERSTREAM_ISA": isa}).returncode
        for isa in names[names.index(_native.cpu_isa()) :]
    )


if __name__ == "__main__":
    sys.exit(main())
