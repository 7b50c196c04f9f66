"""A bounded set of open handles: the most recently used stay open, whatever the number of files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from tierstream.io.limits import open_files

_Key = TypeVar("_Key", bound=Hashable)
_Handle = TypeVar("_Handle")

#: Handles kept open at most, where the process may have that many.
_HANDLES_MAX = 256
_HANDLES_MIN = 8


def handle_limit(descriptors_per_handle: int = 1) -> int:
    """Handles that all caches together may keep open: a quarter of what `ulimit -n` grants, in [8, 256]."""
    soft = open_files().soft
    if soft is None:
        return _HANDLES_MAX
    return max(_HANDLES_MIN, min(_HANDLES_MAX, soft // (4 * descriptors_per_handle)))


class _Slot(Generic[_Handle]):
    __slots__ = ("borrowers", "handle")

    def __init__(self, handle: _Handle) -> None:
        self.handle = handle
        self.borrowers = 1


#: Caches that are not closed: one per backend that is open, or two.
_CACHES: WeakSet[HandleCache[Any, Any]] = WeakSet()


class HandleCache(Generic[_Key, _Handle]):
    """Opens handles on demand and closes the least recently used beyond its share of `limit`.

    A borrowed handle is never closed, so up to one handle per borrowing thread can be open beyond that.
    Thread-safe; no lock is held while a handle is opened or closed.

    Args:
        limit: handles kept open while nobody uses them, by all caches of the process together; each keeps at
            least a few.
        close: closes a handle; an `OSError` of it is for the callback to deal with.
    """

    def __init__(self, limit: int, close: Callable[[_Key, _Handle], None]) -> None:
        self._limit = limit
        self._close_handle = close
        self._slots: OrderedDict[_Key, _Slot[_Handle]] = OrderedDict()
        self._lock = threading.Lock()
        _CACHES.add(self)

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def borrow(self, key: _Key, open_handle: Callable[[], _Handle]) -> Iterator[_Handle]:
        """The handle of `key`, opened if it is not, for the time of the `with` block."""
        slot = self._take(key)
        if slot is None:
            slot = self._insert(key, open_handle())
        try:
            yield slot.handle
        finally:
            with self._lock:
                slot.borrowers -= 1
                self._slots.move_to_end(key)
                surplus = self._surplus()
            self._close_all(surplus)

    def drop(self, key: _Key) -> None:
        """Closes the handle of `key`, if it is open. Nobody may be using it."""
        with self._lock:
            slot = self._slots.pop(key, None)
        if slot is not None:
            self._close_handle(key, slot.handle)

    def close(self) -> None:
        """Closes every handle. Nobody may be using one."""
        with self._lock:
            slots = list(self._slots.items())
            self._slots.clear()
        _CACHES.discard(self)
        self._close_all([(key, slot.handle) for key, slot in slots])

    def _take(self, key: _Key) -> _Slot[_Handle] | None:
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                slot.borrowers += 1
            return slot

    def _insert(self, key: _Key, handle: _Handle) -> _Slot[_Handle]:
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot(handle)
                return slot
            slot.borrowers += 1
        # Another thread opened the same file meanwhile: its handle is the one.
        self._close_handle(key, handle)
        return slot

    def _surplus(self) -> list[tuple[_Key, _Handle]]:
        surplus = len(self._slots) - max(_HANDLES_MIN, self._limit // max(1, len(_CACHES)))
        if surplus <= 0:
            return []
        idle = [key for key, slot in self._slots.items() if not slot.borrowers][:surplus]
        return [(key, self._slots.pop(key).handle) for key in idle]

    def _close_all(self, handles: list[tuple[_Key, _Handle]]) -> None:
        for key, handle in handles:
            self._close_handle(key, handle)
