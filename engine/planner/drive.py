"""A drive in simulated time. No torch."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Self

from tierstream.engine.planner.clock import Clock, Moment
from tierstream.io.transfer import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """What a drive gives. Bytes per second, of each direction alone and while the other is busy as well.

    Attributes:
        directory: its name.
        latency_s: seconds that a request takes beside the time of its bytes; requests under way at once
            share them.
        weight: share of the pages that it carries, relative to the other drives.
    """

    directory: str
    read: float
    write: float
    read_mixed: float
    write_mixed: float
    latency_s: float = 0.0
    weight: float = 1.0

    @classmethod
    def unknown(cls, directory: str) -> Self:
        """A drive for questions of what fits."""
        nan = math.nan
        return cls(directory=directory, read=nan, write=nan, read_mixed=nan, write_mixed=nan)

    def rate(self, direction: Direction, *, mixed: bool) -> float:
        if direction is Direction.READ:
            return self.read_mixed if mixed else self.read
        return self.write_mixed if mixed else self.write


class SimulatedDrive:
    """Serves each direction in order of arrival, both side by side.

    Attributes:
        busy_s: seconds in which bytes moved, of either direction or both.
        nbytes: moved in each direction.
    """

    def __init__(self, clock: Clock, rates: DriveRates) -> None:
        self._clock, self.rates = clock, rates
        self._reads, self._writes = (
            _Queue(rates.rate(way, mixed=False), rates.rate(way, mixed=True))
            for way in (Direction.READ, Direction.WRITE)
        )
        self._since_s, self._version = 0.0, 0
        self.busy_s = 0.0
        self.nbytes = dict.fromkeys(Direction, 0)

    def move(self, direction: Direction, nbytes: int) -> Moment:
        """A request; the moment at which it has ended."""
        self._advance()
        ended = self._clock.moment()
        queue = self._reads if direction is Direction.READ else self._writes
        if not queue.waiting:
            queue.left_bytes = nbytes
        queue.waiting.append((nbytes, ended))
        self.nbytes[direction] += nbytes
        self._reckon()
        return ended

    def _advance(self) -> None:
        passed, self._since_s = self._clock.now_s - self._since_s, self._clock.now_s
        reads, writes = self._reads, self._writes
        if reads.waiting:
            reads.left_bytes -= passed * (reads.mixed if writes.waiting else reads.alone)
        if writes.waiting:
            writes.left_bytes -= passed * (writes.mixed if reads.waiting else writes.alone)
        if reads.waiting or writes.waiting:
            self.busy_s += passed

    def _reckon(self) -> None:
        """Find out which request ends next."""
        self._version += 1
        reads, writes = self._reads, self._writes
        if reads.waiting and writes.waiting:
            left_s, queue = reads.left_bytes / reads.mixed, reads
            if (written_s := writes.left_bytes / writes.mixed) < max(0.0, left_s):
                left_s, queue = written_s, writes
        elif reads.waiting:
            left_s, queue = reads.left_bytes / reads.alone, reads
        elif writes.waiting:
            left_s, queue = writes.left_bytes / writes.alone, writes
        else:
            return
        self._clock.after(max(0.0, left_s), partial(self._end, self._version, queue))

    def _end(self, version: int, queue: _Queue) -> None:
        if version != self._version:
            return  # a request came meanwhile
        self._advance()
        _, ended = queue.waiting.popleft()
        if queue.waiting:
            queue.left_bytes = queue.waiting[0][0]
        self._clock.after(self.rates.latency_s, ended.set)
        self._reckon()


class _Queue:
    """Requests of one direction, of which the first has so many bytes left; and its rates."""

    __slots__ = ("alone", "left_bytes", "mixed", "waiting")

    def __init__(self, alone: float, mixed: float) -> None:
        self.alone, self.mixed = alone, mixed
        self.waiting = deque[tuple[int, Moment]]()
        self.left_bytes = 0.0
