"""First values of the planes: fp32 values from a checkpoint or an initialisation become weight and master
planes.

The moments need no writing: a durable page that was never written reads as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstream import _native
from tierstream.tiered.layout import Layout
from tierstream.tiered.store import Store

#: Elements that are rounded and split at once: a few MB of buffers, whatever the size of a tensor.
BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class PlaneWriter:
    """Writes fp32 values of a unit into its weight plane and its master plane, in any order of ranges."""

    store: Store
    layout: Layout

    def __call__(self, unit: str, start_element: int, values: NDArray[np.float32]) -> None:
        """Elements `[start_element, start_element + len(values))` of `unit`."""
        values = np.ascontiguousarray(values, np.float32).reshape(-1)
        for start in range(0, values.size, BLOCK_ELEMENTS):
            self._write(unit, start_element + start, values[start : start + BLOCK_ELEMENTS])

    def _write(self, unit: str, start_element: int, values: NDArray[np.float32]) -> None:
        if self.layout.spec(unit, "weight").dtype == "float32":
            self.store.write_range(unit, "weight", start_element, values)
            return
        weight = np.empty(values.size, np.uint16)
        if (unit, "master_low") in self.layout.planes:
            low = np.empty(values.size, np.uint16)
            _native.split_master(values, weight, low)
            self.store.write_range(unit, "master_low", start_element, low)
        else:
            _native.round_bf16(values, weight)
        if (unit, "master") in self.layout.planes:
            self.store.write_range(unit, "master", start_element, values)
        self.store.write_range(unit, "weight", start_element, weight)
