"""Every kind of failure of a drive, at a store in full work: the named error, or the right bytes all the
same; and what was committed before is on the drive to the bit.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.drive_kinds import open_descriptors
from support.faults import (
    TRANSFERS,
    Call,
    Fault,
    FaultySyscalls,
    delay,
    fail,
    interrupt_every,
    refuse_direct_open,
    refuse_direct_transfer,
)
from support.stores import PAGE_BYTES, content_bytes, drives_in, layout_of, pattern

from tierstream.io import seam
from tierstream.io.errors import StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Page
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = layout_of(
    ("u", "committed", "uint8", 12 * PAGE_BYTES - 100, True),
    ("u", "changing", "uint8", 12 * PAGE_BYTES, True),
    ("u", "grad", "uint8", 8 * PAGE_BYTES, False),
)
COMMITTED, CHANGING, GRAD = (LAYOUT.pages("u", plane) for plane in ("committed", "changing", "grad"))
FRAMES = 6


def stall(*, after: int, duration_s: float) -> Fault:
    """A drive that stops answering for a while, once, and then goes on."""
    lock, left = threading.Lock(), [after]

    def fault(call: Call) -> None:
        if call.name in TRANSFERS:
            with lock:  # the others wait as well
                left[0] -= 1
                if left[0] == 0:
                    time.sleep(duration_s)

    return fault


def slow_down(*, after: int, duration_s: float) -> Fault:
    """A drive that takes so long for every transfer, from the `after`-th on."""

    def fault(call: Call) -> None:
        if call.name in TRANSFERS and call.number >= after:
            time.sleep(duration_s)

    return fault


class LateFaults(FaultySyscalls):
    """Faults that begin when `armed` is set; short counts are there from the start."""

    def __init__(self, *faults: Fault, short_bytes: int | None = None) -> None:
        self.armed = threading.Event()
        super().__init__(*map(self._late, faults), short_bytes=short_bytes)

    def _late(self, fault: Fault) -> Fault:
        return lambda call: fault(call) if self.armed.is_set() else None


@dataclass(frozen=True)
class Case:
    """What is done to the system calls, and the error in which the step must end; none: it goes on.

    The faults begin after the first commit, or `early`, before the files are opened.
    """

    name: str
    faults: Callable[[], LateFaults]
    number: int | None = None
    said: str = ""
    early: bool = False


CASES = [
    Case("short counts", lambda: LateFaults(short_bytes=7)),
    Case("EINTR storm", lambda: LateFaults(interrupt_every(2))),
    Case("EINTR storm and short counts", lambda: LateFaults(interrupt_every(2), short_bytes=7)),
    Case(
        "short counts, EINTR, buffered",
        lambda: LateFaults(refuse_direct_transfer(), interrupt_every(5), short_bytes=97),
    ),
    Case("delays", lambda: LateFaults(delay(3, max_s=0.004))),
    Case("slows down", lambda: LateFaults(slow_down(after=10, duration_s=0.01))),
    Case("stalls and goes on", lambda: LateFaults(stall(after=9, duration_s=0.5))),
    Case("EINVAL at open", lambda: LateFaults(refuse_direct_open()), early=True),
    Case("EINVAL at the first transfer", lambda: LateFaults(refuse_direct_transfer()), early=True),
    Case(
        "EIO at a read",
        lambda: LateFaults(fail(errno.EIO, on="preadv", at=5)),
        errno.EIO,
        r"reading .*/u/\w+/c/\d+.*errno 5",
    ),
    Case(
        "EIO at a read, once",
        lambda: LateFaults(fail(errno.EIO, on="preadv", at=5, times=1)),
        errno.EIO,
        r"reading .*/u/\w+/c/\d+.*errno 5",
    ),
    Case(
        "EIO at write-back",
        lambda: LateFaults(fail(errno.EIO, on="pwritev", path="*/changing/*", at=3)),
        errno.EIO,
        r"writing .*/u/changing/c/\d+.*errno 5",
    ),
    Case(
        "ENOSPC at write-back",
        lambda: LateFaults(fail(errno.ENOSPC, on="pwritev", path="*/changing/*", at=3)),
        errno.ENOSPC,
        r"writing .*/u/changing/c/\d+.*drive is full",
    ),
    Case(
        "ENOSPC where a gradient's file is made",
        lambda: LateFaults(fail(errno.ENOSPC, on="posix_fallocate", path="*/grad/*", at=2)),
        errno.ENOSPC,
        r"creating .*/u/grad/c/\d+.*No space left",
    ),
    Case(
        "ENOSPC where a gradient is spilled",
        lambda: LateFaults(fail(errno.ENOSPC, on="pwritev", path="*/grad/*", at=2)),
        errno.ENOSPC,
        r"writing .*/u/grad/c/\d+.*drive is full",
    ),
    Case(
        "EIO after short counts and delays",
        lambda: LateFaults(delay(5), fail(errno.EIO, on="pwritev", at=9), short_bytes=512),
        errno.EIO,
        r"writing .*errno 5",
    ),
]


class Steps:
    """Threads at one store, like those of a training step. `versions` says what a page holds."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.versions: dict[Page, int] = {}

    def write(self, pages: list[Page], version: int, intent: Intent = Intent.OVERWRITE) -> None:
        for page in pages:
            with self.store.acquire([(page, intent)]) as lease:
                if intent is Intent.UPDATE:
                    self.same(page, lease.arrays[0])
                lease.arrays[0][: content_bytes(LAYOUT, page)] = np.frombuffer(
                    pattern(LAYOUT, page, version), np.uint8
                )
                self.versions[page] = version

    def read(self, pages: list[Page], intent: Intent = Intent.READ) -> None:
        for page in pages:
            with self.store.acquire([(page, intent)]) as lease:
                self.same(page, lease.arrays[0])

    def same(self, page: Page, array: np.ndarray) -> None:
        expected = pattern(LAYOUT, page, self.versions[page])
        assert array[: len(expected)].tobytes() == expected

    def step(self, version: int) -> None:
        """Gradients made, spilled and consumed; one plane updated; another only read."""
        schedule = [*COMMITTED, *CHANGING, *GRAD, *GRAD]
        self.store.begin_step(schedule, schedule)
        with ThreadPoolExecutor(3) as pool:
            parts = [
                pool.submit(self.read, COMMITTED),
                pool.submit(self.write, CHANGING, version, Intent.UPDATE),
                pool.submit(self.gradients, version),
            ]
            errors = [part.exception(timeout=60) for part in parts]
        if any(errors):
            # A thread that was done before the failure has none; the others have the same one.
            assert len({id(error) for error in errors if error is not None}) == 1, errors
            raise next(error for error in errors if error is not None)

    def gradients(self, version: int) -> None:
        self.write(GRAD, version)
        self.read(GRAD, Intent.CONSUME)


