"""Text files as documents: found by name or pattern, fingerprinted by content, read as UTF-8 in pieces."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tierstream.io.errors import DataError

#: Bytes read at once.
READ_BYTES = 1 << 20
#: Endings of formats that are no plain text; as such they would be trained on as they look.
_OTHER_FORMATS = frozenset({".jsonl", ".parquet", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One document: a text file with its SHA-256."""

    path: Path
    nbytes: int
    sha256: str


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files that `data.files` names, in its order; those of one pattern (`*`, `?`, `[..]`, `**`) sorted, none
    twice.

    Raises:
        DataError: a name or pattern without any file, a directory, or a format other than plain text.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        # A name that exists is meant as it is, even with a [ in it.
        names = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(os.path.abspath(name)) for name in names if name == pattern or not os.path.isdir(name)]
        if not files:
            raise DataError(f"data.files: {pattern!r} matches no file (working directory {os.getcwd()})")
        found |= dict.fromkeys(files)
    for path in found:
        if path.is_dir():
            raise DataError(
                f"data.files: {path} is a directory; name its files, for example '{path}/**/*.txt'"
            )
        if path.suffix.lower() in _OTHER_FORMATS:
            raise DataError(
                f"data.files: {path} is no plain text ({path.suffix}); convert it to .txt files first"
            )
    return list(found)


def fingerprint_files(paths: Sequence[Path]) -> list[SourceFile]:
    """Hash the content of every file (time stamps say nothing after a copy).

    Raises:
        DataError: a file cannot be read.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return list(pool.map(_fingerprint, paths))


def _fingerprint(path: Path) -> SourceFile:
    try:
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            return SourceFile(path, handle.tell(), digest)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> Iterator[str]:
    """The text of a file in pieces of about `READ_BYTES`: strict UTF-8, line ends as they are, no byte order
    mark.

    Raises:
        DataError: bytes that are no UTF-8, with their offset; a file that cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, begun = 0, False
    try:
        with path.open("rb") as handle:
            while True:
                data = handle.read(READ_BYTES)
                pending = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at = offset - pending + error.start
                    raise DataError(
                        f"{path} is no UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {at} "
                        f"({error.reason}); convert the file, for example with iconv"
                    ) from error
                if text and not begun:
                    text, begun = text.removeprefix("\ufeff"), True
                offset += len(data)
                if text:
                    yield text
                if not data:
                    return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
