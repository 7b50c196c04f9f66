"""What direct I/O (O_DIRECT) asks of a file: alignment, a bounce buffer, and a file system that means it."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np

from tierstream.io import mounts, seam
from tierstream.io.seam import HostBytes

#: What nearly every file system and drive is content with, where the kernel does not tell.
_BLOCK_BYTES = 4096
#: Transfers whose buffer is not aligned go through a piece of this size per worker thread.
_BOUNCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DirectIO:
    """Whether and how a file takes direct I/O.

    Attributes:
        refusal: why it does not; empty where it does.
        memory_bytes: addresses must be multiples of this.
        block_bytes: offsets and lengths must be multiples of this.
    """

    refusal: str
    memory_bytes: int = _BLOCK_BYTES
    block_bytes: int = _BLOCK_BYTES


def examine(fd: int, status: os.stat_result) -> DirectIO:
    """What the kernel says about direct I/O on the open file `fd`, whose fstat is `status`."""
    # tmpfs accepts O_DIRECT since Linux 6.6 and serves it from the page cache all the same.
    filesystem = mounts.filesystem_of_device(status.st_dev)
    if filesystem in mounts.MEMORY_FILESYSTEMS:
        return DirectIO(f"{filesystem} keeps files in memory")
    answer = seam.current().statx_dioalign(fd)
    if answer is None:
        return DirectIO("")
    memory, offset = answer
    if not offset:
        return DirectIO(f"{filesystem or 'the file system'} does not support direct I/O on this file")
    # The block is never smaller than a page of the page cache: the unaligned ends of a request are written
    # through the page cache, whose page must not hold a stale copy of bytes that another request writes
    # directly.
    return DirectIO("", memory_bytes=memory, block_bytes=max(offset, _BLOCK_BYTES, mmap.PAGESIZE))


def aligned_buffer(nbytes: int) -> HostBytes:
    """A zeroed, page-aligned array in memory of its own."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def address_of(buffer: HostBytes) -> int:
    return buffer.ctypes.data


class BounceBuffers:
    """One page-aligned buffer per worker thread, made at first need and freed with the thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, block_bytes: int) -> HostBytes:
        """This thread's buffer, a whole number of blocks long."""
        buffer: HostBytes | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = aligned_buffer(max(_BOUNCE_BYTES, block_bytes))
        return buffer
