"""What the store counts, and the delays that its tests put in."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class StoreStats:
    """Counters since construction. A page use is counted once, when its lease is granted.

    `hits + prefetched + misses + fresh` is the number of page uses; `hits` of them cost no NVMe read.
    """

    #: uses of a page that had stayed in DRAM since an earlier use
    hits: int = 0
    #: first uses of a page that prefetch had brought, or was bringing, to DRAM
    prefetched: int = 0
    #: uses that had to start a read themselves
    misses: int = 0
    #: uses that needed a frame but no read: overwritten pages, and durable pages never written (zeros)
    fresh: int = 0
    evictions: int = 0
    nvme_bytes_read: int = 0
    nvme_bytes_written: int = 0
    #: seconds that `acquire` waited for a read, summed over threads
    read_wait_s: float = 0.0
    #: seconds that `acquire` waited for a frame or for another lease of the page, summed over threads
    frame_wait_s: float = 0.0
    frame_count: int = 0
    frames_in_use: int = 0
    frames_in_use_peak: int = 0

    def copy(self) -> StoreStats:
        return replace(self)


@dataclass(frozen=True, slots=True)
class DriveTraffic:
    """Bytes of pages moved to and from one drive, counted as each transfer starts.

    Attributes:
        bytes_read: read.
        bytes_written: written.
        bytes_checked: of the bytes read, those that were compared with checksums and found right.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_checked: int = 0


@dataclass(slots=True)
class Faults:
    """Random delays that bring ordering bugs to light: before each I/O completes, and as each lease is
    granted.

    Args:
        seed: of the delays' random numbers.
        max_delay_s: delays are uniform in `[0, max_delay_s)`.
    """

    seed: int
    max_delay_s: float
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def delay(self) -> None:
        time.sleep(self._random.random() * self.max_delay_s)
