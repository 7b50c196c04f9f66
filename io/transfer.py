"""The loop around one read or write call: short counts go on, interrupted calls are retried, errors name path
and offset.

The kernel moves at most 0x7ffff000 bytes per call (read(2), write(2)) and may always move fewer than asked.
"""

from __future__ import annotations

import errno
from enum import Enum

from tierstream.io import seam
from tierstream.io.errors import StorageError
from tierstream.io.seam import HostBytes


class Direction(Enum):
    READ = "reading"
    WRITE = "writing"


def transfer_some(
    direction: Direction, fd: int, path: str, buffer: HostBytes, offset: int, *, block_bytes: int = 1
) -> int:
    """Moves `buffer` from or to `offset`, call after call, and returns the bytes done.

    Fewer than asked only where this descriptor cannot go on: a call moved nothing, or, with direct I/O, ended
    within a block of `block_bytes`.

    Raises:
        StorageError: a call failed; with path, offset of the call and errno.
    """
    done = 0
    while done < buffer.nbytes:
        calls = seam.current()
        call = calls.preadv if direction is Direction.READ else calls.pwritev
        try:
            count = call(fd, buffer[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as cause:
            raise StorageError(direction.value, path, cause, offset=offset + done) from cause
        done += count
        if count == 0 or count % block_bytes:
            break
    return done


def transfer_all(direction: Direction, fd: int, path: str, buffer: HostBytes, offset: int) -> None:
    """Moves the whole `buffer` from or to `offset`.

    Raises:
        StorageError: a call failed, or the file ended first; with path, offset where it stopped and errno.
    """
    done = transfer_some(direction, fd, path, buffer, offset)
    if done == buffer.nbytes:
        return
    stopped = offset + done
    if direction is Direction.WRITE:
        cause = OSError(errno.EIO, "the kernel wrote nothing")
        raise StorageError(direction.value, path, cause, offset=stopped)
    raise end_of_file(path, offset, buffer.nbytes, file_bytes=seam.current().fstat(fd).st_size)


def end_of_file(path: str, offset: int, nbytes: int, *, file_bytes: int) -> StorageError:
    """The error of a read of `nbytes` at `offset` from a file that has only `file_bytes`."""
    detail = (
        f"the file ends at byte {file_bytes}, but bytes {offset} to {offset + nbytes} were wanted: "
        "it is truncated, or still being written"
    )
    return StorageError(Direction.READ.value, path, offset=max(offset, file_bytes), detail=detail)
