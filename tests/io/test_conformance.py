"""What every backend must do, on every kind of drive. The oracle is a bytearray and plain file reads."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import threading
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.drive_kinds import PATH_OF_KIND, Drive, drive_of_kind, in_page_cache, open_descriptors

from tierstream.io.backend import TransferCounts, open_backend
from tierstream.io.direct import aligned_buffer
from tierstream.io.errors import ConfigError, InvariantError, StorageError
from tierstream.io.seam import HostBytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [1, 511, 512, 513, 4095, 4096, 4097, 65536, MIB - 1, MIB, MIB + 1]
OFFSETS = [0, 1, 511, 4096, 4097]
TAIL_NBYTES = 5000
GUARD_NBYTES = 64


@pytest.fixture(params=PATH_OF_KIND)
def drive(request: pytest.FixtureRequest) -> Iterator[Drive]:
    with drive_of_kind(request.param, threads=4, task_bytes=256 * KIB) as found:
        yield found


def random_bytes(nbytes: int, seed: int = 0) -> HostBytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def at_address(nbytes: int, misalignment: int) -> HostBytes:
    """A buffer whose address is `misalignment` above a page boundary."""
    return aligned_buffer(nbytes + 4096)[misalignment : misalignment + nbytes]


def filled_file(directory: Path, nbytes: int, seed: int = 1) -> tuple[Path, bytearray]:
    content = bytearray(random_bytes(nbytes, seed).tobytes())
    path = directory / f"file-{nbytes}-{seed}"
    path.write_bytes(content)
    return path, content


def check_round_trip(drive: Drive, nbytes: int, offset: int, misalignment: int) -> None:
    """Writes into the middle of a file and reads back, with guards around range and buffer."""
    path, oracle = filled_file(drive.directory, offset + nbytes + TAIL_NBYTES)
    data = at_address(nbytes, misalignment)
    data[:] = random_bytes(nbytes, seed=2)
    oracle[offset : offset + nbytes] = data.tobytes()
    file = drive.backend.open(path, writable=True)
    assert file.write_from(data, offset).result() == nbytes
    assert path.read_bytes() == oracle

    around = at_address(nbytes + 2 * GUARD_NBYTES, misalignment)
    around[:] = 0xA5
    inside = around[GUARD_NBYTES:-GUARD_NBYTES]
    assert file.read_into(inside, offset).result() == nbytes
    assert zlib.crc32(inside) == zlib.crc32(data)
    assert np.array_equal(inside, data)
    assert (around[:GUARD_NBYTES] == 0xA5).all()
    assert (around[-GUARD_NBYTES:] == 0xA5).all()
    file.close()


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_round_trip(drive: Drive, nbytes: int, offset: int) -> None:
    check_round_trip(drive, nbytes, offset, misalignment=0)


@pytest.mark.parametrize("misalignment", [1, 16, 511, 512, 2048])
def test_round_trip_at_any_address(drive: Drive, misalignment: int) -> None:
    check_round_trip(drive, MIB + 12345, 4096, misalignment)


@pytest.mark.parametrize("offset", [0, 4097])
def test_round_trip_of_an_odd_layer(drive: Drive, offset: int) -> None:
    check_round_trip(drive, 28_824_000, offset, misalignment=16)


def test_an_empty_request_resolves_at_once(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 100)
    file = drive.backend.open(path, writable=True)
    assert file.write_from(aligned_buffer(4096)[:0], 50).result() == 0
    assert file.read_into(aligned_buffer(4096)[:0], 5000).result() == 0
    assert path.read_bytes() == oracle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drive", "task_bytes"),
    [
        ("posix-direct", 4 * GIB),
        ("posix-direct", 4 * MIB),
        ("posix-transfer-refused", 4 * GIB),
        ("kvikio", 4 * GIB),
    ],
    indirect=["drive"],
)
def test_more_than_two_gib_in_one_request(drive: Drive, task_bytes: int) -> None:
    """The kernel moves at most 0x7ffff000 bytes per call: with tasks of 4 GiB it is asked for more."""
    backend = drive.reopen(threads=2, task_bytes=task_bytes)
    nbytes = 2 * GIB + 4096
    path = drive.directory / "sparse"
    with path.open("wb") as file:
        for marker, offset in ((b"first", 0), (b"last.", nbytes - 5)):
            file.seek(offset)
            file.write(marker)
    buffer = aligned_buffer(nbytes)
    assert backend.open(path, writable=False).read_into(buffer, 0).result() == nbytes
    assert buffer[:5].tobytes() == b"first"
    assert buffer[-5:].tobytes() == b"last."
    assert not buffer[5:4096].any()
    assert not buffer[4096 : 2 * GIB].view(np.uint64).any()
    assert not buffer[2 * GIB : -5].any()


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["posix-direct", "kvikio"], indirect=True)
def test_a_write_of_more_than_two_gib(drive: Drive) -> None:
    backend = drive.reopen(threads=2, task_bytes=4 * GIB)
    nbytes = 2 * GIB + 4096
    buffer = aligned_buffer(nbytes)
    buffer[:5], buffer[-5:] = np.frombuffer(b"first", np.uint8), np.frombuffer(b"last.", np.uint8)
    path = drive.directory / "large"
    backend.create(path, nbytes)
    assert backend.open(path, writable=True).write_from(buffer, 0).result() == nbytes
    assert path.stat().st_size == nbytes
    with path.open("rb") as file:
        assert file.read(5) == b"first"
        file.seek(nbytes - 5)
        assert file.read() == b"last."


@pytest.mark.parametrize("offset", [2 * GIB - 4097, 4 * GIB - 511, 5 * GIB])
def test_offsets_that_32_bits_do_not_hold(drive: Drive, offset: int) -> None:
    path = drive.directory / "sparse"
    with path.open("wb") as file:
        file.truncate(6 * GIB)
    data, out = at_address(20_000, 16), at_address(20_000 + 2 * GUARD_NBYTES, 1)
    data[:] = random_bytes(20_000, seed=2)
    opened = drive.backend.open(path, writable=True)
    assert opened.write_from(data, offset).result() == 20_000
    assert opened.read_into(out, offset - GUARD_NBYTES).result() == out.nbytes
    assert out.tobytes() == bytes(GUARD_NBYTES) + data.tobytes() + bytes(GUARD_NBYTES)
    with path.open("rb") as file:
        file.seek(offset - GUARD_NBYTES)
        assert file.read(out.nbytes) == out.tobytes()


def test_concurrent_requests_do_not_mix(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 6 * MIB)
    file = drive.backend.open(path, writable=True)
    rng = np.random.default_rng(3)
    cuts = sorted({0, 6 * MIB, *(int(cut) for cut in rng.integers(1, 6 * MIB, 47))})
    writes, reads = [], []
    for index, (start, stop) in enumerate(pairwise(cuts)):
        if index % 2:
            data = random_bytes(stop - start, seed=index)
            oracle[start:stop] = data.tobytes()
            writes.append(file.write_from(data, start))
        else:
            out = np.zeros(stop - start, dtype=np.uint8)
            reads.append((start, out, file.read_into(out, start)))
    assert [future.result() for future in writes] == [b - a for a, b in list(pairwise(cuts))[1::2]]
    for start, out, future in reads:
        assert future.result() == out.nbytes
        assert out.tobytes() == oracle[start : start + out.nbytes]
    assert path.read_bytes() == oracle


def test_concurrent_writes_within_one_block_keep_their_neighbours(drive: Drive) -> None:
    """Requests that share blocks and even sectors must not write back each other's old bytes."""
    path, oracle = filled_file(drive.directory, 64 * KIB)
    file = drive.backend.open(path, writable=True)
    futures = []
    for index, start in enumerate(range(0, 64 * KIB - 99, 99)):
        data = random_bytes(99, seed=index)
        oracle[start : start + 99] = data.tobytes()
        futures.append(file.write_from(data, start))
    assert all(future.result() == 99 for future in futures)
    assert path.read_bytes() == oracle


