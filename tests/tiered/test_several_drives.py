"""The store's files on several drives: what each carries, and that one that is full or fails is named."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import Fault, FaultySyscalls, fail
from support.stores import PAGE_BYTES, all_pages, content_bytes, drives_in, layout_of, mixed_layout, pattern

from tierstream.io import seam
from tierstream.io.drives import Drive
from tierstream.io.errors import StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Page
from tierstream.tiered.readback import ReadBackMode
from tierstream.tiered.stats import DriveTraffic
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend(threads=2)
    yield backend
    backend.close()


def fill_pages(directory: ZarrDirectory, frame: np.ndarray, pages: list[Page]) -> None:
    for page in pages:
        directory.write(page, frame[: directory.layout.page_nbytes(page)]).result()


def test_each_drive_uses_its_own_backend_and_carries_its_weight(tmp_path: Path) -> None:
    layout = layout_of(("u", "weight", "uint8", 30 * PAGE_BYTES, True), ("u", "norm", "float32", 37, True))
    backends = [PosixBackend(threads=1), PosixBackend(threads=1)]
    drives = [
        Drive(str(tmp_path / name), backend, weight)
        for name, backend, weight in zip("ab", backends, (5.0, 2.5), strict=True)
    ]
    directory = ZarrDirectory.create(drives, layout, {}, readback="full")
    pages = all_pages(layout)
    frame = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert directory.traffic() == dict.fromkeys(directory.roots, DriveTraffic(0, 0, 0))
    fill_pages(directory, frame, pages)
    for page in pages[:6] * 2:
        directory.read(page, frame).result()
    nbytes_of = dict.fromkeys(directory.roots, 0)
    for page in pages:
        nbytes_of[directory.path(page).removesuffix(f"/{page.unit}/{page.plane}/c/{page.index}")] += (
            layout.page_nbytes(page)
        )
    a, b = directory.roots
    assert {nbytes // PAGE_BYTES for nbytes in nbytes_of.values()} == {20, 10}
    assert nbytes_of[a] // PAGE_BYTES == 20
    read = {a: 2 * 4 * PAGE_BYTES, b: 2 * 2 * PAGE_BYTES}
    assert directory.traffic() == {
        root: DriveTraffic(read[root], nbytes_of[root], read[root]) for root in (a, b)
    }
    directory.close()
    for root, backend in zip((a, b), backends, strict=True):
        counts = backend.counts()
        assert counts.bytes_direct + counts.bytes_buffered == read[root] + nbytes_of[root]
        backend.close()


MIXED = mixed_layout(units=2)
MIXED_PAGES = all_pages(MIXED)


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    readback=st.sampled_from(["off", "sampled", "full"]),
    frames=st.integers(2, 6),
    chosen=st.lists(st.tuples(st.sampled_from(MIXED_PAGES), st.booleans()), max_size=60),
)
@settings(max_examples=50)
def test_contents_are_those_of_a_model(
    weights: list[float], readback: ReadBackMode, frames: int, chosen: list[tuple[Page, bool]]
) -> None:
    """Pages written and read in any order on drives of any weights: always what was written last."""
    truth: dict[Page, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="several-drives-") as scratch:
        backend = PosixBackend(threads=2)
        drives = [Drive(f"{scratch}/{number}", backend, weight) for number, weight in enumerate(weights)]
        directory = ZarrDirectory.create(drives, MIXED, {}, readback=readback)
        with Store(
            MIXED,
            dram_bytes=frames * PAGE_BYTES,
            directory=directory,
            prefetch_bytes=2 * PAGE_BYTES,
            writeback_bytes=PAGE_BYTES,
            debug=True,
        ) as store:
            uses = chosen + [(page, False) for page in MIXED_PAGES]
            store.begin_step([page for page, write in uses if write or MIXED.spec(*page[:2]).durable], [])
            for version, (page, write) in enumerate(uses):
                if not write and page not in truth and not MIXED.spec(page.unit, page.plane).durable:
                    continue
                with store.acquire([(page, Intent.OVERWRITE if write else Intent.READ)]) as lease:
                    array = lease.arrays[0][: content_bytes(MIXED, page)]
                    if write:
                        truth[page] = pattern(MIXED, page, version)
                        array[:] = np.frombuffer(truth[page], dtype=np.uint8)
                    assert array.tobytes() == truth.get(page, bytes(len(array)))
        moved = directory.traffic().values()
        assert sum(drive.bytes_read for drive in moved) == store.stats.nvme_bytes_read
        assert sum(drive.bytes_written for drive in moved) == store.stats.nvme_bytes_written
        checked, read = sum(drive.bytes_checked for drive in moved), sum(drive.bytes_read for drive in moved)
        assert {"off": checked == 0, "sampled": checked <= read, "full": checked == read}[readback]
        backend.close()


class Volumes(FaultySyscalls):
    """Each root is a file system of its own with so many bytes free."""

    def __init__(self, free_bytes: dict[Path, int], *faults: Fault) -> None:
        super().__init__(*faults)
        self._free_bytes = {str(root): nbytes for root, nbytes in free_bytes.items()}

    def stat(self, path: str) -> os.stat_result:
        real = list(super().stat(path))
        if path in self._free_bytes:
            real[2] = 1_000_000 + list(self._free_bytes).index(path)
        return os.stat_result(real)

    def statvfs(self, path: str) -> os.statvfs_result:
        real = list(super().statvfs(path))
        real[1], real[4] = 1, self._free_bytes[path]  # f_frsize, f_bavail
        return os.statvfs_result(real)


def test_a_small_drive_takes_what_it_can_hold(tmp_path: Path, backend: PosixBackend) -> None:
    layout = layout_of(
        ("u", "weight", "uint8", 30 * PAGE_BYTES, True), ("u", "grad", "uint8", 9 * PAGE_BYTES, False)
    )
    roots = [tmp_path / "a", tmp_path / "b"]
    with seam.injected(Volumes({roots[0]: 7 * PAGE_BYTES + 5, roots[1]: 23 * PAGE_BYTES})):
        directory = ZarrDirectory.create(drives_in(roots, backend), layout, {})
    own = [[path for path in root.glob("u/weight/c/*") if not path.is_symlink()] for root in roots]
    assert list(map(len, own)) == [7, 23]
    assert len(list(roots[0].glob("u/weight/c/*"))) == 30
    directory.close()


def test_drives_that_are_too_small_together_are_all_named(tmp_path: Path, backend: PosixBackend) -> None:
    layout = layout_of(("u", "weight", "uint8", 30 * PAGE_BYTES, True))
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        seam.injected(Volumes({a: 7 * PAGE_BYTES + 5, b: 23 * PAGE_BYTES - 1})),
        pytest.raises(StorageError) as caught,
    ):
        ZarrDirectory.create([Drive(str(a), backend, 1.0), Drive(str(b), backend, 2.0)], layout, {})
    text = str(caught.value)
    assert f"{a} would need 40.00 KiB (40960 bytes), 28.00 KiB (28677 bytes) are free" in text
    assert f"{b} would need 80.00 KiB (81920 bytes), 92.00 KiB (94207 bytes) are free" in text
    assert not list(tmp_path.glob("*/u"))
    ZarrDirectory.create(drives_in([a, b], backend), layout, {}).close()


@pytest.mark.parametrize(
    ("number", "call", "verb"),
    [
        (errno.EIO, "preadv", "reading"),
        (errno.EIO, "pwritev", "writing"),
        (errno.ENOSPC, "pwritev", "writing"),
        (errno.ENOSPC, "posix_fallocate", "creating"),
    ],
)
def test_the_drive_that_fails_is_named(
    tmp_path: Path, backend: PosixBackend, number: int, call: str, verb: str
) -> None:
    """Only the second of three drives does; the others go on working."""
    layout = layout_of(("u", "weight", "uint8", 12 * PAGE_BYTES, True), ("u", "grad", "uint8", 49152, False))
    roots = [tmp_path / name for name in "abc"]
    frame = np.zeros(PAGE_BYTES, dtype=np.uint8)
    armed, broken = threading.Event(), fail(number, on=call, path=f"{roots[1]}/*")
    errors: dict[Page, BaseException] = {}
    with seam.injected(FaultySyscalls(lambda it: broken(it) if armed.is_set() else None)):
        directory = ZarrDirectory.create(drives_in(roots, backend), layout, {}, readback="full")
        fill_pages(directory, frame, all_pages(layout, durable=True))
        armed.set()
        for page in all_pages(layout, durable=call != "posix_fallocate"):
            try:
                move = directory.read if call == "preadv" else directory.write
                move(page, frame).result()
            except StorageError as error:
                errors[page] = error
    assert [type(error) for error in errors.values()] == [StorageError] * 4
    for page, error in errors.items():
        assert str(error).startswith(f"{verb} {roots[1]}/u/{page.plane}/c/{page.index}")
        assert f"(errno {number})" in str(error)
    directory.close()
