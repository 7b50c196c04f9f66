"""Finding, fingerprinting and reading text files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstream.engine.data import files
from tierstream.engine.data.files import find_files, fingerprint_files, read_text
from tierstream.io.errors import DataError


def make(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_text(text)


def names(paths: list[Path], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in paths]


def test_files_come_in_the_order_asked_for_each_once(tmp_path: Path) -> None:
    make(tmp_path, b="", a="", c__d="", c__e__f="")
    patterns = [str(tmp_path / "c/**/*.txt"), str(tmp_path / "b.txt"), str(tmp_path / "*")]
    assert names(find_files(patterns), tmp_path) == ["c/d.txt", "c/e/f.txt", "b.txt", "a.txt"]


def test_odd_names_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces, quotes, $ and colons; a [ that exists as a file is no pattern (C93)."""
    folder = tmp_path / "a b'c$HOME:é"
    folder.mkdir()
    (folder / "x[1].txt").write_text("one")
    (folder / "x1.txt").write_text("other")
    monkeypatch.chdir(folder)
    assert names(find_files(["x[1].txt"]), folder) == ["x[1].txt"]
    assert names(find_files(["x[12].txt"]), folder) == ["x1.txt"]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("none*.txt", "'none\\*.txt' matches no file"),
        ("folder", "folder is a directory, and none that .* name its files"),
        ("rows.jsonl.gz", r"rows\.jsonl\.gz is packed \(\.gz\)"),
        ("*.ZST", r"is packed \(\.ZST\)"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl.gz").write_text("")
    (tmp_path / "t.ZST").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        find_files([pattern])


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    make(tmp_path, a="same", b="same", c="other")
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    a, b, c = fingerprint_files(files)
    assert a.sha256 == b.sha256 != c.sha256
    assert (a.nbytes, c.nbytes) == (4, 5)
    os.utime(files[0], (1, 1))
    assert fingerprint_files(files)[0] == a


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 5, 1 << 20])
def test_characters_cut_by_a_read_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", read_bytes)
    text = "é你🙂 line\r\nnext\u2028\x85\x0b\ufeffend"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "".join(read_text(tmp_path / "a.txt")) == text


@pytest.mark.parametrize("read_bytes", [1, 4, 7, 1 << 20])
@pytest.mark.parametrize(
    ("data", "offset", "byte"),
    [
        (b"abc\xffdef", 3, "ff"),
        ("caf\xe9 au lait".encode("latin-1"), 3, "e9"),
        ("你好".encode()[:-1], 3, "e5"),
        (b"\xef\xbb\xbfab\x80", 5, "80"),
        (b"\xed\xa0\x80", 0, "ed"),
    ],
)
def test_undecodable_bytes_are_named_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, data: bytes, offset: int, byte: str
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", read_bytes)
    (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(DataError, match=rf"bad\.txt is no UTF-8 text: byte 0x{byte} at offset {offset} "):
        list(read_text(tmp_path / "bad.txt"))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"link\.txt cannot be read: No such file"):
        fingerprint_files(find_files([str(tmp_path / "link.txt")]))
