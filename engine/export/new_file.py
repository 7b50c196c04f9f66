"""A file that is written once, front to back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tierstream.io import seam
from tierstream.io.errors import storage_errors
from tierstream.io.transfer import Direction, transfer_all


class NewFile:
    """Context manager over a file that did not exist. It is durable only once its directory is published.

    Raises:
        StorageError: creating, writing or closing failed, with path and offset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        with storage_errors("creating", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = seam.current().open(str(path), flags)

    def append(self, values: NDArray[np.generic]) -> None:
        """Write the elements of a contiguous array, in the byte order of the machine (little-endian)."""
        flat = values.reshape(-1).view(np.uint8)
        transfer_all(Direction.WRITE, self._fd, str(self.path), flat, self.nbytes)
        self.nbytes += flat.nbytes

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(OSError):
                seam.current().close(self._fd)
            return
        with storage_errors("closing", self.path):  # some file systems report a full drive only here
            seam.current().close(self._fd)
