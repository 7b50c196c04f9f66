"""Scratch files: really written, incompressible, gone afterwards; files that measure nothing are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.drive_kinds import small_ext4
from support.faults import FaultySyscalls, fail

from tierstream.io import seam
from tierstream.io.errors import StorageError
from tierstream.io.extents import Allocation, allocation, check_written
from tierstream.io.posix import create_file
from tierstream.io.scratch import ScratchFolder, fill, incompressible, stamp
from tierstream.io.seam import HostBytes

MIB = 1 << 20


def test_a_scratch_file_is_on_the_drive_and_incompressible(tmp_path: Path) -> None:
    nbytes = 9 * MIB + 4096
    with ScratchFolder(tmp_path) as folder:
        path = folder.new_file("file", nbytes)
        assert allocation(path) == Allocation(nbytes, 0, 0, 0)
        content = Path(path).read_bytes()
        assert len(content) == nbytes
        assert len(zlib.compress(content, 1)) > 0.99 * nbytes
        blocks = {content[start : start + 4096] for start in range(0, nbytes, 4096)}
        assert len(blocks) == nbytes // 4096
    assert os.listdir(tmp_path) == []


def test_stamps_make_all_blocks_differ() -> None:
    buffer = np.zeros(16384, np.uint8)
    seen = set()
    for number in range(5):
        stamp(buffer, number)
        seen |= {buffer[start : start + 4096].tobytes() for start in range(0, 16384, 4096)}
    assert len(seen) == 20


def test_random_buffers_are_page_aligned_and_seeded() -> None:
    first, again, other = incompressible(8192, 1), incompressible(8192, 1), incompressible(8192, 2)
    assert first.ctypes.data % 4096 == 0
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_folder_goes_also_after_an_error(tmp_path: Path) -> None:
    def work() -> None:
        with ScratchFolder(tmp_path) as folder:
            folder.new_file("file", MIB)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        work()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    code = (
        "import sys, os, time\n"
        "from tierstream.io.scratch import ScratchFolder\n"
        "with ScratchFolder(sys.argv[1]) as folder:\n"
        "    folder.new_file('file', 1 << 20)\n"
        "    print(folder.path, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        left = process.stdout.readline().strip()
        with ScratchFolder(tmp_path) as mine:
            assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (left, mine.path)))
        process.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == [os.path.basename(left)]
    with ScratchFolder(tmp_path) as mine:
        assert os.listdir(tmp_path) == [os.path.basename(mine.path)]
    assert os.listdir(tmp_path) == []


def test_a_full_drive_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 16 * MIB) as drive:
        before = os.listdir(drive)
        with ScratchFolder(drive) as folder:
            with pytest.raises(StorageError, match="No space left on device") as caught:
                folder.new_file("file", 64 * MIB)
            assert f"{folder.path}/file" in str(caught.value)
        assert os.listdir(drive) == before


def test_a_failing_write_removes_the_folder(tmp_path: Path) -> None:
    faulty = FaultySyscalls(fail(5, on="pwritev", at=4))
    with (
        ScratchFolder(tmp_path) as folder,
        seam.injected(faulty),
        pytest.raises(StorageError, match="Input/output error"),
    ):
        folder.new_file("file", 32 * MIB)
    assert os.listdir(tmp_path) == []
    assert not faulty.open_descriptors


def test_sparse_and_preallocated_files_are_refused(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(MIB)
    with pytest.raises(StorageError, match=r"1020.00 KiB of its 1.00 MiB are holes \(a sparse"):
        check_written(sparse)
    reserved = tmp_path / "reserved"
    create_file(str(reserved), MIB)
    if allocation(reserved).unwritten_bytes == 0:
        pytest.skip("this file system does not tell unwritten space apart")
    with pytest.raises(StorageError, match="were reserved and never written"):
        check_written(reserved)
    fill(str(reserved), MIB)
    check_written(reserved)


class NoFiemap(seam.Syscalls):
    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        raise OSError(95, "Operation not supported")


def test_holes_are_seen_where_the_file_system_does_not_tell_its_extents(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"x" * 8192)
        file.truncate(MIB)
    with seam.injected(NoFiemap()):
        assert allocation(path) == Allocation(MIB, MIB - 8192, 0, 0)


def test_many_extents_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    with path.open("wb") as file:
        for index in range(600):
            file.seek(index * 8192)
            file.write(b"y" * 4096)
    found = allocation(path)
    assert found == Allocation(599 * 8192 + 4096, 599 * 4096, 0, 0)


class ShortWrites(seam.Syscalls):
    def pwritev(self, fd: int, buffer: HostBytes, offset: int) -> int:
        return super().pwritev(fd, buffer[:4096], offset)


def test_short_writes_still_fill_the_file(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as folder:
        with seam.injected(ShortWrites()):
            path = folder.new_file("file", MIB)
        with_all = Path(path).read_bytes()
        again = folder.new_file("again", MIB)
        assert Path(again).read_bytes() == with_all
