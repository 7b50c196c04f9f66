"""Captures: what is written is the state of one instant, to the bit, however much has changed since."""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import FaultySyscalls, delay, fail
from support.stores import PAGE_BYTES, MemoryDirectory, all_pages, content_bytes, mixed_layout, pattern

from tierstream.io import seam
from tierstream.io.errors import InvariantError, StorageError
from tierstream.tiered.layout import Page
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_capture, write_snapshot
from tierstream.tiered.store import Faults, Intent, Store

LAYOUT = mixed_layout(units=2)
PAGES = all_pages(LAYOUT, durable=True)
#: Pages of one update, as a granule of the optimizer has them.
GRANULES = [PAGES[start : start + 3] for start in range(0, len(PAGES), 3)]


@contextmanager
def store_of(
    frames: int | None, copies: int, *, seed: int | None = None, hold: threading.Event | None = None
) -> Iterator[Store]:
    """Every page in DRAM, or so many frames over a directory; nothing is written yet."""
    nvme = frames is not None
    with Store(
        LAYOUT,
        dram_bytes=frames * PAGE_BYTES if frames is not None else 8 << 20,
        directory=MemoryDirectory(hold=hold) if nvme else None,
        prefetch_bytes=2 * PAGE_BYTES,
        writeback_bytes=2 * PAGE_BYTES,
        copy_bytes=copies * PAGE_BYTES,
        debug=True,
        faults=None if seed is None else Faults(seed, 0.0005),
    ) as store:
        yield store


def change(store: Store, pages: list[Page], version: int, intent: Intent) -> None:
    with store.acquire([(page, intent) for page in pages], scheduled=False) as lease:
        for page, array in zip(pages, lease.arrays, strict=True):
            if intent is Intent.UPDATE:
                assert array.tobytes() == pattern(LAYOUT, page, version - 1)
            array[:] = np.frombuffer(pattern(LAYOUT, page, version), np.uint8)


def set_all(store: Store, version: int, intent: Intent = Intent.OVERWRITE) -> None:
    for pages in GRANULES:
        change(store, pages, version, intent)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    frames=st.sampled_from([None, 6, 12, 100]),
    copies=st.sampled_from([0, 1, 2, 3, 9, 100]),
    seed=st.integers(0, 99),
    overwrite=st.booleans(),
    backwards=st.booleans(),
)
def test_a_capture_is_what_a_snapshot_without_updates_would_be(
    tmp_path_factory: pytest.TempPathFactory,
    frames: int | None,
    copies: int,
    seed: int,
    overwrite: bool,
    backwards: bool,
) -> None:
    """All files are equal, though two threads update every page three times meanwhile."""
    folder = tmp_path_factory.mktemp("capture")
    with store_of(frames, copies, seed=seed) as store:
        set_all(store, 0)
        write_snapshot(store, folder / "still", {"step": 1})
        first = [page for pages in GRANULES for page in pages]
        with store.capture(first[::-1] if backwards else first) as capture, ThreadPoolExecutor(3) as pool:
            written = pool.submit(write_capture, capture, folder / "moving", {"step": 1})
            intent = Intent.OVERWRITE if overwrite else Intent.UPDATE

            def update(part: int) -> None:
                for version in (1, 2, 3):
                    for pages in GRANULES[part::2]:
                        change(store, pages, version, intent)

            for updater in [pool.submit(update, part) for part in (0, 1)]:
                updater.result(60)
            written.result(60)
        for page in PAGES:
            with store.acquire([(page, Intent.READ)]) as lease:
                assert lease.arrays[0][: content_bytes(LAYOUT, page)].tobytes() == pattern(LAYOUT, page, 3)
    Snapshot.open(folder / "moving").verify()
    assert files(folder / "moving") == files(folder / "still")


def test_with_room_for_copies_nobody_waits_for_the_drive(tmp_path: Path) -> None:
    """Not one page has been taken to be written when every page has changed."""
    with store_of(None, len(PAGES)) as store:
        set_all(store, 0)
        with store.capture() as capture:
            set_all(store, 1, Intent.UPDATE)
            write_capture(capture, tmp_path / "snapshot", {})
        out = np.empty(37, np.float32)
        Snapshot.open(tmp_path / "snapshot").read_range("layers.0", "norm", 0, out)
        assert out.tobytes() == pattern(LAYOUT, Page("layers.0", "norm", 0), 0)


def test_without_room_an_update_waits_until_its_pages_are_written() -> None:
    with store_of(None, 0) as store, ThreadPoolExecutor(1) as pool:
        set_all(store, 0)
        with store.capture() as capture:
            update = pool.submit(change, store, PAGES[:2], 1, Intent.UPDATE)
            first = capture.take()
            second = capture.take()
            assert first is not None
            assert second is not None
            assert (first.page, second.page) == tuple(PAGES[:2])
            capture.give_back(first)
            time.sleep(0.05)
            assert not update.done()
            kept = second.array[: content_bytes(LAYOUT, second.page)]
            assert kept.tobytes() == pattern(LAYOUT, PAGES[1], 0)
            capture.give_back(second)
            update.result(10)


