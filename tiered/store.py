"""The store: pages of model state in DRAM, backed by chunk files on NVMe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.stats import Faults, StoreStats


class Store:
    """Signatures of the store."""

    stats: StoreStats
    layout: Layout

    def __init__(
        self,
        layout: Layout,
        *,
        dram_bytes: int,
        directory: Any | None,
        policy: str = "lookahead",
        prefetch_bytes: int,
        writeback_bytes: int,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
        debug: bool = False,
        faults: Faults | None = None,
    ) -> None:
        raise NotImplementedError

    def acquire(self, uses: Sequence[tuple[Page, Intent]], *, scheduled: bool = True) -> Lease:
        """`scheduled=False`: the uses are not on the schedule of `begin_step` (a snapshot, an export)."""
        raise NotImplementedError

    def release(self, lease: Lease) -> None:
        raise NotImplementedError

    def discard(self, pages: Iterable[Page]) -> None:
        raise NotImplementedError

    def begin_step(self, schedule: Sequence[Page], following: Sequence[Page]) -> None:
        raise NotImplementedError

    def write_range(self, unit: str, plane: str, start_element: int, values: NDArray[Any]) -> None:
        raise NotImplementedError

    def read_range(self, unit: str, plane: str, start_element: int, out: NDArray[np.generic]) -> None:
        raise NotImplementedError

    def has_content(self, page: Page) -> bool:
        """Whether the page was ever written (and, for a step-local page, not consumed or discarded since)."""
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
