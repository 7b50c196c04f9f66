"""Files that a command leaves: places are checked before, streams are written to."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.faults import FaultySyscalls, fail

from tierstream.io import seam
from tierstream.io.drives import check_directory
from tierstream.io.errors import ConfigError, StorageError
from tierstream.tools import outputs


def test_a_pipe_is_written_to_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a directory like /dev/fd or /dev, where a user can make no files."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    outputs.check_file("--json", str(pipe))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        outputs.write_output(str(pipe), b"text")
        assert read.result(60) == b"text"
    assert pipe.is_fifo()
    with pytest.raises(ConfigError, match=f"--json: no permission to write in {tmp_path}"):
        outputs.check_file("--json", str(tmp_path / "file"))


def test_a_read_only_file_system_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*seen[:8], os.ST_RDONLY, *seen[9:]])
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    with pytest.raises(ConfigError, match=f"--out: {tmp_path} is on a read-only file system; choose another"):
        outputs.check_file("--out", str(tmp_path / "file"))


def test_a_file_that_cannot_be_written_is_named_as_given(tmp_path: Path) -> None:
    """And not the temporary one beside it."""
    path = tmp_path / "file"
    full = FaultySyscalls(fail(errno.ENOSPC, on=("open",), path=f"{tmp_path}/*"))
    said = f"^writing {path} failed: No space left .*; choose another place"
    with seam.injected(full), pytest.raises(StorageError, match=said):
        outputs.write_output(str(path), b"text")


def test_a_directory_that_cannot_be_written_is_named_as_given(tmp_path: Path) -> None:
    """And not the scratch file in it."""
    full = FaultySyscalls(fail(errno.ENOSPC, on=("open",), path=f"{tmp_path}/*"))
    said = f"^writing to directory {tmp_path} failed: No space left .*the drive is full"
    with seam.injected(full), pytest.raises(StorageError, match=said):
        check_directory(tmp_path)


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there before")
    outputs.write_output(str(path), b"text")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"text", [path])
