"""Whether a drive gives back what was written to it: checksums of written pages, kept in memory.

Drives and their links check their own data, but not the way to them: firmware that loses or misplaces a write
reports success (Bairavasundaram et al., "An Analysis of Data Corruption in the Storage Stack", FAST 2008). A
page is trained on at once, and wrong bytes in it would be in every later checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstream._native import crc32c
from tierstream.io import mounts
from tierstream.io.errors import CorruptionError
from tierstream.tiered.layout import Page

ReadBackMode: TypeAlias = Literal["off", "sampled", "full"]
#: Per block of a page, from its start.
Checksums: TypeAlias = NDArray[np.uint32]

#: Bytes under one checksum: the grain in which damage is named.
BLOCK_BYTES = 1 << 20
#: `sampled` checks one write of a page in so many.
SAMPLE_PERIOD = 8


def block_checksums(frame: NDArray[np.uint8]) -> Checksums:
    """CRC-32C of each block of a page; the last block may be shorter. Other threads run meanwhile."""
    starts = range(0, len(frame), BLOCK_BYTES)
    return np.array([crc32c(frame[start : start + BLOCK_BYTES].data) for start in starts], dtype=np.uint32)


class ReadBack:
    """Which writes are checked, and the checksums of those that were. Thread-safe.

    - "full": every write.
    - "sampled": of any eight writes of a page in a row exactly one, so each page has its turn, and of
      eight pages that follow each other one per round. Which of the eight it is follows from the page's place
      in `pages` alone, shifted by one every eight pages so that the pages of one drive have their turns in
      different rounds too.
    - "off": none.

    A write that is not checked forgets the checksums of the page's content before it.

    Args:
        mode: see above.
        pages: all pages, in the order in which they are spread over the drives.
    """

    def __init__(self, mode: ReadBackMode, pages: Iterable[Page]) -> None:
        self._mode = mode
        self._known: dict[Page, Checksums] = {}
        #: writes of the page that go unchecked before the next one that is
        self._unchecked_left: dict[Page, int] = {}
        if mode == "sampled":
            self._unchecked_left = {
                page: (number + number // SAMPLE_PERIOD) % SAMPLE_PERIOD for number, page in enumerate(pages)
            }
        self._lock = threading.Lock()

    def choose(self, page: Page) -> bool:
        """Whether the write of the page that begins now is checked: if so, `remember` follows its end."""
        if self._mode == "off":
            return False
        with self._lock:
            self._known.pop(page, None)
            if self._mode == "full":
                return True
            left = self._unchecked_left[page]
            self._unchecked_left[page] = (left or SAMPLE_PERIOD) - 1
            return left == 0

    def remember(self, page: Page, frame: NDArray[np.uint8]) -> None:
        """Keep the checksums of what was just written. The frame is still that: a page is not leased to a
        writer before the store has heard of the end of its write.
        """
        checksums = block_checksums(frame)
        with self._lock:
            self._known[page] = checksums

    def recall(self, checksums: Mapping[Page, Checksums | None]) -> None:
        """What was known of these pages when they were written by an earlier process."""
        if self._mode != "off":
            self._known.update({page: sums for page, sums in checksums.items() if sums is not None})

    def known(self, page: Page) -> Checksums | None:
        """Checksums of the page's last write, if it was checked."""
        with self._lock:
            return self._known.get(page)


def compare(page: Page, frame: NDArray[np.uint8], written: Checksums, *, path: str, directory: str) -> None:
    """See whether the frame, just read, holds what was written.

    Args:
        page: the page.
        frame: its bytes as read.
        written: checksums when it was written.
        path: its chunk file.
        directory: of the drive.

    Raises:
        CorruptionError: it does not; names drive, file, bytes, page, checksums and remedy.
    """
    read = block_checksums(frame)
    wrong = np.flatnonzero(read != written)
    if not len(wrong):
        return
    block = int(wrong[0])
    start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(frame))
    mount = mounts.mount_of(directory)
    device = mount.source if mount is not None else ""
    raise CorruptionError(
        "checking",
        path,
        offset=start,
        detail=f"bytes [{start}, {stop}) of page {page.index} of plane {page.plane} of unit {page.unit} came "
        f"back other than they were written (CRC-32C {int(written[block]):#010x} written, "
        f"{int(read[block]):#010x} read; {len(wrong)} of {len(read)} blocks of the page), and the drive of "
        f"{directory}{f' ({device})' if device else ''} reported no error: check it with `smartctl -a "
        f"{device if device.startswith('/dev/') else 'DEVICE'}` and the host's memory, and resume from the "
        "last checkpoint, with the state on another drive if it happens again",
    )


def followed_by(future: Future[int], check: Callable[[], None]) -> Future[int]:
    """A future that resolves as `future` does, but after `check`, whose error it takes on.

    `check` runs in the thread that resolves `future`, a worker of the backend; only if that happened before
    this call, in the caller's.
    """
    outer: Future[int] = Future()
    outer.set_running_or_notify_cancel()  # as the futures of backends, it refuses cancel()

    def ended(inner: Future[int]) -> None:
        error = inner.exception()
        if error is None:
            try:
                check()
            except BaseException as raised:
                error = raised
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())

    future.add_done_callback(ended)
    return outer