def on_drive(directory: ZarrDirectory, pages: list[Page]) -> list[bytes]:
    return [Path(directory.path(page)).read_bytes() for page in pages]


def open_store(folder: Path, backend: PosixBackend) -> tuple[Store, ZarrDirectory]:
    directory = ZarrDirectory.create(drives_in([folder / "a", folder / "b"], backend), LAYOUT, {})
    return (
        Store(
            LAYOUT,
            dram_bytes=FRAMES * PAGE_BYTES,
            directory=directory,
            prefetch_bytes=3 * PAGE_BYTES,
            writeback_bytes=2 * PAGE_BYTES,
            debug=True,
        ),
        directory,
    )


def commit(store: Store, directory: ZarrDirectory, steps: Steps, snapshot: Path) -> list[bytes]:
    """Version 0 of all durable pages, on the drive and in a snapshot; the chunk files of those only read
    later.
    """
    steps.write(COMMITTED + CHANGING, 0)
    store.flush()
    write_snapshot(store, snapshot, {})
    committed = on_drive(directory, COMMITTED)
    for page, found in zip(COMMITTED, committed, strict=True):
        assert found == pattern(LAYOUT, page, 0).ljust(LAYOUT.page_nbytes(page), b"\0")
    return committed


def take_steps(steps: Steps) -> None:
    for version in (1, 2, 3):
        steps.step(version)
    steps.store.flush()


def check_that_steps_fail(case: Case, steps: Steps, folder: Path) -> None:
    """With the error of the drive, now and for ever."""
    with pytest.raises(StorageError, match=case.said) as raised:
        take_steps(steps)
    assert raised.value.errno == case.number
    assert Path(raised.value.path).is_relative_to(folder)
    for use in (steps.store.flush, lambda: steps.read(COMMITTED)):
        with pytest.raises(StorageError) as again:
            use()
        assert again.value is raised.value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault(tmp_path: Path, case: Case) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    backend = PosixBackend(threads=2)
    faulty = case.faults()
    if case.early:
        faulty.armed.set()
    with seam.injected(faulty):
        store, directory = open_store(tmp_path, backend)
        steps = Steps(store)
        committed = commit(store, directory, steps, tmp_path / "snapshot")
        faulty.armed.set()
        if case.number is None:
            take_steps(steps)
        else:
            check_that_steps_fail(case, steps, tmp_path)
        store.close()
    backend.close()
    assert not faulty.open_descriptors
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads

    assert on_drive(directory, COMMITTED) == committed
    Snapshot.open(tmp_path / "snapshot").verify()
    for page, found in zip(CHANGING, on_drive(directory, CHANGING), strict=True):
        versions = [3] if case.number is None else range(4)
        assert found in [pattern(LAYOUT, page, version) for version in versions], "a page is torn"