def test_a_request_keeps_buffer_and_file_alive_and_cannot_be_cancelled(drive: Drive) -> None:
    """The future is all that the caller keeps."""
    path, _ = filled_file(drive.directory, 8 * MIB)
    expected = random_bytes(8 * MIB, seed=9).tobytes()
    future = drive.backend.open(path, writable=True).write_from(random_bytes(8 * MIB, seed=9), 0)
    assert not future.cancel()
    gc.collect()
    junk = [random_bytes(8 * MIB, seed=0) for _ in range(3)]  # where a buffer was that is gone
    assert future.result() == 8 * MIB
    assert path.read_bytes() == expected

    memory = np.zeros(8 * MIB, dtype=np.uint8)
    out, gone = memory[:], threading.Event()
    weakref.finalize(out, gone.set)
    future = drive.backend.open(path, writable=False).read_into(out, 0)
    del out
    gc.collect()
    assert not gone.is_set() or future.done()
    assert future.result() == 8 * MIB
    assert memory.tobytes() == expected
    del junk


def test_a_file_closed_early_finishes_its_requests(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 8 * MIB)
    file = drive.backend.open(path, writable=False)
    out = np.zeros(8 * MIB, dtype=np.uint8)
    future = file.read_into(out, 0)
    file.close()
    assert future.result() == 8 * MIB
    assert out.tobytes() == oracle
    assert str(path) not in open_descriptors()
    file.close()  # a second time is nothing
    with pytest.raises(InvariantError, match="closed"):
        file.read_into(out, 0)


