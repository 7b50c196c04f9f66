"""Sizes in bytes as people write them: `8GiB`, `512 MiB`, `1.5GB`, `1048576`. Knows nothing of torch."""

from __future__ import annotations

import re
from fractions import Fraction

_UNIT_BYTES = {
    "PiB": 2**50, "TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10,
    "PB": 10**15, "TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1,
}  # fmt: skip
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in _UNIT_BYTES.items()}
_PATTERN = re.compile(r"([0-9]{1,19}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}) ?([A-Za-z]*)")
#: Offsets and lengths of files are signed 64-bit numbers.
MAX_BYTES = 2**63 - 1


class ByteSize(int):
    """A number of bytes that reads and prints with a unit.

    `ByteSize("8GiB")` takes binary units (KiB to PiB, powers of 1024) and decimal ones (kB to PB, powers of
    1000), in any case, with or without one space; a number without a unit is bytes. Rounds to the nearest
    byte. `str()` gives a text that reads back as the same number: `8 GiB`, `1.5 GB`, `1048577 B`. Arithmetic
    gives plain ints.

    Raises:
        ValueError: the text is no size, or the number is negative or above `MAX_BYTES`.
    """

    __slots__ = ()

    def __new__(cls, value: int | str) -> ByteSize:
        nbytes = _parse(value) if isinstance(value, str) else value
        if not 0 <= nbytes <= MAX_BYTES:
            raise ValueError(f"{value!r} is not between 0 and {MAX_BYTES} bytes")
        return super().__new__(cls, nbytes)

    def __str__(self) -> str:
        nbytes = int(self)
        texts = []
        for unit, unit_bytes in _UNIT_BYTES.items():
            thousandths, rest = divmod(nbytes * 1000, unit_bytes)
            if rest == 0 and (thousandths >= 1000 or unit == "B"):
                number = f"{thousandths // 1000}.{thousandths % 1000:03d}".rstrip("0").rstrip(".")
                texts.append(f"{number} {unit}")
        return min(texts, key=len)  # at equal length the largest unit, binary before decimal

    def __repr__(self) -> str:
        return f"ByteSize({str(self)!r})"


def _parse(text: str) -> int:
    match = _PATTERN.fullmatch(text.strip())
    unit_bytes = _BY_LOWER_CASE.get((match[2] or "B").lower()) if match else None
    if match is None or unit_bytes is None:
        raise ValueError(f"{text!r} is not a size in bytes")
    return round(Fraction(match[1]) * unit_bytes)
