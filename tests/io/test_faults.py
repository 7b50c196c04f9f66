"""The posix backend when system calls fail, fall short, are interrupted or late."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drive_kinds import Drive, drive_of_kind, in_page_cache, small_ext4
from support.faults import Call, FaultySyscalls, delay, fail, interrupt_every, refuse_direct_transfer

from tierstream.io import seam
from tierstream.io.backend import TransferCounts
from tierstream.io.direct import aligned_buffer
from tierstream.io.errors import StorageError
from tierstream.io.posix import PosixBackend
from tierstream.io.seam import HostBytes

MIB = 1 << 20
TASK_BYTES = 64 << 10


@pytest.fixture
def drive() -> Iterator[Drive]:
    with drive_of_kind("posix-direct", threads=3, task_bytes=TASK_BYTES) as found:
        yield found


def page_file(drive: Drive, nbytes: int = MIB) -> Path:
    path = drive.directory / "page"
    path.write_bytes(np.random.default_rng(1).bytes(nbytes))
    return path


def random_page(nbytes: int = MIB) -> HostBytes:
    page = aligned_buffer(nbytes)
    page[:] = np.random.default_rng(2).integers(0, 256, nbytes, dtype=np.uint8)
    return page


@pytest.mark.parametrize(
    "faulty",
    [
        lambda: FaultySyscalls(short_bytes=7),
        lambda: FaultySyscalls(interrupt_every(5)),
        lambda: FaultySyscalls(interrupt_every(2), short_bytes=7),
        lambda: FaultySyscalls(delay(0), interrupt_every(3), short_bytes=100),
        lambda: FaultySyscalls(refuse_direct_transfer(), interrupt_every(5), short_bytes=5000),
    ],
    ids=["short", "interrupted", "both", "late", "refused"],
)
@pytest.mark.parametrize(("offset", "misalignment"), [(0, 0), (4097, 0), (0, 16), (511, 1)])
def test_every_byte_arrives(
    drive: Drive, faulty: Callable[[], FaultySyscalls], offset: int, misalignment: int
) -> None:
    path = page_file(drive, 300_000)
    oracle = bytearray(path.read_bytes())
    data = random_page(4096 + 123_456)[misalignment:]
    oracle[offset : offset + data.nbytes] = data.tobytes()
    out = np.zeros(300_000, dtype=np.uint8)
    syscalls = faulty()
    with seam.injected(syscalls):
        file = drive.backend.open(path, writable=True)
        assert file.write_from(data, offset).result() == data.nbytes
        assert file.read_into(out, 0).result() == out.nbytes
    assert out.tobytes() == oracle
    assert path.read_bytes() == oracle
    assert len(syscalls.calls) > 10, "the faults were on the way"


def test_short_counts_stay_on_the_direct_path(drive: Drive) -> None:
    path = page_file(drive)
    with seam.injected(FaultySyscalls(short_bytes=7)):
        drive.backend.open(path, writable=True).write_from(random_page(), 0).result()
    assert drive.backend.counts().bytes_direct == MIB
    assert drive.backend.counts().bytes_buffered == 0


@pytest.mark.parametrize("misalignment", [1, 16, 4095])
def test_a_buffer_at_any_address_goes_direct(drive: Drive, misalignment: int) -> None:
    """Through a bounce buffer: three and a half of them, in two tasks."""
    backend = drive.reopen(threads=1, task_bytes=2 * MIB)
    nbytes = 3 * MIB + MIB // 2
    path, data = page_file(drive, nbytes), random_page(nbytes + 4096)[misalignment:][:nbytes]
    file = backend.open(path, writable=True)
    file.write_from(data, 0).result()
    out = aligned_buffer(nbytes + 4096)[misalignment:][:nbytes]
    file.read_into(out, 0).result()
    assert out.tobytes() == data.tobytes() == path.read_bytes()
    assert backend.counts() == TransferCounts(2 * nbytes, 0)
    assert file.path_taken.direct


class PartOfABlock(seam.Syscalls):
    """Direct transfers that stop within a block, as no local file system does."""

    def preadv(self, fd: int, buffer: HostBytes, offset: int) -> int:
        return super().preadv(fd, buffer, offset) - (buffer.nbytes > 4096) * 100

    def pwritev(self, fd: int, buffer: HostBytes, offset: int) -> int:
        return super().pwritev(fd, buffer, offset) - (buffer.nbytes > 4096) * 100


def test_a_count_within_a_block_is_finished_buffered(drive: Drive) -> None:
    path, data, out = page_file(drive), random_page(), np.zeros(MIB, dtype=np.uint8)
    with seam.injected(PartOfABlock()):
        file = drive.backend.open(path, writable=True)
        file.write_from(data, 0).result()
        file.read_into(out, 0).result()
    assert np.array_equal(out, data)
    assert path.read_bytes() == data.tobytes()
    assert drive.backend.counts().bytes_buffered > 0
    assert file.path_taken.direct, "the kernel was not asked to go on within a block"


@pytest.mark.parametrize("direction", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EIO, "see `dmesg`"), (errno.ENOSPC, "free space there"), (errno.EDQUOT, "quota")],
)
def test_a_failed_transfer_names_path_offset_and_errno(
    drive: Drive, direction: str, number: int, words: str
) -> None:
    path, page = page_file(drive), random_page()
    before = page.copy()

    def failing_at_third_task(call: Call) -> None:
        if call.name == direction and call.offset == 2 * TASK_BYTES:
            raise OSError(number, "injected")

    file = drive.backend.open(path, writable=True)
    start = file.read_into if direction == "preadv" else file.write_from
    with (
        seam.injected(FaultySyscalls(failing_at_third_task)),
        pytest.raises(StorageError, match=words) as caught,
    ):
        start(page, 0).result()
    assert caught.value.path == str(path)
    assert caught.value.errno == number
    assert caught.value.offset == 2 * TASK_BYTES
    assert f"errno {number}" in str(caught.value)
    assert f"at byte {2 * TASK_BYTES}" in str(caught.value)
    # The drive works again: so does the file.
    assert file.write_from(before, 0).result() == MIB
    assert path.read_bytes() == before.tobytes()


def test_an_error_within_a_task_has_the_offset_of_the_call(drive: Drive) -> None:
    path = page_file(drive)
    with seam.injected(FaultySyscalls(fail(errno.EIO, on="preadv", at=3), short_bytes=7)):
        file = drive.backend.open(path, writable=False)
        with pytest.raises(StorageError) as caught:
            file.read_into(random_page(TASK_BYTES), 0).result()
    assert caught.value.offset == 2 * 4096


def test_a_failed_request_resolves_after_its_last_access(drive: Drive) -> None:
    """When the future raises, nobody may still write into the buffer: it may hold another page by then."""
    path = page_file(drive)

    under_way = threading.Event()

    def third_fails_while_others_run(call: Call) -> None:
        if call.name == "preadv":
            if call.offset == 2 * TASK_BYTES:
                under_way.wait(10)
                raise OSError(errno.EIO, "injected")
            under_way.set()
            time.sleep(0.1)

    page = aligned_buffer(MIB)
    with seam.injected(FaultySyscalls(third_fails_while_others_run)):
        future = drive.backend.open(path, writable=False).read_into(page, 0)
        with pytest.raises(StorageError):
            future.result()
        at_error = page.copy()
        time.sleep(0.3)
    assert np.array_equal(page, at_error)
    assert page[:TASK_BYTES].any(), "the first task was under way and was waited for"


def test_the_first_error_wins_and_later_tasks_are_skipped(drive: Drive) -> None:
    path = page_file(drive, 4 * MIB)
    faulty = FaultySyscalls(fail(errno.EIO, on="preadv"), delay(0))
    with seam.injected(faulty):
        file = drive.backend.open(path, writable=False)
        with pytest.raises(StorageError) as caught:
            file.read_into(aligned_buffer(4 * MIB), 0).result()
    assert caught.value.errno == errno.EIO
    assert faulty.names().count("preadv") <= 3, "one per thread at most"


def test_a_refusal_at_the_first_transfer_is_told_once(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    with seam.injected(FaultySyscalls(refuse_direct_transfer())), caplog.at_level(logging.WARNING):
        for name in "abc":
            path = drive.directory / name
            path.write_bytes(bytes(8192))
            file = drive.backend.open(path, writable=True)
            assert file.path_taken.direct, "nothing was refused so far"
            file.write_from(random_page(8192), 0).result()
            assert not file.path_taken.direct
            assert "O_DIRECT was refused: Invalid argument" in str(file.path_taken)
    assert [record.getMessage().count("O_DIRECT was refused") for record in caplog.records] == [1]


def test_a_file_system_that_is_buffered_behind_o_direct(tmp_path: Path) -> None:
    """ext4 that journals data accepts O_DIRECT and goes through the page cache; statx tells."""
    with (
        small_ext4(tmp_path, 64 * MIB, options="data=journal") as directory,
        drive_of_kind("posix-direct") as drive,
    ):
        path = directory / "page"
        drive.backend.create(path, MIB)
        file = drive.backend.open(path, writable=True)
        file.write_from(random_page(), 0).result()
        assert in_page_cache(path)
        assert str(file.path_taken).startswith("posix-buffered (ext4 does not support direct I/O")
        assert drive.backend.counts() == TransferCounts(0, MIB)


def test_a_file_system_that_says_no_by_statx(drive: Drive) -> None:
    class NoDirect(seam.Syscalls):
        def statx_dioalign(self, fd: int) -> tuple[int, int] | None:
            return 0, 0

    with seam.injected(NoDirect()):
        file = drive.backend.open(page_file(drive), writable=True)
        file.write_from(random_page(), 0).result()
    assert "does not support direct I/O" in str(file.path_taken)
    assert drive.backend.counts().bytes_direct == 0


@pytest.mark.parametrize(("answer", "direct"), [(None, 3 * 4096), ((512, 512), 3 * 4096), ((4, 16384), 0)])
def test_the_block_is_what_the_kernel_wants_but_never_below_a_page(
    drive: Drive, answer: tuple[int, int] | None, direct: int
) -> None:
    class Answer(seam.Syscalls):
        def statx_dioalign(self, fd: int) -> tuple[int, int] | None:
            return answer

    with seam.injected(Answer()):
        drive.backend.open(page_file(drive), writable=True).write_from(random_page(3 * 4096), 4096).result()
    assert drive.backend.counts().bytes_direct == direct


def test_a_file_replaced_while_in_use_is_refused(drive: Drive) -> None:
    """Descriptors are closed and opened again: another file of that name must not pass for the first."""
    path = page_file(drive)
    files = []
    for index in range(300):  # more than stay open
        other = drive.directory / f"other-{index}"
        other.write_bytes(bytes(4096))
        files.append(other)
    file = drive.backend.open(path, writable=True)
    for other in files:
        drive.backend.open(other, writable=False)
    (drive.directory / "other-0").replace(path)
    with pytest.raises(StorageError, match="another file was put in its place"):
        file.write_from(random_page(4096), 0).result()
    assert path.read_bytes() == bytes(4096)


def test_a_failed_close_is_not_lost(drive: Drive) -> None:
    path = page_file(drive)
    faulty = FaultySyscalls(fail(errno.EIO, on="close", path=str(path)))
    with seam.injected(faulty):
        file = drive.backend.open(path, writable=True)
        file.write_from(random_page(), 0).result()
        with pytest.raises(StorageError, match=r"closing .* failed"):
            file.close()
    assert not faulty.open_descriptors


def test_without_direct_io_by_choice(tmp_path: Path) -> None:
    backend = PosixBackend(threads=1, direct=False)
    path = tmp_path / "page"
    path.write_bytes(bytes(8192))
    try:
        file = backend.open(path, writable=True)
        file.write_from(random_page(8192), 0).result()
        assert str(file.path_taken) == "posix-buffered (direct I/O is switched off)"
        assert backend.transfer_path(tmp_path) == file.path_taken
        assert backend.counts().bytes_direct == 0
    finally:
        backend.close()


@pytest.mark.parametrize("kind", ["posix-direct", "posix-open-refused", "kvikio"])
def test_a_drive_that_fills_up(tmp_path: Path, kind: str) -> None:
    """A real ENOSPC, of reservations and of writes into a sparse file."""
    with small_ext4(tmp_path, 16 * MIB) as directory, drive_of_kind(kind) as drive:
        with pytest.raises(StorageError, match=r"creating .* No space left .*64\.00 MiB wanted") as caught:
            drive.backend.create(directory / "large", 64 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert not (directory / "large").exists()

        sparse = directory / "sparse"
        with sparse.open("wb") as file:
            file.truncate(64 * MIB)
        written = random_page(64 * MIB)
        with pytest.raises(StorageError, match="the drive is full") as caught:
            drive.backend.open(sparse, writable=True).write_from(written, 0).result()
        assert caught.value.errno == errno.ENOSPC
        # All 16 calls of 4 MiB are under way at once: any of them, the first one too, may find no room.
        assert caught.value.offset is not None
        assert 0 <= caught.value.offset < 64 * MIB
