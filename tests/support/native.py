"""Inputs for the tests of `tierstream._native`, and what the kernels must compute from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstream import _native

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

#: Lengths around the widths of the vectors (8, 16) and of the blocks that threads share (32,768).
LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 1000, 32767, 32768, 65537)

#: fp32 bit patterns, sign bit off, where rounding, carrying or the class of the number changes.
EDGES = (
    0x00000000,  # zero
    0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF,  # subnormals
    0x00800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3FFFFFFF,  # normals, ties to both sides
    0x7F7EFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x7F7FFFFF,  # up to the largest; three round to infinity
    0x7F800000,  # infinity
    0x7F800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF,  # NaN
)  # fmt: skip


def bit_patterns(count: int, seed: int = 0) -> F32:
    """Both signs of all `EDGES`, then `count` uniformly random bit patterns, as fp32[n]."""
    edges = np.array(EDGES, dtype=np.uint32)
    random = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return np.concatenate([edges, edges | np.uint32(0x80000000), random]).view(np.float32)


def to_bf16(values: F32) -> U16:
    out = np.empty(values.size, np.uint16)
    _native.round_bf16(values, out)
    return out


def from_bf16(values: U16) -> F32:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass
class Planes:
    """The state of one AdamW run on an fp32 master, and the gradients of each of its steps."""

    master: F32
    exp_avg: F32
    exp_avg_sq: F32
    grads: list[F32]

    @classmethod
    def random(cls, n: int, steps: int, seed: int = 0) -> Planes:
        """A fresh state; masters and gradients of many sizes, zeros, subnormals, huge numbers among them."""
        rng = np.random.default_rng(seed)

        def sizes(low: float, high: float) -> F32:
            return (rng.standard_normal(n) * 10.0 ** rng.uniform(low, high, n)).astype(np.float32)

        master = sizes(-4, 1)
        special = np.array([0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38], np.float32)
        master[: min(n, 6)] = special[: min(n, 6)]
        grads = [np.where(rng.random(n) < 0.05, np.float32(0), sizes(-7, 0)) for _ in range(steps)]
        return cls(master, np.zeros(n, np.float32), np.zeros(n, np.float32), grads)

    def copy(self) -> Planes:
        return Planes(self.master.copy(), self.exp_avg.copy(), self.exp_avg_sq.copy(), self.grads)

    def split(self) -> tuple[U16, U16]:
        weight, low = np.empty(self.master.size, np.uint16), np.empty(self.master.size, np.uint16)
        _native.split_master(self.master, weight, low)
        return weight, low


def same_bits(a: NDArray[np.generic], b: NDArray[np.generic]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