@pytest.mark.parametrize(
    ("file_bytes", "offset", "nbytes"), [(10_000, 0, 12_288), (10_000, 8192, 4096), (10, 50, 5)]
)
def test_a_file_that_ends_early_is_an_error_with_its_offset(
    drive: Drive, file_bytes: int, offset: int, nbytes: int
) -> None:
    path, _ = filled_file(drive.directory, file_bytes)
    file = drive.backend.open(path, writable=False)
    with pytest.raises(StorageError, match=f"ends at byte {file_bytes}") as caught:
        file.read_into(aligned_buffer(nbytes), offset).result()
    assert caught.value.path == str(path)
    assert caught.value.offset == max(offset, file_bytes)
    assert path.stat().st_size == file_bytes


def test_what_cannot_be_opened_is_named(drive: Drive) -> None:
    missing = drive.directory / "missing"
    with pytest.raises(StorageError, match=r"No such file or directory \(errno 2\)") as caught:
        drive.backend.open(missing, writable=True)
    assert caught.value.path == str(missing)
    assert not missing.exists()
    with pytest.raises(StorageError, match="not a regular file"):
        drive.backend.open(drive.directory, writable=False)
    with pytest.raises(StorageError, match="No such file"):
        drive.backend.transfer_path(missing)


def test_create_reserves_space_and_never_replaces(drive: Drive) -> None:
    path = drive.directory / "new"
    drive.backend.create(path, 3 * MIB + 1)
    status = path.stat()
    assert status.st_size == 3 * MIB + 1
    assert status.st_blocks * 512 >= 3 * MIB
    path.write_bytes(b"kept")
    with pytest.raises(StorageError, match="File exists"):
        drive.backend.create(path, 4096)
    assert path.read_bytes() == b"kept"
    with pytest.raises(StorageError, match="No such file"):
        drive.backend.create(drive.directory / "no" / "parent", 4096)


def test_misuse_is_an_invariant_error(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 8192)
    reader, writer = drive.backend.open(path, writable=False), drive.backend.open(path, writable=True)
    page = aligned_buffer(4096)
    with pytest.raises(InvariantError, match="opened for reading"):
        reader.write_from(page, 0)
    with pytest.raises(InvariantError, match="negative"):
        writer.write_from(page, -1)
    for unfit in (page.view(np.float32), page[::2], page.reshape(64, 64), bytes(page)):
        with pytest.raises(InvariantError):
            writer.write_from(unfit, 0)
    frozen = page.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvariantError, match="read-only"):
        reader.read_into(frozen, 0)
    assert writer.write_from(frozen, 0).result() == 4096
    assert path.read_bytes() == bytes(4096) + oracle[4096:]


