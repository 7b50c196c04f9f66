"""Rounding to bf16 against torch, and the split of a master against its definition."""

import numpy as np
import pytest
import torch
from support.native import LENGTHS, bit_patterns, from_bf16, same_bits, to_bf16

from tierstream import _native


def split(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight, low = np.empty(master.size, np.uint16), np.empty(master.size, np.uint16)
    _native.split_master(master, weight, low)
    return weight, low


def join(weight: np.ndarray, low: np.ndarray) -> np.ndarray:
    master = np.empty(weight.size, np.float32)
    _native.join_master(weight, low, master)
    return master


@pytest.mark.parametrize("n", LENGTHS)
def test_round_equals_torch(n: int) -> None:
    values = bit_patterns(n, seed=n)
    rounded = to_bf16(values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    number = ~np.isnan(values)
    assert same_bits(rounded[number], expected[number])
    assert np.all(np.isnan(from_bf16(rounded[~number])))
    assert np.array_equal(np.signbit(from_bf16(rounded)), np.signbit(values))


def test_split_is_to_nearest_ties_away() -> None:
    values = bit_patterns(100_000)
    values = values[~np.isnan(values)]
    weight, low = split(values)
    bits = values.view(np.uint32).astype(np.uint64)
    assert np.array_equal(weight, ((bits + 0x8000) >> 16).astype(np.uint16))
    assert np.array_equal(low, (bits & 0xFFFF).astype(np.uint16))
    even = to_bf16(values)
    tie = low == 0x8000
    assert same_bits(weight[~tie], even[~tie])
    assert np.all((weight[tie] == even[tie]) | (weight[tie] == even[tie] + 1))
    assert np.any(weight[tie] != even[tie])


@pytest.mark.parametrize("n", LENGTHS)
def test_every_number_comes_back(n: int) -> None:
    values = bit_patterns(n, seed=n + 1)
    values = values[~np.isnan(values)]
    assert same_bits(join(*split(values)), values)


def test_numbers_that_round_to_infinity_come_back() -> None:
    finite = np.array([0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF], np.uint32).view(np.float32)
    weight, low = split(finite)
    assert np.array_equal(from_bf16(weight), np.float32([np.inf, np.inf, -np.inf, -np.inf]))
    assert np.all(low >= 0x8000), "told apart from a true infinity, which has low = 0"
    assert same_bits(join(weight, low), finite)
    assert split(np.float32([np.inf]))[1][0] == 0


def test_nan_stays_nan_of_its_sign_in_weight_and_master() -> None:
    values = bit_patterns(100_000)
    bits = np.arange(0x7F800001, 0x80000000, 97, dtype=np.uint32)
    payloads = [bits.view(np.float32), (bits | 0x80000000).view(np.float32)]
    values = np.concatenate([values[np.isnan(values)], *payloads])
    weight, low = split(values)
    back = join(weight, low)
    assert np.all(np.isnan(from_bf16(weight)))
    assert np.all(np.isnan(back))
    assert np.array_equal(np.signbit(back), np.signbit(values))
    again = split(back)
    assert same_bits(again[0], weight)
    assert same_bits(again[1], low)
