"""Which drive holds which page: in proportion to the traffic that each drive can carry, within its space."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierstream.io.errors import InvariantError, StorageError
from tierstream.io.sizes import format_bytes

_Page = TypeVar("_Page", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A directory that takes a share of the pages.

    Attributes:
        directory: its path; named in errors.
        weight: share of the traffic that it should carry, relative to the others: its bandwidth.
        capacity_bytes: free space of its file system.
        volume: which file system that is; roots of one volume share its space.
    """

    directory: str
    weight: float
    capacity_bytes: int
    volume: Hashable

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise InvariantError(f"{self.directory}: weight {self.weight} is not positive and finite")


class Spread(Generic[_Page]):
    """A root for every page; it depends on the order of roots and pages alone.

    Each page goes to the root where (bytes so far + page) / weight is least, among those that have room for
    it and no more than their share so far; the first of equals. This is the quota method of apportionment
    (Balinski and Young, Am. Math. Monthly 82, 1975): with room, after every page each root is within one page
    of its share, so that reading pages in order keeps all drives busy in proportion. Without the second
    condition a heavy root among many light ones runs several pages ahead.

    Args:
        roots: one per drive, at least one.
        pages: the pages and their bytes; all of them must find room.
        loose: more pages, placed after `pages` by the same rule; space is not promised to them (files that
            may never be made). Where no root has room, weights alone decide.
        placed: of `pages` that are somewhere already: the position of their root, whose `capacity_bytes`
            counts them as free.

    Attributes:
        nbytes: bytes of `pages` on each root.

    Raises:
        StorageError: no root has room for one of `pages`; names each root with its need and its free space.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        pages: Iterable[tuple[_Page, int]],
        loose: Iterable[tuple[_Page, int]] = (),
        placed: Mapping[_Page, int] | None = None,
    ) -> None:
        self._roots = tuple(roots)
        self._weight = sum(root.weight for root in roots)
        self._filled = [0] * len(roots)
        self._total = 0
        self._free = {root.volume: root.capacity_bytes for root in roots}
        self._index_of: dict[_Page, int] = {}
        firm = list(pages)
        for page, nbytes in firm:
            having_room = self._having_room(nbytes)
            if placed and page in placed:
                having_room = [placed[page]]
            if not having_room:
                raise self._no_room(sum(size for _, size in firm))
            self._place(page, nbytes, having_room)
        self.nbytes = tuple(self._filled)
        for page, nbytes in loose:
            self._place(page, nbytes, self._having_room(nbytes) or range(len(roots)))

    def index_of(self, page: _Page) -> int:
        """Position in `roots` of the root that holds the page."""
        return self._index_of[page]

    def _having_room(self, nbytes: int) -> Sequence[int]:
        return [index for index, root in enumerate(self._roots) if nbytes <= self._free[root.volume]]

    def _place(self, page: _Page, nbytes: int, candidates: Sequence[int]) -> None:
        filled, roots = self._filled, self._roots
        self._total += nbytes
        within_share = [
            index
            for index in candidates
            if filled[index] * self._weight <= roots[index].weight * self._total
        ]
        # Nobody with room is within its share where full roots have left theirs to the others.
        chosen = min(
            within_share or candidates, key=lambda index: (filled[index] + nbytes) / roots[index].weight
        )
        filled[chosen] += nbytes
        self._free[roots[chosen].volume] -= nbytes
        self._index_of[page] = chosen

    def _no_room(self, total_bytes: int) -> StorageError:
        needs = [math.ceil(total_bytes * (root.weight / self._weight)) for root in self._roots]
        each = "; ".join(
            f"{root.directory} would need {format_bytes(need)} ({need} bytes), "
            f"{format_bytes(root.capacity_bytes)} ({root.capacity_bytes} bytes) are free"
            for root, need in zip(self._roots, needs, strict=True)
        )
        shared = " (directories on one file system share its space)"
        return StorageError(
            f"spreading {format_bytes(total_bytes)} ({total_bytes} bytes) over",
            ", ".join(root.directory for root in self._roots),
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            detail=f"{each}{shared if len(self._free) < len(self._roots) else ''}: free space or name a "
            "directory on another drive",
        )
