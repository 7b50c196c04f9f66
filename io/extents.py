"""Whether the bytes of a file really lie on the drive. Reading a hole, or space that was reserved and never
written, costs the drive nothing, and measures nothing.

Source: the kernel's Documentation/filesystems/fiemap.rst.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from tierstream.io import seam
from tierstream.io.backend import PathLike
from tierstream.io.errors import StorageError, storage_errors
from tierstream.io.sizes import format_bytes

_FS_IOC_FIEMAP = 0xC020660B
_FLAG_SYNC = 0x1
_EXTENT_LAST = 0x1
_EXTENT_ENCODED = 0x8
_EXTENT_UNWRITTEN = 0x800
_HEADER = struct.Struct("=QQIIII")
_EXTENT = struct.Struct("=QQQQQIIII")
_EXTENTS_PER_CALL = 256
#: st_blocks counts units of this size (stat(2)).
_STAT_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of a file by how they are kept.

    Attributes:
        nbytes: length of the file.
        hole_bytes: not allocated at all.
        unwritten_bytes: reserved (fallocate(2)) and never written: read as zeros without the drive.
        encoded_bytes: compressed or otherwise changed by the file system.
    """

    nbytes: int
    hole_bytes: int
    unwritten_bytes: int
    encoded_bytes: int


def allocation(path: PathLike) -> Allocation:
    """Looks at the extents of the file, or, where the file system does not tell them, at its allocated
    blocks.

    Raises:
        StorageError: it cannot be opened.
    """
    name, calls = os.fspath(path), seam.current()
    with storage_errors("looking at", name):
        fd = calls.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            calls.fsync(fd)  # bytes that still wait in the page cache have no place on the drive yet
            status = calls.fstat(fd)
            extents = _extents(fd, status.st_size)
        finally:
            calls.close(fd)
    nbytes = status.st_size
    if extents is None:
        allocated = min(nbytes, status.st_blocks * _STAT_BLOCK_BYTES)
        return Allocation(nbytes, nbytes - allocated, 0, 0)
    known = [(min(end, nbytes) - start, flags) for start, end, flags in extents if start < nbytes]
    return Allocation(
        nbytes,
        nbytes - sum(length for length, _ in known),
        sum(length for length, flags in known if flags & _EXTENT_UNWRITTEN),
        sum(length for length, flags in known if flags & _EXTENT_ENCODED),
    )


def check_written(path: PathLike) -> None:
    """Refuses a file that a read would not really fetch from its drive.

    Raises:
        StorageError: it has holes, reserved space that was never written, or compressed parts; says how many
            bytes.
    """
    found = allocation(path)
    for nbytes, what in (
        (found.hole_bytes, "are holes (a sparse file)"),
        (found.unwritten_bytes, "were reserved and never written (fallocate)"),
        (found.encoded_bytes, "are compressed by the file system"),
    ):
        if nbytes:
            detail = (
                f"{format_bytes(nbytes)} of its {format_bytes(found.nbytes)} {what}: reading them says "
                "nothing of the drive; use a file whose bytes were really written"
            )
            raise StorageError("measuring", os.fspath(path), detail=detail)


def _extents(fd: int, nbytes: int) -> list[tuple[int, int, int]] | None:
    """(start, end, flags) of every extent; None where the file system does not tell."""
    result: list[tuple[int, int, int]] = []
    position = 0
    while position < nbytes:
        request = bytearray(_HEADER.size + _EXTENTS_PER_CALL * _EXTENT.size)
        _HEADER.pack_into(request, 0, position, nbytes - position, _FLAG_SYNC, 0, _EXTENTS_PER_CALL, 0)
        try:
            seam.current().ioctl(fd, _FS_IOC_FIEMAP, request)
        except OSError:
            return None
        count = _HEADER.unpack_from(request)[3]
        if not count:
            break
        for index in range(count):
            fields = _EXTENT.unpack_from(request, _HEADER.size + index * _EXTENT.size)
            start, length, flags = fields[0], fields[2], fields[5]
            result.append((start, start + length, flags))
        position = result[-1][1]
        if result[-1][2] & _EXTENT_LAST:
            break
    return result