def test_readers_do_not_wait_and_nothing_is_a_use() -> None:
    with store_of(None, 0) as store:
        set_all(store, 0)
        before = store.stats.copy()
        with store.capture() as capture:
            pieces = [capture.take() for _ in PAGES]
            for page in PAGES:
                store.acquire([(page, Intent.READ)]).release()
            assert capture.take() is None
            for piece in pieces:
                assert piece is not None
                capture.give_back(piece)
        assert store.stats.hits - before.hits == len(PAGES)


def test_pages_on_drives_take_no_frame(tmp_path: Path) -> None:
    with store_of(6, 0) as store:
        set_all(store, 0)
        store.flush()
        before = store.stats.copy()
        write_snapshot(store, tmp_path / "snapshot", {})
        after = store.stats
        assert after.evictions == before.evictions
        assert after.nvme_bytes_written == before.nvme_bytes_written
        inside = sum(store._cache.entry(page).frame is not None for page in PAGES)
        assert after.nvme_bytes_read - before.nvme_bytes_read <= (len(PAGES) - inside) * PAGE_BYTES


def test_pages_never_written_are_zeros_whatever_becomes_of_them(tmp_path: Path) -> None:
    with store_of(None, 1) as store:
        change(store, PAGES[:1], 0, Intent.OVERWRITE)
        with store.capture() as capture:
            set_all(store, 1)
            info = write_capture(capture, tmp_path / "snapshot", {})
        assert info.page_count == 1
        out = np.full(4096, 1, np.float32)
        Snapshot.open(tmp_path / "snapshot").read_range("layers.0", "exp_avg", 0, out)
        assert not out.any()


def test_one_capture_at_a_time_and_none_amid_a_change() -> None:
    with store_of(None, 0) as store:
        set_all(store, 0)
        with store.capture(), pytest.raises(InvariantError, match="before the one before it is closed"):
            store.capture()
        with (
            store.acquire([(PAGES[3], Intent.UPDATE)]),
            pytest.raises(InvariantError, match="captured while it is being changed"),
        ):
            store.capture()
        store.capture().close()


def test_closing_lets_everybody_go_on() -> None:
    with store_of(6, 0) as store, ThreadPoolExecutor(1) as pool:
        set_all(store, 0)
        capture = store.capture()
        update = pool.submit(set_all, store, 1)
        time.sleep(0.02)
        capture.close()
        update.result(10)
        assert capture.take() is None
        capture.close()


def test_an_error_of_the_store_ends_the_capture(tmp_path: Path) -> None:
    """Not one thread hangs: neither the writer nor those who wait for it."""
    with store_of(6, 0) as store, ThreadPoolExecutor(1) as pool:
        set_all(store, 0)
        directory = store._directory
        assert isinstance(directory, MemoryDirectory)
        directory.files.clear()  # reads fail from now on
        with store.capture() as capture:
            update = pool.submit(set_all, store, 1)
            with pytest.raises(KeyError):
                write_capture(capture, tmp_path / "snapshot", {})
        with pytest.raises(KeyError):
            update.result(10)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_wait_ends_the_store_and_the_capture_with_it() -> None:
    """Ctrl-C, where it is not handled: the lease that somebody waited for will never be given back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with store_of(None, 0) as store:
            set_all(store, 0)
            with store.capture() as capture:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(KeyboardInterrupt):
                    change(store, PAGES[:2], 1, Intent.UPDATE)
                with pytest.raises(InvariantError, match="its lease is lost"):
                    capture.take()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("copies", [0, 4])
def test_an_error_of_the_target_leaves_the_store_in_order(tmp_path: Path, copies: int) -> None:
    with store_of(6, copies, seed=0) as store, ThreadPoolExecutor(1) as pool:
        set_all(store, 0)
        faults = FaultySyscalls(fail(errno.ENOSPC, on="posix_fallocate", at=5), delay(0))
        with seam.injected(faults), store.capture() as capture:
            update = pool.submit(set_all, store, 1, Intent.UPDATE)
            with pytest.raises(StorageError, match="No space left"):
                write_capture(capture, tmp_path / "snapshot", {})
            update.result(10)
        assert list(tmp_path.iterdir()) == []
        set_all(store, 2, Intent.UPDATE)
        write_snapshot(store, tmp_path / "snapshot", {})
        Snapshot.open(tmp_path / "snapshot").verify()


def test_replacing_keeps_the_old_until_the_new_stands(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with store_of(None, 0) as store:
        set_all(store, 0)
        write_snapshot(store, path, {"version": 0})
        faults = FaultySyscalls(fail(errno.EIO, on="fsync", path="*manifest.json"))
        with seam.injected(faults), pytest.raises(StorageError), store.capture() as capture:
            write_capture(capture, path, {"version": 1}, replace=True)
        assert Snapshot.open(path).state == {"version": 0}
        for number, fault in ((2, fail(errno.EIO, on="nothing")), (3, fail(errno.EINVAL, on="exchange"))):
            with seam.injected(FaultySyscalls(fault)), store.capture() as capture:
                write_capture(capture, path, {"version": number}, replace=True)
            assert Snapshot.open(path).state == {"version": number}
    assert [entry.name for entry in tmp_path.iterdir()] == ["snapshot"]
