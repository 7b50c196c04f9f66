"""I/O that fails: the error reaches every caller by name, nothing hangs, nothing is left open."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.faults import FaultySyscalls, fail
from support.stores import PAGE_BYTES, all_pages, drives_in, layout_of, uniform_layout

from tierstream.io import seam
from tierstream.io.errors import StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.store import Faults, Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = uniform_layout(12)


def open_files() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return links


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Threads and files of the process are afterwards what they were before."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files


def make(
    path: Path, backend: PosixBackend, *, frames: int = 4, prefetch: int = 0, layout: Layout = LAYOUT
) -> Store:
    return Store(
        layout,
        dram_bytes=frames * PAGE_BYTES,
        directory=ZarrDirectory.create(drives_in([path], backend), layout, {}),
        prefetch_bytes=prefetch * PAGE_BYTES,
        writeback_bytes=2 * PAGE_BYTES,
        faults=Faults(0, 0.001),
    )


def fill(store: Store) -> None:
    store.write_range("unit", "weight", 0, np.arange(12 * PAGE_BYTES, dtype=np.uint32).astype(np.uint8))
    store.flush()


def read_all(store: Store, pages: list[Page]) -> None:
    for page in pages:
        store.acquire([(page, Intent.READ)]).release()


def overwrite_all(store: Store, pages: list[Page]) -> None:
    for page in pages:
        store.acquire([(page, Intent.OVERWRITE)]).release()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_failed_read_is_raised_to_every_thread_and_for_ever(tmp_path: Path, prefetch: int) -> None:
    backend = PosixBackend(threads=2)
    with make(tmp_path, backend, prefetch=prefetch) as store:
        fill(store)
        pages = all_pages(LAYOUT)
        with seam.injected(FaultySyscalls(fail(errno.EIO, on="preadv", at=3))):
            store.begin_step(pages, pages)

            def walk(own: list[Page]) -> StorageError:
                with pytest.raises(StorageError) as raised:
                    read_all(store, own * 100)
                return raised.value

            with ThreadPoolExecutor(3) as pool:
                errors = list(pool.map(walk, [pages, pages[::-1], pages[6:] + pages[:6]]))
        error = errors[0]
        assert all(other is error for other in errors)
        assert error.errno == errno.EIO
        assert error.offset == 0
        assert error.path.startswith(f"{tmp_path}/unit/weight/c/")
        assert "reading" in str(error)
        for use in (
            lambda: store.acquire([(pages[0], Intent.READ)]),
            lambda: store.begin_step(pages, pages),
            store.flush,
            lambda: store.read_range("unit", "weight", 0, np.zeros(1, np.uint8)),
        ):
            with pytest.raises(StorageError):
                use()
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_full_drive_at_write_back_is_named(tmp_path: Path) -> None:
    backend = PosixBackend(threads=2)
    with make(tmp_path, backend) as store:
        values = np.zeros(12 * PAGE_BYTES, dtype=np.uint8)
        with (
            seam.injected(FaultySyscalls(fail(errno.ENOSPC, on="pwritev", at=4))),
            pytest.raises(StorageError, match=r"writing .*No space left.*drive is full") as raised,
        ):
            store.write_range("unit", "weight", 0, values)
        assert raised.value.errno == errno.ENOSPC
        held_by = raised.value.path
        assert Path(held_by).parent == tmp_path / "unit/weight/c"
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_failed_flush_is_raised(tmp_path: Path) -> None:
    backend = PosixBackend(threads=2)
    with make(tmp_path, backend) as store:
        store.acquire([(Page("unit", "weight", 0), Intent.OVERWRITE)]).release()
        with (
            seam.injected(FaultySyscalls(fail(errno.EIO, on="pwritev"))),
            pytest.raises(StorageError, match="writing"),
        ):
            store.flush()
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_step_local_page_that_cannot_be_spilled_is_named(tmp_path: Path) -> None:
    """Its chunk file is made at the first spill; there the drive is full."""
    layout = layout_of(("u", "grad", "uint8", 8 * PAGE_BYTES, False))
    backend = PosixBackend(threads=2)
    with make(tmp_path, backend, frames=2, layout=layout) as store:
        with (
            seam.injected(FaultySyscalls(fail(errno.ENOSPC, on="posix_fallocate"))),
            pytest.raises(StorageError, match=r"creating .*/u/grad/c/\d.*4.00 KiB wanted"),
        ):
            overwrite_all(store, all_pages(layout))
        assert list((tmp_path / "u/grad/c").iterdir()) == []
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_leases_of_the_time_before_the_failure_can_be_released(tmp_path: Path) -> None:
    backend = PosixBackend(threads=2)
    with make(tmp_path, backend) as store:
        fill(store)
        held = store.acquire([(Page("unit", "weight", 11), Intent.UPDATE)])
        with (
            seam.injected(FaultySyscalls(fail(errno.EIO, on="preadv"))),
            pytest.raises(StorageError),
        ):
            read_all(store, all_pages(LAYOUT)[:6])
        held.arrays[0].fill(1)
        held.release()
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_closing_waits_for_transfers_under_way(tmp_path: Path) -> None:
    backend = PosixBackend(threads=2)
    store = make(tmp_path, backend, prefetch=4)
    fill(store)
    store.begin_step(all_pages(LAYOUT), [])
    store.close()
    backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_many_chunk_files_with_few_file_handles(tmp_path: Path) -> None:
    """A request of 200 pages where the process may open 64 files beside those it has open already."""
    import resource

    layout = uniform_layout(400)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    try:
        backend = PosixBackend(threads=4)
        with make(tmp_path, backend, frames=200, layout=layout, prefetch=100) as store:
            values = np.random.default_rng(0).integers(0, 255, 400 * PAGE_BYTES, dtype=np.uint8)
            store.write_range("unit", "weight", 0, values)
            pages = all_pages(layout)
            store.begin_step(pages, pages)
            for half in (pages[:200], pages[200:]):
                with store.acquire([(page, Intent.READ) for page in half]) as lease:
                    first = half[0].index * PAGE_BYTES
                    assert np.array_equal(
                        np.concatenate(lease.arrays), values[first : first + 200 * PAGE_BYTES]
                    )
        backend.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
