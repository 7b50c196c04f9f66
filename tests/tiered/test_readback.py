"""Drives that give back other bytes than were written: found, named to the byte, and never handed out."""

from __future__ import annotations

import errno
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from support.faults import FaultySyscalls, fail
from support.stores import PAGE_BYTES, all_pages, drives_in, layout_of, pattern, uniform_layout

from tierstream._native import crc32c
from tierstream.io import seam
from tierstream.io.errors import CorruptionError, StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.readback import BLOCK_BYTES, SAMPLE_PERIOD, ReadBack, ReadBackMode, followed_by
from tierstream.tiered.stats import DriveTraffic
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

#: Two blocks and a short one.
LARGE_PAGE = 2 * BLOCK_BYTES + PAGE_BYTES
#: Plane -> dtype, elements (two pages, the second one mostly padding; or less than a page), durable.
PLANES = {
    "weight": ("bfloat16", LARGE_PAGE // 2 + 5, True),
    "master_low": ("uint16", LARGE_PAGE // 2 + 5, True),
    "exp_avg": ("float32", LARGE_PAGE // 4 + 5, True),
    "norm": ("float32", 37, True),
    "grad": ("bfloat16", LARGE_PAGE // 2 + 5, False),
    "activation": ("uint8", LARGE_PAGE + 5, False),
}


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend(threads=2)
    yield backend
    backend.close()


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def write_out(store: Store, pages: list[Page]) -> None:
    """Give the pages content that reaches their files, through one frame."""
    for page in pages:
        with store.acquire([(page, Intent.OVERWRITE)]) as lease:
            content = np.frombuffer(pattern(store.layout, page, 1), dtype=np.uint8)
            lease.arrays[0][: len(content)] = content
    # The frame is wanted for another page, which is then step-local and gone.
    with store.acquire([(Page("other", "grad", 0), Intent.OVERWRITE)]):
        pass
    store.discard([Page("other", "grad", 0)])


def one_frame_store(
    path: Path, backend: PosixBackend, plane: str, mode: ReadBackMode
) -> tuple[Store, ZarrDirectory]:
    layout = layout_of(
        ("layers.0", plane, *PLANES[plane]), ("other", "grad", "uint8", 8, False), page_bytes=LARGE_PAGE
    )
    directory = ZarrDirectory.create(drives_in([path], backend), layout, {}, readback=mode)
    return Store(
        layout, dram_bytes=LARGE_PAGE, directory=directory, prefetch_bytes=0, writeback_bytes=0
    ), directory


@pytest.mark.parametrize("offset", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, -1])
@pytest.mark.parametrize("plane", PLANES)
def test_one_bit_is_found_and_named(tmp_path: Path, backend: PosixBackend, plane: str, offset: int) -> None:
    store, directory = one_frame_store(tmp_path, backend, plane, "full")
    with store:
        page = Page("layers.0", plane, 0)
        nbytes = store.layout.page_nbytes(page)
        at = offset % nbytes
        write_out(store, all_pages(store.layout)[:-1])
        path = directory.path(page)
        before = Path(path).read_bytes()
        flip(path, at)
        after = Path(path).read_bytes()
        with pytest.raises(CorruptionError) as caught:
            store.acquire([(page, Intent.READ)])
        start = at // BLOCK_BYTES * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, nbytes)
        device = subprocess.run(
            ["findmnt", "-n", "-o", "SOURCE", "-T", str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert str(caught.value).startswith(
            f"checking {tmp_path}/layers.0/{plane}/c/0 at byte {start} failed; bytes [{start}, {stop}) of "
            f"page 0 of plane {plane} of unit layers.0 came back other than they were written (CRC-32C "
            f"{crc32c(before[start:stop]):#010x} written, {crc32c(after[start:stop]):#010x} read; 1 of "
            f"{-(-nbytes // BLOCK_BYTES)} blocks of the page), and the drive of {tmp_path} ({device}) "
        )
        assert "`smartctl -a " in str(caught.value)
        assert "resume from the last checkpoint" in str(caught.value)
        assert (caught.value.path, caught.value.offset) == (path, start)
        assert isinstance(caught.value, StorageError)
        for use in (
            lambda: store.acquire([(page, Intent.READ)]),
            lambda: store.begin_step([], []),
            store.flush,
        ):
            with pytest.raises(CorruptionError) as again:
                use()
            assert again.value is caught.value
        assert directory.traffic()[str(tmp_path)].bytes_checked == 0


def test_the_last_page_of_a_plane_is_checked_with_its_padding(tmp_path: Path, backend: PosixBackend) -> None:
    store, directory = one_frame_store(tmp_path, backend, "weight", "full")
    with store:
        pages = all_pages(store.layout)[:-1]
        write_out(store, pages)
        flip(directory.path(pages[1]), LARGE_PAGE - 1)
        store.acquire([(pages[0], Intent.READ)]).release()
        with pytest.raises(CorruptionError, match="page 1 of plane weight"):
            store.acquire([(pages[1], Intent.READ)])


def test_all_damaged_blocks_are_counted(tmp_path: Path, backend: PosixBackend) -> None:
    store, directory = one_frame_store(tmp_path, backend, "weight", "full")
    with store:
        page = Page("layers.0", "weight", 0)
        write_out(store, all_pages(store.layout)[:-1])
        for offset in (BLOCK_BYTES + 7, 2 * BLOCK_BYTES):
            flip(directory.path(page), offset)
        with pytest.raises(CorruptionError, match=rf"at byte {BLOCK_BYTES} .* 2 of 3 blocks of the page"):
            store.acquire([(page, Intent.READ)])


def test_prefetch_hands_out_no_damaged_page(tmp_path: Path, backend: PosixBackend) -> None:
    layout = uniform_layout(8)
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), layout, {}, readback="full")
    pages = all_pages(layout)
    with Store(
        layout,
        dram_bytes=4 * PAGE_BYTES,
        directory=directory,
        prefetch_bytes=3 * PAGE_BYTES,
        writeback_bytes=PAGE_BYTES,
    ) as store:
        for page in pages:
            store.acquire([(page, Intent.OVERWRITE)]).release()
        store.flush()
        flip(directory.path(pages[2]), 100)
        store.begin_step(pages, pages)
        read: list[int] = []

        def read_in_order() -> None:
            for page in pages:
                with store.acquire([(page, Intent.READ)]):
                    read.append(page.index)

        with pytest.raises(CorruptionError, match="page 2 of plane weight of unit unit"):
            read_in_order()
        assert 2 not in read


def test_off_checks_nothing(tmp_path: Path, backend: PosixBackend) -> None:
    store, directory = one_frame_store(tmp_path, backend, "weight", "off")
    with store:
        page = Page("layers.0", "weight", 0)
        write_out(store, all_pages(store.layout)[:-1])
        flip(directory.path(page), 0)
        expected = pattern(store.layout, page, 1)
        with store.acquire([(page, Intent.READ)]) as lease:
            assert lease.arrays[0].tobytes() == bytes([expected[0] ^ 0x10]) + expected[1:]
    assert directory.traffic()[str(tmp_path)].bytes_checked == 0


# Which writes are checked


def frames_of(layout: Layout, version: int) -> dict[Page, np.ndarray]:
    return {
        page: np.frombuffer(pattern(layout, page, version), dtype=np.uint8).copy()
        for page in all_pages(layout)
    }


def test_sampled_gives_every_page_its_turn(tmp_path: Path, backend: PosixBackend) -> None:
    """Every page is damaged after every write; only contents that were written since can raise an alarm."""
    layout = uniform_layout(24)
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), layout, {}, readback="sampled")
    found: list[list[int]] = []
    for version in range(2 * SAMPLE_PERIOD):
        found.append([])
        for page, frame in frames_of(layout, version).items():
            directory.write(page, frame).result()
            flip(directory.path(page), version)
            try:
                directory.read(page, frame).result()
            except CorruptionError:
                found[-1].append(page.index)
    directory.close()
    for first in range(SAMPLE_PERIOD):
        rounds = found[first : first + SAMPLE_PERIOD]
        assert sorted(index for round_ in rounds for index in round_) == list(range(24))
    for round_ in found:
        assert [index // SAMPLE_PERIOD for index in round_] == [0, 1, 2], "one of eight neighbours per round"


def test_sampled_spares_what_is_sound(tmp_path: Path, backend: PosixBackend) -> None:
    """Contents change at every write, so checksums that were not forgotten would raise an alarm."""
    layout = uniform_layout(SAMPLE_PERIOD)
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), layout, {})
    for version in range(SAMPLE_PERIOD):
        for page, frame in frames_of(layout, version).items():
            assert directory.write(page, frame).result() == PAGE_BYTES
            for _ in range(2):
                assert directory.read(page, frame).result() == PAGE_BYTES
                assert frame.tobytes() == pattern(layout, page, version)
    nbytes = SAMPLE_PERIOD * SAMPLE_PERIOD * PAGE_BYTES
    assert directory.traffic() == {
        str(tmp_path): DriveTraffic(2 * nbytes, nbytes, 2 * nbytes // SAMPLE_PERIOD)
    }
    directory.close()


@pytest.mark.parametrize("drives", [2, 4, 8])
def test_sampled_looks_at_every_drive_in_every_round(drives: int) -> None:
    """Pages alternate between drives; the rounds must not be in step with that."""
    pages = [Page("unit", "weight", index) for index in range(SAMPLE_PERIOD * SAMPLE_PERIOD)]
    readback = ReadBack("sampled", pages)
    for _ in range(SAMPLE_PERIOD):
        assert {page.index % drives for page in pages if readback.choose(page)} == set(range(drives))


def test_a_failed_write_is_not_taken_for_written(tmp_path: Path, backend: PosixBackend) -> None:
    """What the file holds after it is not known: no alarm over either content."""
    layout = uniform_layout(1)
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), layout, {}, readback="full")
    (page,) = all_pages(layout)
    frame = frames_of(layout, 0)[page]
    directory.write(page, frame).result()
    with (
        seam.injected(FaultySyscalls(fail(errno.EIO, on="pwritev"))),
        pytest.raises(StorageError, match="Input/output error"),
    ):
        directory.write(page, frames_of(layout, 1)[page]).result()
    flip(directory.path(page), 0)
    assert directory.read(page, frame).result() == PAGE_BYTES
    directory.close()


# The future


def test_checks_run_in_the_thread_that_ends_the_transfer() -> None:
    seen: list[threading.Thread] = []
    inner: Future[int] = Future()
    outer = followed_by(inner, lambda: seen.append(threading.current_thread()))
    assert not outer.done()
    assert not outer.cancel()
    worker = threading.Thread(target=inner.set_result, args=(5,))
    worker.start()
    assert outer.result(timeout=10) == 5
    worker.join()
    assert seen == [worker]


def test_errors_of_transfer_and_check_reach_the_future() -> None:
    seen: list[int] = []
    failed: Future[int] = Future()
    failed.set_exception(OSError("drive"))
    with pytest.raises(OSError, match="drive"):
        followed_by(failed, lambda: seen.append(1)).result()
    assert seen == [], "what was not moved is not checked"
    done: Future[int] = Future()
    done.set_result(3)

    def check() -> None:
        raise CorruptionError("checking", "file")

    with pytest.raises(CorruptionError):
        followed_by(done, check).result()
