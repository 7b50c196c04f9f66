"""Files that a command leaves: places are checked before, streams are written to."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierstream.io.errors import ConfigError
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


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there before")
    outputs.write_output(str(path), b"text")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"text", [path])
