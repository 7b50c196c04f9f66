"""Hashes are remembered: which files are read again, and which are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstream.engine.data import hashes
from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.engine.data.hashes import fingerprint_remembered
from tierstream.io.errors import DataError


class Rig:
    """Files that were changed long ago, and which of them are read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.memory = folder / "hashes.json"
        self.read: list[str] = []
        self.told: list[tuple[int, int]] = []
        monkeypatch.setattr(hashes, "fingerprint_files", self._fingerprint)

    def _fingerprint(self, paths: list[Path]) -> list[SourceFile]:
        self.read += [path.name for path in paths]
        return fingerprint_files(paths)

    def write(self, name: str, text: str, age: float = 100.0) -> Path:
        path = self.folder / name
        path.write_text(text)
        changed = path.stat().st_mtime - age
        os.utime(path, (changed, changed))
        return path

    def hash(self, *paths: Path) -> list[SourceFile]:
        self.read, self.told = [], []
        found = fingerprint_remembered(paths, self.memory, lambda *counts: self.told.append(counts))
        assert found == fingerprint_files(paths)
        return found


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def test_files_are_read_once(rig: Rig) -> None:
    a, b = rig.write("a", "text a"), rig.write("b", "text b")
    rig.hash(a, b)
    assert rig.read == ["a", "b"]
    rig.hash(b, a)
    assert rig.read == []
    rig.hash(rig.write("c", "text c"), a)
    assert rig.read == ["c"]


def test_changed_files_are_read_again(rig: Rig) -> None:
    paths = [rig.write(name, f"text {name}") for name in "abc"]
    rig.hash(*paths)
    rig.write("a", "longer text")
    rig.write("b", "TEXT B", age=50)
    status = paths[2].stat()
    paths[2].rename(rig.folder / "old")  # so that the new file has another inode
    paths[2].write_text("TEXT C")
    os.utime(paths[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    rig.hash(*paths)
    assert rig.read == ["a", "b", "c"]


def test_a_file_that_has_just_changed_is_not_remembered(rig: Rig) -> None:
    path = rig.write("a", "text", age=0)
    rig.hash(path)
    rig.hash(path)
    assert rig.read == ["a"]


def test_damaged_memory_only_costs_time(rig: Rig) -> None:
    path = rig.write("a", "text")
    rig.hash(path)
    rig.memory.write_text("{")
    rig.hash(path)
    assert rig.read == ["a"]


def test_what_is_hashed_is_told_and_kept_batch_by_batch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "BATCH_BYTES", 8)
    paths = [rig.write(name, "12345") for name in "abc"]
    gone = rig.folder / "gone"
    rig.hash(*paths)
    assert rig.told == [(0, 15), (10, 15)]
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        rig.hash(*paths, gone)
