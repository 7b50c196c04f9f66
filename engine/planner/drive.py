"""A drive in simulated time. No torch."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
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
        self._waiting: dict[Direction, deque[tuple[int, Moment]]] = {way: deque() for way in Direction}
        self._left_bytes = dict.fromkeys(Direction, 0.0)
        self._since_s, self._version = 0.0, 0
        self.busy_s = 0.0
        self.nbytes = dict.fromkeys(Direction, 0)

    def move(self, direction: Direction, nbytes: int) -> Moment:
        """A request; the moment at which it has ended."""
        self._advance()
        ended = self._clock.moment()
        queue = self._waiting[direction]
        if not queue:
            self._left_bytes[direction] = nbytes
        queue.append((nbytes, ended))
        self.nbytes[direction] += nbytes
        self._reckon()
        return ended

    def _rates(self) -> dict[Direction, float]:
        """Of the directions that move bytes now."""
        busy = [way for way, queue in self._waiting.items() if queue]
        return {way: self.rates.rate(way, mixed=len(busy) > 1) for way in busy}

    def _advance(self) -> None:
        passed, self._since_s = self._clock.now_s - self._since_s, self._clock.now_s
        rates = self._rates()
        for way, rate in rates.items():
            self._left_bytes[way] -= passed * rate
        if rates:
            self.busy_s += passed

    def _reckon(self) -> None:
        """Find out which request ends next."""
        self._version += 1
        rates = self._rates()
        if not rates:
            return
        ends = {way: max(0.0, self._left_bytes[way]) / rate for way, rate in rates.items()}
        way = min(ends, key=ends.__getitem__)
        left_s, version = ends[way], self._version
        self._clock.after(left_s, lambda: self._end(version, way))

    def _end(self, version: int, way: Direction) -> None:
        if version != self._version:
            return  # a request came meanwhile
        self._advance()
        _, ended = self._waiting[way].popleft()
        if self._waiting[way]:
            self._left_bytes[way] = self._waiting[way][0][0]
        self._clock.after(self.rates.latency_s, ended.set)
        self._reckon()
