"""How fast host memory is: read, copied, and updated in place as AdamW does it, in huge pages as the arena's.

It is what the optimizer on the CPU is judged by. Bytes are those that the program reads and writes; that the
processor also reads a line before it is overwritten is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream import _native
from tierstream.engine.measure.compute_rates import QUICK_ROUNDS
from tierstream.io.host_memory import allocate
from tierstream.io.measure import Case, Sample, measure, timed
from tierstream.io.memory import memory_budget
from tierstream.io.probes import last_level_cache_bytes

#: Streams of the pattern "update", the last of which is only read.
UPDATE_STREAMS = 5
_ALIGN_BYTES = 4096
#: Where the size of the last-level cache is not told: few processors have more.
_CACHE_BYTES = 512 << 20
#: So many times the last-level cache: what of it is still there from the run before counts little.
_TIMES_CACHE = 4
#: Share of the free memory that a quick measurement may take, one part in so many; what it takes at least.
_QUICK_MEMORY_SHARE, _QUICK_BYTES_LEAST = 16, 1 << 20


def host_array(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """An array in memory like the arena's: huge pages, all of them there."""
    nbytes = count * np.dtype(dtype).itemsize
    return allocate(-(-max(nbytes, 1) // _ALIGN_BYTES) * _ALIGN_BYTES)[:nbytes].view(dtype)


def buffer_bytes() -> int:
    """Memory to measure with: far more than the last-level caches hold."""
    return _TIMES_CACHE * (last_level_cache_bytes() or _CACHE_BYTES)


def memory_cases(nbytes: int, threads: Sequence[int]) -> list[Case]:
    """One case per pattern and number of threads; all use the same `nbytes` of memory.

    read: the sum of all; copy: memcpy of one half to the other; update: `UPDATE_STREAMS` streams are read
    side by side, and all but the last one overwritten.
    """
    memory = host_array(nbytes // 4, np.float32)
    source, target = np.split(memory[: memory.size // 2 * 2], 2)
    streams = np.split(memory[: memory.size // UPDATE_STREAMS * UPDATE_STREAMS], UPDATE_STREAMS)
    updated = streams[:-1]
    patterns: dict[str, tuple[int, Callable[[int], object]]] = {
        "read": (memory.nbytes, lambda count: _native.memory_read(memory, count)),
        "copy": (2 * source.nbytes, lambda count: _native.memory_copy(source, target, count)),
        "update": (
            streams[0].nbytes * (len(streams) + len(updated)),
            lambda count: _native.memory_update(updated, streams[-1], count),
        ),
    }
    return [
        Case({"part": "host memory", "pattern": name, "threads": count}, "B", _runner(run, moved, count))
        for name, (moved, run) in patterns.items()
        for count in threads
    ]


def memory_rate(threads: int) -> float:
    """Bytes per second of the pattern "update", the best of several rounds."""
    affordable = memory_budget().available_bytes // _QUICK_MEMORY_SHARE
    cases = memory_cases(min(buffer_bytes(), max(_QUICK_BYTES_LEAST, affordable)), [threads])
    (update,) = (case for case in cases if case.labels["pattern"] == "update")
    (found,) = measure([update], rounds=QUICK_ROUNDS)
    return max(found.rates)


def _runner(run: Callable[[int], object], moved_bytes: int, threads: int) -> Callable[[], Sample]:
    return lambda: timed(moved_bytes, lambda: run(threads))
