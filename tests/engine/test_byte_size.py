from __future__ import annotations

import copy
import json
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.engine.byte_size import MAX_BYTES, ByteSize

UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
sizes = st.integers(0, MAX_BYTES)


@given(sizes)
def test_text_reads_back_as_the_same_number(nbytes: int) -> None:
    assert ByteSize(str(ByteSize(nbytes))) == nbytes


@given(
    st.integers(0, 4000), st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.booleans(), st.booleans()
)
def test_a_number_with_a_unit_is_exact_to_the_byte(
    whole: int, thousandths: int, unit: str, space: bool, lower: bool
) -> None:
    text = f"{whole}.{thousandths:03d}{' ' if space else ''}{unit.lower() if lower else unit}"
    assert ByteSize(text) == round((whole + Fraction(thousandths, 1000)) * UNITS[unit])


@pytest.mark.parametrize(
    ("given_text", "nbytes", "printed"),
    [
        ("8GiB", 8 << 30, "8 GiB"),
        ("512 MiB", 512 << 20, "512 MiB"),
        ("1.5GB", 1_500_000_000, "1.5 GB"),
        (".5kB", 500, "500 B"),
        ("1048576", 1 << 20, "1 MiB"),
        ("1048577", (1 << 20) + 1, "1048577 B"),
        ("0.3GiB", 322_122_547, "322122547 B"),
        ("0", 0, "0 B"),
        (" 2 tib ", 2 << 40, "2 TiB"),
        (str(MAX_BYTES), MAX_BYTES, f"{MAX_BYTES} B"),
    ],
)
def test_reads_and_prints(given_text: str, nbytes: int, printed: str) -> None:
    size = ByteSize(given_text)
    assert size == nbytes
    assert (str(size), f"{size}", repr(size)) == (printed, printed, f"ByteSize('{printed}')")


@pytest.mark.parametrize(
    "text", ["", "8G", "8 gigs", "GiB", "-1", "1e9", "1 2", "8  GiB", "8GiB/s", "٣ GiB", "0x10"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        ByteSize(text)


@pytest.mark.parametrize("value", [-1, MAX_BYTES + 1, "9000000 TiB", str(MAX_BYTES + 1)])
def test_out_of_range_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="is not between 0 and"):
        ByteSize(value)


@given(sizes)
def test_is_a_plain_number_to_everybody_else(nbytes: int) -> None:
    size = ByteSize(nbytes)
    assert json.loads(json.dumps(size)) == nbytes
    assert pickle.loads(pickle.dumps(size)) == nbytes
    assert copy.deepcopy(size) == nbytes
    assert type(size + 0) is int
    assert hash(size) == hash(nbytes)
