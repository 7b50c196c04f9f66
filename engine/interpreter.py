"""How Python itself behaves while it trains: when it collects garbage, and how threads take turns.

One thread launches the layers; others handle pages, for a tenth of a millisecond at a time. All share one
interpreter lock, and all can be what the device waits for.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: A thread that wants to run asks the one that runs to let go after this long. Python's own 5 ms is half a
#: layer: the one that launches releases the lock at every operation, but takes it back before a sleeping
#: thread is awake.
_SWITCH_INTERVAL_S = 2e-4
#: Steps between two collections. A step leaves some dozens of small objects in cycles, and no tensors
#: (tests/engine/step/test_memory.py).
_STEPS_PER_COLLECTION = 50


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within, garbage is collected by `collect_now_and_then` alone, and threads take short turns.

    The hundreds of thousands of objects of torch and transformers that exist now are never looked through:
    that took a quarter of a second in the middle of a step. May be nested: the outermost alone freezes, so
    what it froze stays so until its own end, and what an inner one leaves behind can be collected.
    """
    interval_s, enabled = sys.getswitchinterval(), gc.isenabled()
    outermost = gc.get_freeze_count() == 0
    gc.collect()
    if outermost:
        gc.freeze()
    gc.disable()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if outermost:
            gc.unfreeze()
        if enabled:
            gc.enable()


def collect_now_and_then(step: int) -> None:
    """Called between steps, when the device has nothing to do yet."""
    if step % _STEPS_PER_COLLECTION == 0:
        gc.collect(1)
