"""CRC-32C against published values and google_crc32c."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream._native import crc32c

DATA = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)
STRIPES = 3 * 2048  # bytes that the hardware path takes at once


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next three: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("start", [0, 1, 4, 7])
@pytest.mark.parametrize("nbytes", [*range(20), STRIPES - 1, STRIPES, STRIPES + 1, 2 * STRIPES + 8, 299_000])
def test_equals_google_crc32c(start: int, nbytes: int) -> None:
    part = DATA[start : start + nbytes]
    assert crc32c(part) == google_crc32c.value(part.tobytes())


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_seed_continues_a_checksum(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@pytest.mark.parametrize("cut", [1, STRIPES, STRIPES + 3, 100_000])
def test_seed_continues_a_long_checksum(cut: int) -> None:
    assert crc32c(DATA[cut:], seed=crc32c(DATA[:cut])) == google_crc32c.value(DATA.tobytes())


@pytest.mark.parametrize("buffer", [bytes(10), bytearray(10), memoryview(bytes(10)), np.zeros(10, np.uint8)])
def test_any_buffer_of_bytes(buffer: object) -> None:
    assert crc32c(buffer) == google_crc32c.value(bytes(10))
