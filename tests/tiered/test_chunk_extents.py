"""Chunk files on the drive: reserved at the start, and after their first write without holes or unwritten
space, so that later writes only overwrite.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.drive_kinds import in_page_cache
from support.stores import all_pages, drives_in, layout_of

from tierstream.io.extents import Allocation, allocation
from tierstream.io.posix import PosixBackend
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

PAGE_BYTES = 1 << 20
LAYOUT = layout_of(
    ("u", "weight", "bfloat16", 5 * PAGE_BYTES // 2 - 1000, True),
    ("u", "exp_avg", "float32", 3 * PAGE_BYTES // 4, True),
    ("u", "norm", "float32", 5000, True),
    ("u", "grad", "float32", 3 * PAGE_BYTES // 4, False),
    page_bytes=PAGE_BYTES,
)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_written_once_in_full(tmp_path: Path, direct: bool) -> None:
    """C33."""
    backend = PosixBackend(threads=2, direct=direct)
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {})
    durable = {page: directory.path(page) for page in all_pages(LAYOUT, durable=True)}
    reserved = [allocation(path) for path in durable.values()]
    if not any(found.unwritten_bytes for found in reserved):
        pytest.skip(f"the file system of {tmp_path} does not tell unwritten extents")
    assert not any(found.hole_bytes for found in reserved)
    with Store(
        LAYOUT, dram_bytes=3 * PAGE_BYTES, directory=directory, prefetch_bytes=0, writeback_bytes=PAGE_BYTES
    ) as store:
        local = all_pages(LAYOUT, durable=False)
        for page in [*local, *durable]:
            with store.acquire([(page, Intent.OVERWRITE)]) as lease:
                lease.arrays[0].fill(7)
        store.flush()
        spilled = [path for page in local if Path(path := directory.path(page)).exists()]
        assert spilled
        for path in [*durable.values(), *spilled]:
            assert allocation(path) == Allocation(Path(path).stat().st_size, 0, 0, 0)
            assert not (direct and in_page_cache(Path(path)))
    backend.close()
