"""Byte counts for people."""

from __future__ import annotations


def format_bytes(nbytes: int) -> str:
    """`nbytes` in the largest binary unit not above it: 83886080 gives "80.00 MiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{int(nbytes)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
