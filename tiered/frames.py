"""Frames of DRAM and the state of each page in them: who may do what, checked at every step.

    free -> filling -> ready <-> leased        (filling: a read or a zero fill is under way)
                       ready -> writing -> ready -> free

A page may be leased by readers and written back at the same time; a writer is alone. A page that fills may be
granted; its lease is handed over when the fill has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstream._native import crc32c
from tierstream.io.errors import BudgetError, InvariantError
from tierstream.tiered.arena import Arena, Register, Unregister
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout, Page, round_up
from tierstream.tiered.policy import NEVER

if TYPE_CHECKING:
    from tierstream.tiered.lease import Lease

Frame = NDArray[np.uint8]


class State(Enum):
    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LEASED = "leased"
    WRITING = "writing"


class Entry:
    """One page: where it is, who uses it, when it is used next. Every method needs the store's lock.

    Attributes:
        stored: it has content, in DRAM or on NVMe.
        dirty: the content in DRAM is newer than the chunk file.
        blank: it has a frame kept for the request at the head of the queue, which nobody else may see yet.
        pinned: the request at the head of the queue keeps it from eviction.
        victim: its write-back under way was started to free its frame.
        seal: checksum of its frame after the last fill or change; kept in debug mode only.
        demanded: it is read for the request at the head of the queue.
        prefetched: prefetch brought it, and it was not used since.
        owed: a capture wants its content as it is now (`tierstream.tiered.capture`).
        fetched: the capture is reading it from its file, which may not change meanwhile.
    """

    __slots__ = (
        "array", "blank", "content_bytes", "cursor", "demanded", "dirty", "durable", "fetched", "filling",
        "frame", "last_use", "later", "nbytes", "next_use", "owed", "padded", "page", "pinned", "prefetched",
        "readers", "requests", "seal", "stored", "uses", "victim", "waiters", "writer", "writing",
    )  # fmt: skip

    def __init__(self, page: Page, layout: Layout) -> None:
        spec = layout.spec(page.unit, page.plane)
        start, end = layout.page_span(page)
        self.page = page
        self.nbytes = layout.page_nbytes(page)
        self.content_bytes = (end - start) * spec.item_bytes
        self.durable = spec.durable
        self.frame: Frame | None = None
        self.array: Frame | None = None
        self.filling = False
        self.readers = 0
        self.writer = False
        self.writing = False
        self.stored = False
        self.dirty = False
        self.blank = False
        self.pinned = False
        self.victim = False
        #: the frame holds zeros where the page has padding
        self.padded = self.content_bytes == self.nbytes
        self.prefetched = False
        self.seal: int | None = None
        self.demanded = False
        self.owed = False
        self.fetched = False
        #: leases that were granted while it was filling
        self.waiters: list[Lease] = []
        #: queued requests that name it, oldest first
        self.requests: list[Lease] = []
        self.uses: Sequence[int] = ()
        self.later: Sequence[int] = ()
        self.cursor = 0
        self.next_use = NEVER
        self.last_use = 0

    @property
    def state(self) -> State:
        if self.frame is None:
            return State.FREE
        if self.filling:
            return State.FILLING
        if self.readers or self.writer:
            return State.LEASED
        return State.WRITING if self.writing else State.READY

    @property
    def idle(self) -> bool:
        """Resident, and nobody and no transfer has to do with it."""
        return not (self.frame is None or self.readers or self.writer or self.filling or self.writing)

    def view(self) -> Frame:
        """The page's bytes in its frame."""
        if self.array is None:
            raise self._illegal("used")
        return self.array

    def content(self) -> Frame:
        """The page's bytes without padding."""
        return self.view()[: self.content_bytes]

    def bind(self, frame: Frame, *, filling: bool) -> None:
        if self.frame is not None or self.readers or self.writer or self.writing:
            raise self._illegal("given a frame")
        self.frame = frame
        self.array = frame if len(frame) == self.nbytes else frame[: self.nbytes]
        self.filling = filling

    def unbind(self) -> Frame:
        frame = self.frame
        if frame is None or not self.idle or self.pinned:
            raise self._illegal("evicted")
        self.frame = self.array = None
        self.blank = self.prefetched = False
        self.seal = None
        return frame

    def start_fill(self) -> None:
        if not self.idle:
            raise self._illegal("filled")
        self.filling = True

    def end_fill(self) -> None:
        if not self.filling:
            raise self._illegal("reported as filled")
        self.filling = False

    def start_write(self, *, victim: bool) -> None:
        if self.frame is None or self.filling or self.writer or self.writing or not self.stored:
            raise self._illegal("written back")
        self.writing = True
        self.victim = victim

    def end_write(self) -> None:
        if not self.writing or self.writer:
            raise self._illegal("reported as written back")
        self.writing = self.victim = False

    def lease(self, *, alone: bool) -> None:
        if self.frame is None or self.blank or self.writer or (alone and (self.readers or self.writing)):
            raise self._illegal("leased")
        if alone:
            self.writer = True
        else:
            self.readers += 1

    def unlease(self, *, alone: bool) -> None:
        if self.frame is None or self.filling or (not self.writer if alone else self.readers <= 0):
            raise self._illegal("released")
        if alone:
            self.writer = False
        else:
            self.readers -= 1

    def set_seal(self) -> None:
        """Remember what the frame holds."""
        self.seal = crc32c(self.view().data)

    def check_seal(self) -> None:
        """InvariantError if the frame was changed since, by somebody who had no right to."""
        if self.seal is not None and crc32c(self.view().data) != self.seal:
            raise InvariantError(f"{self.page} was changed outside a lease to change it")

    def _illegal(self, action: str) -> InvariantError:
        return InvariantError(
            f"{self.page} cannot be {action}: it is {self.state.value} (readers={self.readers}, "
            f"writer={self.writer}, writing={self.writing}, filling={self.filling}, pinned={self.pinned})"
        )


