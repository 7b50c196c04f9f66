"""Host memory of exact size, in huge pages, all of it there before anybody uses it.

Memory that has only been mapped is made when it is first touched. Doing that at once, by all cores, has two
uses: a machine with too little memory shows it before the first step and not in the middle of a run; and
pinning, which otherwise makes the pages one after the other in one thread, only has to lock them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tierstream.io.errors import BudgetError
from tierstream.io.memory import memory_budget
from tierstream.io.sizes import format_bytes

HUGE_PAGE_BYTES = 2 << 20
#: From linux/mman.h, Linux 5.14 and newer; the mmap module does not know it.
MADV_POPULATE_WRITE = 23
#: What a thread makes in one call: small enough that an interrupt is answered within a fraction of a second.
POPULATE_BYTES = 64 << 20
#: Clearing memory is bound by its bandwidth, which more threads than this do not raise.
POPULATE_THREADS_MAX = 16

# mmap.madvise holds the GIL while the kernel works; calls through ctypes do not.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` (a multiple of 4096) zero bytes, resident, at an address that is a multiple of 2 MiB; the
    memory returns to the system with the last array over it.

    Raises:
        BudgetError: more than the machine or the control group has left.
    """
    # Not for a buffer or two: page cache that counts as in use must not stop a run that is under way.
    if nbytes > POPULATE_BYTES and nbytes > (budget := memory_budget().tightest).available_bytes:
        raise BudgetError(
            f"{format_bytes(nbytes)} of host memory are needed, but there is {budget}: lower the DRAM budget "
            "(tiers.dram) or free memory"
        )
    memory = _map(nbytes)
    _populate(memory.ctypes.data, nbytes)
    return memory


def _map(nbytes: int) -> NDArray[np.uint8]:
    """An anonymous private mapping whose whole huge pages are huge pages where the kernel has them.

    The address space is 2 MiB more than asked for, so that there is an aligned start. What stands around the
    whole huge pages is kept in small ones: a huge page that reaches over the end would be memory nobody asked
    for.
    """
    space_bytes = nbytes + HUGE_PAGE_BYTES
    try:
        space = mmap.mmap(-1, space_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise _refused(nbytes, error) from error
    whole = np.frombuffer(space, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    huge_bytes = nbytes - nbytes % HUGE_PAGE_BYTES
    # Best effort: a kernel without transparent huge pages answers EINVAL.
    with suppress(OSError):
        space.madvise(mmap.MADV_NOHUGEPAGE)
        if huge_bytes:
            space.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return whole[start : start + nbytes]


def _populate(address: int, nbytes: int) -> None:
    """Makes all pages, in several threads where there is more than a little to do."""
    ranges = [
        (address + offset, min(POPULATE_BYTES, nbytes - offset))
        for offset in range(0, nbytes, POPULATE_BYTES)
    ]
    threads = min(len(ranges), len(os.sched_getaffinity(0)), POPULATE_THREADS_MAX)
    if threads <= 1:
        for part in ranges:
            _populate_range(*part)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="populate")
    try:
        for done in [pool.submit(_populate_range, *part) for part in ranges]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _populate_range(address: int, nbytes: int) -> None:
    while _madvise(address, nbytes, MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code == errno.EINVAL:  # a kernel before 5.14
            ctypes.memset(address, 0, nbytes)
            return
        raise _refused(nbytes, OSError(code, os.strerror(code)))


def _refused(nbytes: int, error: Exception) -> BudgetError:
    return BudgetError(
        f"the system refused {format_bytes(nbytes)} of host memory ({error}); {memory_budget().tightest}: "
        "lower the DRAM budget (tiers.dram) or free memory"
    )
