"""What a caller of the store holds: the right to some pages for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstream.tiered.layout import Page

if TYPE_CHECKING:
    from tierstream.tiered.frames import Entry


class Intent(Enum):
    """What the holder of a lease does with a page."""

    #: page content, unchanged at release; shared with other readers
    READ = "read"
    #: page content, modified by release; alone
    UPDATE = "update"
    #: content undefined at first, all of it written by release; alone
    OVERWRITE = "overwrite"
    #: page content, gone after release: the frame is freed and nothing is written back; alone; step-local
    #: pages only
    CONSUME = "consume"


class Releaser(Protocol):
    def release(self, lease: Lease) -> None: ...


class Lease:
    """Pages held by one caller from `Store.acquire` to `Store.release`; also a context manager.

    Attributes:
        pages: the pages, in the order of the request.
        arrays: per page a uint8 array of its bytes, at an address that is a multiple of 4096; valid until
            release. Bytes past the end of the plane in its last page are padding, which is zero: those who
            may write do not get it, and READ gives `layout.page_nbytes(page)` bytes with it.
    """

    __slots__ = (
        "arrays", "blocked_on", "copies", "entries", "error", "event", "granted", "held", "intents",
        "overtaken", "owner", "paddings", "pages", "pinned", "scheduled", "unfilled", "zeroes",
    )  # fmt: skip

    def __init__(
        self, owner: Releaser, pages: list[Page], entries: list[Entry], intents: list[Intent], scheduled: bool
    ) -> None:
        self.owner = owner
        self.pages = pages
        self.arrays: list[NDArray[np.uint8]] = []
        # What follows belongs to the store.
        self.entries = entries
        self.intents = intents
        self.scheduled = scheduled
        #: the frames are there and the pages are marked as leased
        self.granted = False
        #: the caller has it, and has not given it back
        self.held = False
        #: this request is at the head of the queue and keeps its resident pages from eviction
        self.pinned = False
        #: pages whose read has not ended
        self.unfilled = 0
        #: granted pages that start as zeros; the caller's thread fills them
        self.zeroes: list[Entry] = []
        #: granted pages that are overwritten in a frame with who knows what in their padding; the caller's
        #: thread clears it
        self.paddings: list[Entry] = []
        #: what the caller's thread has to do for a capture before the caller may change anything
        self.copies: list[Callable[[], None]] = []
        #: requests granted ahead of this one while it was at the head
        self.overtaken = 0
        #: index of the page that kept it from overtaking the last time
        self.blocked_on = 0
        self.error: BaseException | None = None
        #: set on every change that the waiting caller must see; None while nobody waits
        self.event: threading.Event | None = None

    def wake(self) -> None:
        if self.event is not None:
            self.event.set()

    def release(self) -> None:
        """Give the pages back; `arrays` must not be used any more."""
        self.owner.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.owner.release(self)
