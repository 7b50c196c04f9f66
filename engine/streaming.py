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

from tierstream.engine.update import granules
from tierstream.io.drives import Drive
from tierstream.io.measure import Case, Labels, Sample
from tierstream.io.scratch import incompressible, stamp
from tierstream.io.workload import cached_note, storage_bytes
from tierstream.tiered.layout import Layout, Page, PlaneSpec, Unit, pack_unit
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

#: What the split master keeps per parameter: 12 bytes.
_PLANES = {"weight": "bfloat16", "master_low": "uint16", "exp_avg": "float32", "exp_avg_sq": "float32"}
_BYTES_PER_PARAMETER = 12
_UNITS = 8
#: DRAM of the store, in pages: little, so that next to nothing is found there, yet as many as a run must
#: have.
_FRAMES = 32

Pass = Literal["stream", "update"]


class StreamedStore:
    """A store of incompressible state on the given drives, for the time of a `with` block.

    Args:
        drives: where the chunk files go.
        state_bytes: bytes of all planes, about.
        page_bytes: size of a page, and of every chunk file.

    Attributes:
        paths: the chunk files, in the order of the pass "stream". Others may write them: nothing of what they
            hold is looked at.

    Raises:
        StorageError: a drive is too small, full, or fails.
    """

    def __init__(self, drives: Sequence[Drive], *, state_bytes: int, page_bytes: int) -> None:
        self.units, self.layout = _layout(state_bytes, page_bytes)
        directory = ZarrDirectory.create(drives, self.layout, {}, readback="off")
        pages = [page for key in self.layout.planes for page in self.layout.pages(*key)]
        self.paths = [directory.path(page) for page in pages]
        dram_bytes = _FRAMES * page_bytes
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


def _layout(state_bytes: int, page_bytes: int) -> tuple[list[Unit], Layout]:
    # A weight plane of whole pages: the tail pages of a model with large layers weigh next to nothing.
    per_page = page_bytes // 2
    pages = max(1, round(state_bytes / (_BYTES_PER_PARAMETER * per_page * _UNITS)))
    units = [
        pack_unit(f"layers.{index}", "bfloat16", [("weight", (pages * per_page,), True)])
        for index in range(_UNITS)
    ]
    planes = {
        (unit.name, plane): PlaneSpec(unit.name, plane, dtype, unit.numel, True)
        for unit in units
        for plane, dtype in _PLANES.items()
    }
    return units, Layout(page_bytes, planes)

