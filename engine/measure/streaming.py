"""A store worked on as training works on it, without the computing: what drives give to the real schedule.

Two passes are measured. "stream" reads every page of every plane once, in order. "update" leases the pages of
the deferred AdamW, granule after granule, to change them: each page is read once and written back once, reads
and writes side by side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from tierstream.engine.update.granules import granules
from tierstream.io.drives import Drive
from tierstream.io.measure import Case, Labels, Sample
from tierstream.io.scratch import incompressible, stamp
from tierstream.io.workload import cached_note, storage_bytes
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout, Page, PlaneSpec, Unit, pack_unit
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

#: What the split master keeps per parameter: 12 bytes.
_PLANES = {"weight": "bfloat16", "master_low": "uint16", "exp_avg": "float32", "exp_avg_sq": "float32"}
_PAGES_PER_WEIGHT_PAGE = 6
_UNITS_MAX = 8
#: A state of fewer weight pages would fit in any DRAM that can hold what a granule needs; pages shrink first.
_WEIGHT_PAGES_MIN = 4
#: DRAM of the store, in pages: little, so that next to nothing is found there; at most half the state.
_FRAMES_MAX = 32

Pass = Literal["stream", "update"]


class StreamedStore:
    """A store of incompressible state on the given drives, for the time of a `with` block.

    Args:
        drives: where the chunk files go.
        state_bytes: bytes of all planes, about.
        page_bytes: size of a page at most, and a multiple of 4096; a small state has smaller ones.

    Attributes:
        page_bytes: size of a page, and of every chunk file.
        paths: the chunk files, in the order of the pass "stream". Others may write them: nothing of what they
            hold is looked at.

    Raises:
        StorageError: a drive is too small, full, or fails.
    """

    def __init__(self, drives: Sequence[Drive], *, state_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes = fitting_page_bytes(state_bytes, page_bytes)
        self.units, self.layout = _layout(state_bytes, page_bytes)
        directory = ZarrDirectory.create(drives, self.layout, {}, readback="off")
        pages = [page for key in self.layout.planes for page in self.layout.pages(*key)]
        self.paths = [directory.path(page) for page in pages]
        dram_bytes = min(_FRAMES_MAX, len(pages) // 2) * page_bytes
        try:
            self.store = Store(
                self.layout,
                dram_bytes=dram_bytes,
                directory=directory,
                prefetch_bytes=dram_bytes // 4,
                writeback_bytes=dram_bytes // 8,
            )
        except BaseException:
            directory.close()
            raise
        try:
            self._fill(page_bytes)
        except BaseException:
            self.store.close()
            raise

    def case(self, which: Pass, labels: Labels) -> Case:
        """The pass as something that `measure` runs; its amount is the bytes that the drives moved."""
        return Case({"access": which, **labels}, "B", lambda: self._run(which))

    def _run(self, which: Pass) -> Sample:
        if which == "stream":
            pages = [page for key in self.layout.planes for page in self.layout.pages(*key)]
            leases: list[tuple[tuple[Page, Intent], ...]] = [((page, Intent.READ),) for page in pages]
        else:
            leases = [granule.uses for unit in self.units for granule in granules(self.layout, unit)]
        before, fetched_before = self.store.stats.copy(), storage_bytes()
        cpu, begin = time.process_time(), time.perf_counter()
        self.store.begin_step([page for uses in leases for page, _ in uses], [])
        for uses in leases:
            self.store.release(self.store.acquire(uses))
        self.store.flush()
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        after, fetched_after = self.store.stats.copy(), storage_bytes()
        read = after.nvme_bytes_read - before.nvme_bytes_read
        written = after.nvme_bytes_written - before.nvme_bytes_written
        note = ""
        if fetched_before and fetched_after:
            note = cached_note("read", read, fetched_after[0] - fetched_before[0])
        return Sample(read + written, seconds, cpu_s, note)

    def _fill(self, page_bytes: int) -> None:
        content = incompressible(page_bytes)
        pages = [page for key in self.layout.planes for page in self.layout.pages(*key)]
        for number, page in enumerate(pages):
            stamp(content, number)
            with self.store.acquire([(page, Intent.OVERWRITE)], scheduled=False) as lease:
                lease.arrays[0][:] = content[: len(lease.arrays[0])]
        self.store.flush()

    def __enter__(self) -> StreamedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()


def stored_bytes(state_bytes: int, page_bytes: int) -> int:
    """Bytes of the chunk files of a `StreamedStore` of about `state_bytes`."""
    page_bytes = fitting_page_bytes(state_bytes, page_bytes)
    return sum(_weight_pages(state_bytes, page_bytes)) * _PAGES_PER_WEIGHT_PAGE * page_bytes


def fitting_page_bytes(state_bytes: int, page_bytes: int) -> int:
    """The page size of a `StreamedStore`."""
    largest = state_bytes // (_WEIGHT_PAGES_MIN * _PAGES_PER_WEIGHT_PAGE)
    return max(PAGE_ALIGN_BYTES, min(page_bytes, largest // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES))


def _weight_pages(state_bytes: int, page_bytes: int) -> list[int]:
    """Pages of each unit's weight plane. Whole pages: the tail pages of a model with large layers weigh next
    to nothing.
    """
    pages = max(_WEIGHT_PAGES_MIN, round(state_bytes / (_PAGES_PER_WEIGHT_PAGE * page_bytes)))
    units = min(_UNITS_MAX, pages)
    return [pages // units + (index < pages % units) for index in range(units)]


def _layout(state_bytes: int, page_bytes: int) -> tuple[list[Unit], Layout]:
    units = [
        pack_unit(f"layers.{index}", "bfloat16", [("weight", (pages * page_bytes // 2,), 0)])
        for index, pages in enumerate(_weight_pages(state_bytes, page_bytes))
    ]
    planes = {
        (unit.name, plane): PlaneSpec(unit.name, plane, dtype, unit.numel, True)
        for unit in units
        for plane, dtype in _PLANES.items()
    }
    return units, Layout(page_bytes, planes)
