"""PNG files, as far as tests look into them."""

from __future__ import annotations

import struct


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height in pixels; fails on what is no PNG (ISO/IEC 15948, 5.2 and 11.2.1)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert png.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    return width, height
