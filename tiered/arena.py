"""The DRAM of the store: one page-aligned block of exact size, cut into frames, pinned for the GPU where that
is possible.

Why not an allocator of pinned memory: those round sizes up (torch's to powers of two), which at hundreds of
GiB is the difference between a run that fits and one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tierstream.io.errors import InvariantError
from tierstream.io.host_memory import allocate
from tierstream.tiered.layout import PAGE_ALIGN_BYTES

Register = Callable[[int, int], None]
Unregister = Callable[[int], None]

#: CUDA drivers refuse one registration of 512 GiB or more, and virtual machines far smaller ones.
REGISTER_BYTES_MAX = 64 << 30
#: Fill of freed frames in debug mode: NaN in bfloat16 and in float32.
POISON = 0xFF


class Arena:
    """One block of `sum(frame_bytes)` bytes, resident from the start.

    Args:
        frame_bytes: size of each frame, multiples of 4096.
        register: pins `nbytes` bytes at `address` for the GPU, or raises. It is called for runs of whole
            frames, because a GPU copy must not cross from one registration into the next; a run that fails is
            halved and tried again. If a single frame cannot be pinned, the whole arena stays pageable: slower
            copies, the same results.
        unregister: takes the address of such a run; called by `close`.

    Attributes:
        frames: uint8 arrays, one per frame, 4096-aligned.
        pinned: every byte is registered.
        pageable_reason: why it is not, for a warning; empty if pinned or if there was no `register`.

    Raises:
        BudgetError: the machine or the control group has not that much memory.
    """

    def __init__(
        self,
        frame_bytes: Sequence[int],
        *,
        register: Register | None = None,
        unregister: Unregister | None = None,
    ) -> None:
        if any(nbytes <= 0 or nbytes % PAGE_ALIGN_BYTES for nbytes in frame_bytes):
            raise InvariantError(f"frame sizes must be positive multiples of {PAGE_ALIGN_BYTES} bytes")
        self._ends = list(accumulate(frame_bytes))
        self.nbytes = self._ends[-1] if self._ends else 0
        self.pinned = False
        self.pageable_reason = ""
        self.frames: list[NDArray[np.uint8]] = []
        self._unregister = unregister
        self._registered: list[int] = []
        if not self.nbytes:
            return
        memory = allocate(self.nbytes)
        self.frames = [
            memory[end - nbytes : end] for end, nbytes in zip(self._ends, frame_bytes, strict=True)
        ]
        if register is not None:
            self._pin(memory.ctypes.data, register)

    @property
    def registrations(self) -> int:
        """Number of registered runs."""
        return len(self._registered)

    def close(self) -> None:
        """Unpin and forget the memory; it returns to the system when the last array over it is gone."""
        registered, self._registered = self._registered, []
        for address in reversed(registered):
            if self._unregister is not None:
                self._unregister(address)
        self.pinned = False
        self.frames = []

    def _pin(self, base: int, register: Register) -> None:
        """Register all frames in runs, halving what is refused."""
        runs = [(0, len(self.frames))]
        while runs:
            first, last = runs.pop()
            start, nbytes = self._start(first), self._ends[last - 1] - self._start(first)
            failure: Exception | None = None
            if nbytes <= REGISTER_BYTES_MAX or last - first == 1:
                try:
                    register(base + start, nbytes)
                except Exception as error:
                    failure = error
                else:
                    self._registered.append(base + start)
                    continue
            if last - first > 1:
                middle = (first + last) // 2
                runs += [(middle, last), (first, middle)]
                continue
            self._abandon_pinning(start, nbytes, failure)
            return
        self.pinned = True

    def _abandon_pinning(self, start: int, nbytes: int, failure: Exception | None) -> None:
        registered, self._registered = self._registered, []
        if self._unregister is not None:
            for address in reversed(registered):
                self._unregister(address)
        self.pageable_reason = (
            f"could not pin {nbytes} bytes at offset {start} of {self.nbytes} bytes of host memory "
            f"({failure}); going on with pageable memory: copies to the GPU are slower"
        )

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0
