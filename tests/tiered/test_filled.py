"""Units that are recorded as filled: what a later process may take over, and when no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.crash import crash_everywhere
from support.stores import PAGE_BYTES, drives_in, layout_of

from tierstream.io import seam
from tierstream.io.errors import CorruptionError
from tierstream.io.posix import PosixBackend
from tierstream.io.transfer import Direction, transfer_all
from tierstream.tiered.filled import Filled
from tierstream.tiered.layout import Page
from tierstream.tiered.readback import ReadBackMode
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = layout_of(
    *(
        (unit, plane, "float32", PAGE_BYTES // 2, plane != "grad")
        for unit in "ab"
        for plane in ("weight", "grad")
    )
)
PAGES = LAYOUT.pages("a", "weight")
VALUES = {"weights": "w"}


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend(threads=2)
    yield backend
    backend.close()


def create(root: Path, backend: PosixBackend, readback: ReadBackMode = "off") -> ZarrDirectory:
    return ZarrDirectory.create(drives_in([root], backend), LAYOUT, {}, readback=readback, values=VALUES)


def write(directory: ZarrDirectory, *pages: Page, byte: int = 7) -> None:
    for page in pages:
        directory.write(page, np.full(PAGE_BYTES, byte, np.uint8)).result()


def recorded(root: Path, backend: PosixBackend, readback: ReadBackMode = "off") -> None:
    """The unit `a` is filled and recorded, then the process ends."""
    directory = create(root, backend, readback)
    write(directory, *PAGES)
    directory.record(PAGES)
    directory.close()


def test_recorded_units_keep_their_files_and_others_do_not(tmp_path: Path, backend: PosixBackend) -> None:
    recorded(tmp_path, backend)
    inodes = {page: os.stat(tmp_path / "a/weight/c" / str(page.index)).st_ino for page in PAGES}
    (tmp_path / "b" / "old").write_text("")
    directory = create(tmp_path, backend)
    assert list(directory.filled.pages) == PAGES
    assert {page: os.stat(directory.path(page)).st_ino for page in PAGES} == inodes
    assert not (tmp_path / "b" / "old").exists()
    frame = np.zeros(PAGE_BYTES, np.uint8)
    directory.read(PAGES[-1], frame).result()
    assert np.all(frame == 7)
    directory.close()


@pytest.mark.parametrize("page", [PAGES[0], Page("b", "grad", 0)], ids=["recorded", "of a step"])
def test_a_step_that_writes_ends_the_record(tmp_path: Path, backend: PosixBackend, page: Page) -> None:
    recorded(tmp_path, backend)
    directory = create(tmp_path, backend)
    write(directory, Page("b", "weight", 0))
    assert directory.filled.pages
    write(directory, page)
    assert not directory.filled.pages
    directory.close()
    again = create(tmp_path, backend)
    assert not again.filled.pages
    assert again.doubt == ""
    again.close()


def test_pages_are_compared_with_what_an_earlier_process_wrote(tmp_path: Path, backend: PosixBackend) -> None:
    recorded(tmp_path, backend, "full")
    with open(tmp_path / "a/weight/c/0", "r+b") as file:
        file.write(b"\0")
    directory = create(tmp_path, backend, "full")
    with pytest.raises(CorruptionError, match="page 0 of plane weight of unit a came back other"):
        directory.read(PAGES[0], np.zeros(PAGE_BYTES, np.uint8)).result()
    directory.close()
    again = create(tmp_path, backend, "full")
    assert not again.filled.pages
    again.close()


def test_whenever_the_power_goes_recorded_bytes_are_those_of_the_record(tmp_path: Path) -> None:
    identity, found = {"weights": "w"}, []

    def put(place: Path, byte: int) -> None:
        path, calls = str(place / "a/weight/c/0"), seam.current()
        fd = calls.open(path, os.O_WRONLY)
        try:
            transfer_all(Direction.WRITE, fd, path, np.full(512, byte, np.uint8), 0)
        finally:
            calls.close(fd)

    def prepare(place: Path) -> None:
        (place / "a/weight/c").mkdir(parents=True)
        (place / "a/weight/c/0").write_bytes(bytes(512))

    def act(place: Path) -> None:
        filled = Filled([str(place)], identity, "mark")
        put(place, 1)
        filled.add({PAGES[0]: None})
        filled.forget()
        put(place, 2)

    for place in crash_everywhere(tmp_path, prepare, act):
        filled = Filled([str(place)], identity, "another")
        assert filled.read(["mark"]) == ""
        found.append(len(filled.pages))
        if filled.pages:
            assert (place / "a/weight/c/0").read_bytes() == b"\1" * 512
    assert set(found) == {0, 1}
