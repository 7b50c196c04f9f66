"""The sum of squares: exactly rounded oracle, fixed order of additions, and what is not finite."""

import math

import numpy as np
import pytest
from support.native import LENGTHS, Planes, from_bf16, to_bf16

from tierstream._native import sum_squares


def values(n: int) -> np.ndarray:
    return Planes.random(n, steps=1, seed=n).grads[0]


def in_documented_order(x: np.ndarray) -> float:
    """Blocks of 32,768 in order; in each, element i goes to lane i mod 16, then a tree over the lanes."""
    total = 0.0
    for start in range(0, x.size, 32768):
        block = x[start : start + 32768].astype(np.float64) ** 2
        lanes = np.zeros(16)
        for row in np.append(block, np.zeros(-block.size % 16)).reshape(-1, 16):
            lanes += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return total


@pytest.mark.parametrize("n", [*LENGTHS, 200_003])
def test_equals_the_documented_order_and_the_exact_sum(n: int) -> None:
    x = values(n)
    assert sum_squares(x, threads=2) == in_documented_order(x)
    exact = math.fsum(v * v for v in x.tolist())  # the square of an fp32 number is exact in fp64
    assert math.isclose(sum_squares(x, threads=2), exact, rel_tol=1e-13)


@pytest.mark.parametrize("n", LENGTHS)
def test_bf16_is_its_fp32_value(n: int) -> None:
    x = to_bf16(values(n))
    assert sum_squares(x, threads=2) == sum_squares(from_bf16(x), threads=1)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_number_of_threads_changes_no_bit(threads: int) -> None:
    x = values(500_009)
    assert {sum_squares(x, threads=threads) for _ in range(10)} == {sum_squares(x, threads=1)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 40_000, 65_536])
def test_one_bad_element_shows(bad: float, place: int) -> None:
    x = values(65_537)
    assert math.isfinite(sum_squares(x, threads=2))
    x[place] = bad
    assert not math.isfinite(sum_squares(x, threads=2))
    assert not math.isfinite(sum_squares(to_bf16(x), threads=2))


def test_largest_and_smallest_numbers_neither_overflow_nor_vanish() -> None:
    x = np.float32([3.4028235e38, 1e-45])
    assert sum_squares(x, threads=1) == float(x[0]) ** 2
    assert sum_squares(x[1:], threads=1) == float(x[1]) ** 2 > 0
