"""What the store asks of its directory: pages that move, and who moves them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tierstream.tiered.frames import Entry, Frame
from tierstream.tiered.layout import Page


class Kind(Enum):
    DEMAND = "demand read"
    PREFETCH = "prefetch read"
    ASIDE = "read for a capture"
    WRITE = "write-back"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One page on its way from or to NVMe.

    Attributes:
        buffer: where it is read to; None: its frame.
    """

    kind: Kind
    entry: Entry
    buffer: Frame | None = None

    @property
    def array(self) -> Frame:
        """The bytes that move."""
        return self.entry.view() if self.buffer is None else self.buffer[: self.entry.nbytes]


class Directory(Protocol):
    """Where pages live that are not in DRAM: `ZarrDirectory`."""

    def read(self, page: Page, frame: Frame) -> Future[int]: ...
    def write(self, page: Page, frame: Frame) -> Future[int]: ...
    def close(self) -> None: ...
