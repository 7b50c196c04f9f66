"""Reads pages of a snapshot front to back, and tells damage by the checksum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierstream._native import crc32c
from tierstream.io.errors import DamagedPageError
from tierstream.tiered.hierarchy import chunk_path
from tierstream.tiered.layout import Page
from tierstream.tiered.manifest import Manifest

#: Bytes that are read at once where the target is only a scratch buffer.
SCRATCH_BYTES = 8 << 20

Bytes = NDArray[np.uint8]
#: Fill the array from a file, starting at a byte offset.
ReadAt = Callable[[str, Bytes, int], None]


class PageReader:
    """One page: `read` what comes next, then `finish`.

    Args:
        manifest: of the snapshot.
        root: its directory.
        page: the page.
        read_at: moves the bytes.
        scratch: buffer for bytes that nobody wants but the checksum.
    """

    def __init__(self, manifest: Manifest, root: str, page: Page, read_at: ReadAt, scratch: Bytes) -> None:
        self.page = page
        self.path, self._root = chunk_path(root, *page), root
        self._expected = manifest.checksums[page]
        self._nbytes = manifest.layout.page_nbytes(page)
        self._read_at = read_at
        self._scratch = scratch
        self._done = 0
        self._crc = 0

    def read(self, target: Bytes) -> None:
        """Fill `target` with the next bytes of the page."""
        if self._expected is None:
            target.fill(0)
        else:
            self._read_at(self.path, target, self._done)
            self._crc = crc32c(target.data, self._crc)
        self._done += len(target)

    def skip(self, nbytes: int) -> None:
        """Pass over bytes, which still count for the checksum."""
        if self._expected is None:
            self._done += nbytes
            return
        while nbytes > 0:
            part = self._scratch[: min(nbytes, len(self._scratch))]
            self.read(part)
            nbytes -= len(part)

    def finish(self) -> None:
        """Read the rest of the page.

        Raises:
            DamagedPageError: the page is not what was written.
        """
        self.skip(self._nbytes - self._done)
        if self._expected is not None and self._crc != self._expected:
            page = self.page
            raise DamagedPageError(
                f"{self.path} is damaged: page {page.index} of plane {page.unit}/{page.plane} has CRC-32C "
                f"{self._crc:#010x}, its manifest says {self._expected:#010x}; use another checkpoint",
                self._root,
            )


class PlaneReader:
    """A whole plane, front to back, whatever the pieces in which it is wanted."""

    def __init__(
        self, manifest: Manifest, root: str, unit: str, plane: str, read_at: ReadAt, scratch: Bytes
    ) -> None:
        self._layout = manifest.layout
        self._checksums = manifest.checksums
        self._unit, self._plane = unit, plane
        self._open: Callable[[int], PageReader] = lambda index: PageReader(
            manifest, root, Page(unit, plane, index), read_at, scratch
        )
        self._position = 0
        self._page: PageReader | None = None

    def is_zero(self, nbytes: int) -> bool:
        """Whether the next bytes are all in pages of zeros that have no file."""
        page_bytes = self._layout.page_bytes
        indices = range(self._position // page_bytes, -(-(self._position + nbytes) // page_bytes))
        return all(self._checksums[Page(self._unit, self._plane, index)] is None for index in indices)

    def pass_zeros(self, nbytes: int) -> None:
        """Pass over bytes for which `is_zero` holds."""
        self._position += nbytes
        self._page = None

    def read(self, target: Bytes) -> None:
        """Fill `target` with the next bytes of the plane.

        Raises:
            DamagedPageError: a page that ends in them is.
        """
        page_bytes = self._layout.page_bytes
        end = self._layout.spec(self._unit, self._plane).nbytes
        done = 0
        while done < len(target):
            index, inside = divmod(self._position, page_bytes)
            if self._page is None:
                self._page = self._open(index)
            part = target[done : done + page_bytes - inside]
            self._page.read(part)
            done += len(part)
            self._position += len(part)
            if self._position % page_bytes == 0 or self._position == end:
                self._page.finish()
                self._page = None