def test_the_path_taken_is_the_real_one(drive: Drive) -> None:
    path = drive.directory / "page"
    backend = drive.reopen(threads=2)
    backend.create(path, MIB)
    file = backend.open(path, writable=True)
    file.write_from(aligned_buffer(MIB), 0).result()
    assert str(file.path_taken).startswith(PATH_OF_KIND[drive.kind])
    reported = file.path_taken.direct
    if drive.kind != "posix-tmpfs":  # does not answer; its files are nowhere else
        assert in_page_cache(path) != reported
    counts = backend.counts()
    assert counts == (TransferCounts(MIB, 0) if reported else TransferCounts(0, MIB))
    assert backend.transfer_path(drive.directory) == file.path_taken
    assert backend.transfer_path(path) == file.path_taken
    assert bool(file.path_taken.reason) == (file.path_taken.name != "posix-direct")
    assert list(drive.directory.iterdir()) == [path], "the probe leaves nothing behind"


def test_the_ends_of_an_unaligned_request_are_counted_apart(drive: Drive) -> None:
    path, _ = filled_file(drive.directory, 65536)
    backend = drive.reopen(threads=2)
    file = backend.open(path, writable=False)
    file.read_into(aligned_buffer(20_000), 100).result()
    direct = 3 * 4096 if file.path_taken.direct else 0  # blocks 1 to 3 lie whole in [100, 20100)
    assert backend.counts() == TransferCounts(direct, 20_000 - direct)


def test_nothing_is_left_after_close(drive: Drive) -> None:
    drive.reopen(threads=3)
    drive.backend.close()
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    for _ in range(2):
        backend = drive.reopen(threads=3)
        files = []
        for index in range(5):
            path, _ = filled_file(drive.directory, MIB, seed=index)
            files.append(backend.open(path, writable=True))
        wait([file.read_into(aligned_buffer(MIB), 0) for file in files])
        files[0].close()
        backend.close()
        with pytest.raises(InvariantError, match="closed"):
            backend.open(path, writable=False)
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads


def test_three_hundred_files_with_64_descriptors(drive: Drive) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    contents = {}
    for index in range(300):
        path = drive.directory / str(index)
        contents[path] = random_bytes(5000, seed=index)
        path.write_bytes(contents[path].tobytes())
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        backend = drive.reopen(threads=4)
        files = [backend.open(path, writable=True) for path in contents]
        for reverse in (False, True):
            outs = [np.zeros(5000, dtype=np.uint8) for _ in files]
            order = list(zip(files, outs, strict=True))[:: -1 if reverse else 1]
            wait([file.read_into(out, 0) for file, out in order])
            assert all(np.array_equal(out, data) for out, data in zip(outs, contents.values(), strict=True))
        futures = [
            file.write_from(data[::-1].copy(), 0) for file, data in zip(files, contents.values(), strict=True)
        ]
        assert [future.result() for future in futures] == [5000] * 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for path, data in contents.items():
        assert path.read_bytes() == data[::-1].tobytes()


def test_an_odd_path_works(drive: Drive) -> None:
    directory = drive.directory / "a b'c$HOME:é"
    directory.mkdir()
    path, oracle = filled_file(directory, 10_000)
    link = directory / "link"
    link.symlink_to(path.name)
    out = np.zeros(10_000, dtype=np.uint8)
    drive.backend.open(link, writable=False).read_into(out, 0).result()
    assert out.tobytes() == oracle


def test_writes_are_in_the_file_before_fsync(drive: Drive) -> None:
    """Another descriptor, here a copy by the shell's means, sees what a resolved future has written."""
    path, oracle = filled_file(drive.directory, 3 * MIB)
    file = drive.backend.open(path, writable=True)
    data = random_bytes(MIB + 7, seed=5)
    file.write_from(data, 4093).result()
    oracle[4093 : 4093 + data.nbytes] = data.tobytes()
    copy = shutil.copy(path, drive.directory / "copy")
    assert Path(copy).read_bytes() == oracle


def test_backends_by_name() -> None:
    with pytest.raises(ConfigError, match="choose one of auto, posix, kvikio"):
        open_backend("io_uring")
    backend = open_backend()
    try:
        assert backend.name in ("posix", "kvikio")
        assert os.path.basename(backend.transfer_path("/proc/self/exe").name)
    finally:
        backend.close()
