"""Directories: refused in one clear line, locked for one run."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.drive_kinds import small_ext4
from support.faults import FaultySyscalls, fail

from tierstream.io import seam
from tierstream.io.drives import DirectoryLock, check_directories, check_directory
from tierstream.io.errors import StorageError

MIB = 1 << 20


def refusal(path: str | Path, need_bytes: int = 0) -> str:
    with pytest.raises(StorageError) as caught:
        check_directory(path, need_bytes)
    text = str(caught.value)
    assert "\n" not in text
    assert os.path.abspath(path) in text
    return text


def test_a_good_directory(tmp_path: Path) -> None:
    info = check_directory(tmp_path, need_bytes=MIB)
    assert info.path == str(tmp_path)
    usage = os.statvfs(tmp_path)
    assert abs(info.free_bytes - usage.f_bavail * usage.f_frsize) < 1 << 30
    fstype = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "-T", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert info.filesystem == fstype
    assert info.transfer_path.name in ("posix-direct", "posix-buffered")
    assert list(tmp_path.iterdir()) == [], "the check leaves nothing behind"


def test_a_directory_in_memory_is_told() -> None:
    info = check_directory("/dev/shm")
    assert info.filesystem == "tmpfs"
    assert info.in_memory
    assert str(info.transfer_path) == "posix-buffered (tmpfs keeps files in memory)"


def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "missing", "missing", "../none/missing"):
        assert "No such file or directory (errno 2); create it or name another" in refusal(path)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory (errno 20); name a directory, not a file" in refusal(tmp_path / "file")
    assert "a part of this path is a file: name another" in refusal(tmp_path / "file" / "below")


def test_a_circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "its symbolic links lead in a circle" in refusal(tmp_path / "a")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_not_writable(tmp_path: Path, number: int) -> None:
    with seam.injected(FaultySyscalls(fail(number, on="open", path=f"{tmp_path}/*"))):
        text = refusal(tmp_path)
    remedy = "the file system is mounted read-only" if number == errno.EROFS else "files must be created"
    assert text.startswith(
        f"writing to directory {tmp_path} failed: {os.strerror(number)} (errno {number}); {remedy}"
    )
    assert "probe" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("mode", [0o700, 0o555])
def test_another_users_directory(mode: int) -> None:
    """The modes themselves, as a user whom they bind."""
    directory = Path(f"/tmp/tierstream-{os.getpid()}-{mode:o}")
    directory.mkdir(mode=mode)
    directory.chmod(mode)
    script = f"""
import os
from tierstream.io.drives import check_directory
from tierstream.io.errors import StorageError
os.setuid(65534)
try:
    check_directory({str(directory)!r})
except StorageError as error:
    print(error)
"""
    try:
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        directory.rmdir()
    assert f"{directory} failed: Permission denied (errno 13);" in run.stdout
    assert run.stdout.count("\n") == 1


def test_too_little_space_names_both_numbers(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    need = usage.f_bavail * usage.f_frsize + (1 << 40)
    text = refusal(tmp_path, need)
    assert f"({need} bytes) are needed there" in text
    assert re.search(r"\(\d+ bytes\) are free: free space or name a directory on another drive", text)


def test_a_small_drive(tmp_path: Path) -> None:
    """Need 80 MiB on a drive of 64: refused; reserved blocks are not counted as free."""
    with small_ext4(tmp_path, 64 * MIB) as directory:
        assert "80.00 MiB (83886080 bytes) are needed" in refusal(directory, 80 * MIB)
        usage = os.statvfs(directory)
        assert usage.f_bfree > usage.f_bavail, "ext4 keeps some for root"
        available = usage.f_bavail * usage.f_frsize
        assert check_directory(directory, available).free_bytes == available
        refusal(directory, available + 1)


def test_directories_on_one_drive_share_its_space(tmp_path: Path) -> None:
    with small_ext4(tmp_path, 64 * MIB) as drive:
        first, second = drive / "a", drive / "b"
        first.mkdir()
        second.mkdir()
        needs = [(tmp_path, MIB), (first, 30 * MIB), (second, 30 * MIB)]
        with pytest.raises(
            StorageError, match=r"drive/b failed: .* 60\.00 MiB \(62914560 bytes\) are needed"
        ):
            check_directories(needs)
        infos = check_directories([(first, 10 * MIB), (second, 10 * MIB), (tmp_path, MIB)])
        assert [info.filesystem for info in infos[:2]] == ["ext4", "ext4"]


def test_a_drive_that_returns_other_bytes(tmp_path: Path) -> None:
    class Liar(seam.Syscalls):
        def pwritev(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
            return (
                super().pwritev(fd, buffer ^ 1, offset)
                if buffer.nbytes < 4096
                else super().pwritev(fd, buffer, offset)
            )

        def preadv(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
            count = super().preadv(fd, buffer, offset)
            buffer[7] ^= 0xFF
            return count

    with seam.injected(Liar()):
        assert "other bytes were read than had been written" in refusal(tmp_path)


# The lock

HOLDER = """
import sys
from tierstream.io.drives import DirectoryLock
lock = DirectoryLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {holder.pid} is using this directory") as caught:
            DirectoryLock(tmp_path)
        assert caught.value.path.startswith(str(tmp_path))
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        # The kernel let go; nothing has to be cleaned up by hand.
        with (
            DirectoryLock(tmp_path) as lock,
            pytest.raises(StorageError, match=f"process {os.getpid()} is using"),
        ):
            DirectoryLock(tmp_path)
        lock.release()  # a second time is nothing
        with DirectoryLock(tmp_path):
            pass


def test_a_lock_that_fails_leaks_nothing(tmp_path: Path) -> None:
    syscalls = FaultySyscalls(fail(errno.ENOLCK, on="flock"))
    with seam.injected(syscalls), pytest.raises(StorageError, match=r"locking .* No locks available"):
        DirectoryLock(tmp_path)
    assert not syscalls.open_descriptors
