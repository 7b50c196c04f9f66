"""A store streamed as training does it: each page once, as many bytes as the kernel counts, nothing left."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.drive_kinds import drive_of_kind, open_descriptors
from support.faults import FaultySyscalls, fail

from tierstream.engine.measure.streaming import Pass, StreamedStore
from tierstream.io import seam
from tierstream.io.drives import Drive
from tierstream.io.errors import StorageError
from tierstream.io.posix import PosixBackend
from tierstream.io.workload import storage_bytes

PAGE_BYTES = 16384
STATE_BYTES = 6 << 20
#: Pages that the store may have kept in DRAM from the pass before.
KEPT = 32


@pytest.fixture
def direct() -> Iterator[Path]:
    with drive_of_kind("posix-direct") as drive:
        yield drive.directory


def drives_at(places: Sequence[Path], weights: Sequence[float] = (1.0,)) -> list[Drive]:
    return [
        Drive(str(place), PosixBackend(threads=2, task_bytes=PAGE_BYTES, queue_depth=8), weight)
        for place, weight in zip(places, weights, strict=True)
    ]


class Streamed:
    """A store on one drive, and what its passes do to the files."""

    def __init__(self, directory: Path) -> None:
        (self.drive,) = drives_at([directory / "store"])
        self.store = StreamedStore([self.drive], state_bytes=STATE_BYTES, page_bytes=PAGE_BYTES)

    def run(self, which: Pass) -> tuple[int, Counter[str], Counter[str]]:
        """(bytes it says it moved, reads per file, writes per file)"""
        watched = FaultySyscalls()
        with seam.injected(watched):
            sample = self.store.case(which, {}).run()
        moved = [call for call in watched.calls if call.name in ("preadv", "pwritev")]
        assert sum(call.nbytes for call in moved) == sample.amount
        assert {(call.offset, call.nbytes) for call in moved} == {(0, PAGE_BYTES)}
        reads, writes = (
            Counter(call.path for call in moved if call.name == name) for name in ("preadv", "pwritev")
        )
        return int(sample.amount), reads, writes

    def close(self) -> None:
        self.store.store.close()
        self.drive.backend.close()


@pytest.fixture
def streamed(direct: Path) -> Iterator[Streamed]:
    made = Streamed(direct)
    yield made
    made.close()


def test_the_state_has_the_planes_of_training_in_whole_pages(streamed: Streamed) -> None:
    store = streamed.store
    nbytes = Counter[str]()
    for (_, plane), spec in store.layout.planes.items():
        nbytes[plane] += spec.nbytes
    parameters = sum(unit.numel for unit in store.units)
    assert nbytes == {
        "weight": 2 * parameters,
        "master_low": 2 * parameters,
        "exp_avg": 4 * parameters,
        "exp_avg_sq": 4 * parameters,
    }
    assert sum(nbytes.values()) == pytest.approx(STATE_BYTES, rel=0.05)
    assert {os.path.getsize(path) for path in store.paths} == {PAGE_BYTES}
    assert len(set(store.paths)) == len(store.paths) == sum(nbytes.values()) // PAGE_BYTES


def test_the_state_cannot_be_compressed(streamed: Streamed) -> None:
    pages = [Path(path).read_bytes() for path in streamed.store.paths]
    blocks = [page[start : start + 4096] for page in pages for start in range(0, PAGE_BYTES, 4096)]
    assert len(set(blocks)) == len(blocks)
    assert min(len(set(block)) for block in blocks) > 200


def test_stream_reads_every_page_once_in_order_and_writes_none(streamed: Streamed) -> None:
    streamed.run("stream")
    moved, reads, writes = streamed.run("stream")
    paths = streamed.store.paths
    assert writes == {}
    assert max(reads.values()) == 1
    assert set(reads) <= set(paths)
    assert len(reads) >= len(paths) - KEPT
    assert moved == len(reads) * PAGE_BYTES


def test_update_reads_and_writes_every_page_once(streamed: Streamed) -> None:
    streamed.run("update")
    _, reads, writes = streamed.run("update")
    paths = streamed.store.paths
    assert writes == dict.fromkeys(paths, 1)
    assert max(reads.values()) == 1
    assert len(reads) >= len(paths) - KEPT


@pytest.mark.parametrize("which", ["stream", "update"])
def test_bytes_are_those_that_the_kernel_counts(streamed: Streamed, which: Pass) -> None:
    before = storage_bytes()
    if before is None:
        pytest.skip("this kernel does not count them")
    samples = [streamed.store.case(which, {}).run() for _ in range(3)]
    after = storage_bytes()
    assert after is not None
    kernel = sum(after) - sum(before)
    assert sum(sample.amount for sample in samples) == pytest.approx(kernel, rel=0.05)
    assert [sample.note for sample in samples] == [""] * 3


def test_nothing_stays_but_the_files(direct: Path) -> None:
    before = open_descriptors(), threading.active_count()
    made = Streamed(direct)
    made.run("stream")
    made.run("update")
    made.close()
    assert (open_descriptors(), threading.active_count()) == before


@pytest.mark.parametrize("at", [1, 30, 200])
def test_a_drive_that_fails_while_it_is_filled_is_let_go(direct: Path, at: int) -> None:
    before = open_descriptors(), threading.active_count()
    (drive,) = drives_at([direct / "store"])
    faulty = FaultySyscalls(fail(5, on="pwritev", path="*/layers.*", at=at))
    with seam.injected(faulty), pytest.raises(StorageError, match="Input/output error"):
        StreamedStore([drive], state_bytes=STATE_BYTES, page_bytes=PAGE_BYTES)
    drive.backend.close()
    assert (open_descriptors(), threading.active_count()) == before
    with seam.injected(FaultySyscalls()):
        again = Streamed(direct)  # its lock is free
        again.close()


def test_several_drives_share_by_weight(direct: Path) -> None:
    drives = drives_at([direct / "a", direct / "b"], [3.0, 1.0])
    with StreamedStore(drives, state_bytes=STATE_BYTES, page_bytes=PAGE_BYTES) as store:
        held = Counter(Path(path).relative_to(direct).parts[0] for path in store.paths)
        assert held["a"] == pytest.approx(3 * held["b"], rel=0.1)
        sample = store.case("update", {"drive": "all"})
        assert sample.labels == {"access": "update", "drive": "all"}
        assert sample.run().amount > 1.8 * STATE_BYTES
    for drive in drives:
        drive.backend.close()
