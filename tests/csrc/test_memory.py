"""The yardsticks of memory bandwidth really read, copy and update every element."""

from __future__ import annotations

import numpy as np
import pytest
from support.native import LENGTHS, bit_patterns, same_bits

from tierstream import _native


def words(n: int, seed: int = 0) -> np.ndarray:
    """Any 32-bit patterns, as fp32."""
    return bit_patterns(n, seed)[-n:] if n else np.empty(0, np.float32)


def halves(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, n, dtype=np.uint16)


@pytest.mark.parametrize("n", [*LENGTHS, 200_003])
def test_a_read_sums_every_element(n: int) -> None:
    x = words(n)
    expected = int(x.view(np.uint32).sum(dtype=np.uint64)) % 2**32
    assert {_native.memory_read(x, threads=threads) for threads in (1, 2, 3)} == {expected}


@pytest.mark.parametrize("n", LENGTHS)
def test_a_copy_is_equal_to_the_bit(n: int) -> None:
    x, target = words(n), words(n, seed=1)
    _native.memory_copy(x, target, threads=2)
    assert same_bits(target, x)


@pytest.mark.parametrize("wide_source", [True, False])
@pytest.mark.parametrize("n", LENGTHS)
def test_an_update_subtracts_from_the_source_and_undoes_itself(n: int, wide_source: bool) -> None:
    targets = [halves(n, 1), halves(n, 2), words(n, 3), words(n, 4)]
    before = [target.copy() for target in targets]
    source = words(n, 5) if wide_source else halves(n, 5)
    _native.memory_update(targets, source, threads=2)
    for target, old in zip(targets, before, strict=True):
        unsigned = np.uint32 if target.dtype == np.float32 else np.uint16
        minuend = source.view(np.uint32 if wide_source else np.uint16).astype(np.uint64)
        expected = (minuend - old.view(unsigned).astype(np.uint64)).astype(unsigned)
        assert same_bits(target.view(unsigned), expected)
    _native.memory_update(targets, source, threads=1)
    assert all(same_bits(target, old) for target, old in zip(targets, before, strict=True))


def test_wrong_arrays_are_named() -> None:
    x = np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"^dst: 7 elements, but src has 8"):
        _native.memory_copy(x, x[:7].copy(), threads=1)
    with pytest.raises(ValueError, match=r"^dst: shares memory with dst"):
        _native.memory_update([x, x], x.copy(), threads=1)
    with pytest.raises(ValueError, match=r"^(dst|src): shares memory with (dst|src)"):
        _native.memory_update([x], x, threads=1)
    with pytest.raises(TypeError, match=r"^dst: the dtype must be float32 or uint16"):
        _native.memory_update([x.view(np.int32)], x, threads=1)