class FramePool(Protocol):
    """Hands out the frames of an arena."""

    arena: Arena
    #: frames that exist
    count: int
    #: a frame is only ever given to the one page
    private: bool

    def take(self, page: Page) -> Frame | None:
        """A frame for the page, or None if one must be evicted first."""
        ...

    def give(self, frame: Frame) -> None: ...

    @property
    def available(self) -> int:
        """Frames that are free now."""
        ...


class UniformPool:
    """Frames of one size, any of which holds any page: for a store with NVMe behind it."""

    private = False

    def __init__(
        self,
        layout: Layout,
        dram_bytes: int,
        register: Register | None = None,
        unregister: Unregister | None = None,
    ) -> None:
        pages = sum(layout.page_count(*key) for key in layout.planes)
        self.count = min(dram_bytes // layout.page_bytes, pages)
        if self.count < min(1, pages):
            raise BudgetError(
                f"the DRAM budget of {dram_bytes} bytes holds no page of {layout.page_bytes} bytes: "
                "raise the DRAM budget or lower page_bytes"
            )
        self.arena = Arena([layout.page_bytes] * self.count, register=register, unregister=unregister)
        self._free = self.arena.frames[::-1]

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, page: Page) -> Frame | None:
        return self._free.pop() if self._free else None

    def give(self, frame: Frame) -> None:
        self._free.append(frame)


class HomePool:
    """A frame for every page, of the page's own size: for a store whose home is DRAM. Nothing is evicted."""

    private = True

    def __init__(
        self,
        layout: Layout,
        dram_bytes: int,
        register: Register | None = None,
        unregister: Unregister | None = None,
    ) -> None:
        pages = [page for key in layout.planes for page in layout.pages(*key)]
        sizes = [round_up(layout.page_nbytes(page), PAGE_ALIGN_BYTES) for page in pages]
        if sum(sizes) > dram_bytes:
            raise BudgetError(
                f"without an NVMe directory all state must fit in DRAM: it needs {sum(sizes)} bytes, the "
                f"DRAM budget is {dram_bytes} bytes: raise the DRAM budget or give an NVMe directory"
            )
        self.count = len(pages)
        self.arena = Arena(sizes, register=register, unregister=unregister)
        self._frames = dict(zip(pages, self.arena.frames, strict=True))
        self._taken = 0

    @property
    def available(self) -> int:
        return self.count - self._taken

    def take(self, page: Page) -> Frame | None:
        self._taken += 1
        return self._frames[page]

    def give(self, frame: Frame) -> None:
        self._taken -= 1
