"""The durable pages of a store as they were at one instant, handed out to be written while they change.

At that instant every page with content is *owed*. The writer takes owed pages from their frames, which nobody
may change meanwhile; pages that are not in DRAM are read into a buffer, so that they take no frame. Whoever
is about to change a page that is still owed copies it into a buffer first, or, if none is free, waits until
enough has been written. A buffer comes free by writing alone, never by a request of somebody else, so nobody
waits in a circle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol

from tierstream.io.errors import InvariantError
from tierstream.tiered.frames import Entry, Frame
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease

#: Pages on their way into buffers at once: one is read while the one before is written. Few, so that the
#: reads of the step do not queue behind them.
READS_AHEAD = 2


class Piece(NamedTuple):
    """One page to write.

    Attributes:
        page: which.
        array: its bytes at the instant of the capture, padding included.
        entry: its state in the store.
        buffer: what `array` lies in; None: its own frame.
    """

    page: Page
    array: Frame
    entry: Entry
    buffer: Frame | None


class Keeper(Protocol):
    """Whose pages are captured: `Cache`. Every method needs the store's lock."""

    def read_aside(self, entry: Entry, buffer: Frame) -> None:
        """Start to read a page into a buffer instead of a frame; `Capture.arrived` is told of its end."""
        ...

    def hold(self, entry: Entry) -> None:
        """Keep a page in its frame as it is, beside all requests."""
        ...

    def let_go(self, entry: Entry) -> None: ...

    def pump(self) -> None:
        """Something has become possible."""
        ...


class Capture:
    """Made by `Store.capture`, of which there is one at a time; a context manager. Thread-safe.

    Args:
        keeper: whose pages these are.
        layout: of all pages.
        entries: in the order in which they should be written; those without content are left out.
        buffers: for pages that are copied or read, each of them large enough for any page.
        lock: the store's.

    Attributes:
        layout: of all pages.
        pages: those that are captured.
        closed: another capture may begin.
    """

    def __init__(
        self,
        keeper: Keeper,
        layout: Layout,
        entries: Iterable[Entry],
        buffers: Iterable[Frame],
        lock: threading.Lock,
    ) -> None:
        self._keeper, self.layout = keeper, layout
        self._order = deque(entry for entry in entries if entry.durable and entry.stored)
        for entry in self._order:
            if entry.writer or entry.blank:
                raise InvariantError(f"{entry.page} is captured while it is being changed")
        for entry in self._order:
            entry.owed = True
        self.pages = [entry.page for entry in self._order]
        self._free = list(buffers)
        self._copies: deque[Piece] = deque()
        self._reading = 0
        #: buffers that are being filled
        self._filling = 0
        self._changed = threading.Condition(lock)
        self._error: BaseException | None = None
        self.closed = False

    # By the writer

    def take(self) -> Piece | None:
        """The next page to write, as soon as there is one; None: there is none left, or `close` was called.

        Raises:
            BaseException: what made the store fail.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                piece = self._next()
                if piece is not None or not (self._order or self._filling):
                    return piece
                self._changed.wait()

    def give_back(self, piece: Piece) -> None:
        """The piece is written; its array must not be used any more."""
        with self._changed:
            if piece.buffer is None:
                self._keeper.let_go(piece.entry)
            else:
                self._free.append(piece.buffer)
            self._changed.notify_all()
            self._keeper.pump()

    def close(self) -> None:
        """Nothing is owed any more, whether or not it was written; waits for copies under way."""
        with self._changed:
            while self._order:
                self._order.popleft().owed = False
            self._changed.notify_all()
            self._keeper.pump()
            while self._filling and self._error is None:
                self._changed.wait()
            self._copies.clear()
            self.closed = True

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # By the store, with its lock

    def admits(self, lease: Lease) -> bool:
        """Whether the holder may have the pages: what he would change is not owed, or can be copied now."""
        owed = _owed(lease)
        return len(owed) <= len(self._free) and not any(entry.fetched for entry in owed)

    def copies(self, lease: Lease) -> list[Callable[[], None]]:
        """What the holder has to do before he changes anything: without the lock, once the pages are filled.
        """
        owed = _owed(lease)
        for entry in owed:
            entry.owed = False
        self._filling += len(owed)
        return [partial(self._copy, entry, self._free.pop()) for entry in owed]

    def arrived(self, entry: Entry, buffer: Frame) -> None:
        """A read has ended well."""
        self._reading -= 1
        entry.owed = entry.fetched = False
        self._filled(entry, buffer)

    def fail(self, error: BaseException) -> None:
        """The store cannot go on."""
        self._error = self._error or error
        self._changed.notify_all()

    def _copy(self, entry: Entry, buffer: Frame) -> None:
        buffer[: entry.nbytes] = entry.view()
        with self._changed:
            self._filled(entry, buffer)

    def _filled(self, entry: Entry, buffer: Frame) -> None:
        self._filling -= 1
        self._copies.append(Piece(entry.page, buffer[: entry.nbytes], entry, buffer))
        self._changed.notify_all()

    def _next(self) -> Piece | None:
        """Copies first: they keep buffers from others. Then the order; nobody looks behind a page that needs
        a buffer while there is none.
        """
        if self._copies:
            return self._copies.popleft()
        while self._order:
            entry = self._order[0]
            if entry.owed and not entry.filling and entry.frame is not None:
                self._order.popleft()
                entry.owed = False
                self._keeper.hold(entry)
                return Piece(entry.page, entry.view(), entry, None)
            if entry.owed and not self._fetch(entry):
                return None
            self._order.popleft()
        return None

    def _fetch(self, entry: Entry) -> bool:
        """Read a page that is not in DRAM: what its file holds is what it held at the instant."""
        if self._reading >= READS_AHEAD or not self._free:
            return False
        self._reading += 1
        self._filling += 1
        entry.fetched = True
        self._keeper.read_aside(entry, self._free.pop())
        return True


def _owed(lease: Lease) -> list[Entry]:
    return [
        entry
        for entry, intent in zip(lease.entries, lease.intents, strict=True)
        if entry.owed and intent is not Intent.READ
    ]
