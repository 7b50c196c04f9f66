"""The files of `data.files`: found by name or pattern, fingerprinted by content, cut into jobs."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierstream.io.errors import DataError

#: Bytes read at once.
READ_BYTES = 1 << 20
#: Bytes of a job, about.
JOB_BYTES = 64 << 20

Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
#: By ending; all others are plain text.
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2", ".zip", ".tar"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with its SHA-256."""

    path: Path
    nbytes: int
    sha256: str

    @property
    def kind(self) -> Kind:
        return _KINDS.get(self.path.suffix.lower(), "text")


@dataclass(frozen=True, slots=True)
class Job:
    """A part of a file that can be tokenised by itself.

    Attributes:
        start, stop: text, json, csv, tsv: bytes, all of the file. jsonl: bytes; the job has the lines that
            begin there. parquet: row groups. arrow: record batches.
        line: lines (parquet, arrow: rows) of the file before the job.
    """

    path: str
    kind: Kind
    start: int
    stop: int
    line: int = 0


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files that `data.files` names, in its order; those of one pattern (`*`, `?`, `[..]`, `**`) sorted, none
    twice. A directory made by `save_to_disk` of datasets stands for its files.

    Raises:
        DataError: a name or pattern without any file, a directory of another kind, or a packed file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        # A name that exists is meant as it is, even with a [ in it.
        names = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(os.path.abspath(name)) for name in names if name == pattern or not os.path.isdir(name)]
        if not files:
            raise DataError(f"data.files: {pattern!r} matches no file (working directory {os.getcwd()})")
        for path in files:
            found |= dict.fromkeys(_saved_dataset(path) if path.is_dir() else [path])
    for path in found:
        if path.suffix.lower() in _PACKED:
            raise DataError(f"data.files: {path} is packed ({path.suffix}); unpack it first")
    return list(found)


def _saved_dataset(directory: Path) -> list[Path]:
    """The .arrow files of a directory made by `save_to_disk`."""
    try:
        if (directory / "dataset_dict.json").exists():
            splits = json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            if len(splits) != 1:
                raise DataError(
                    f"data.files: {directory} holds several splits ({', '.join(splits)}); name those to "
                    f"train on, for example {directory / splits[0]}"
                )
            directory /= splits[0]
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        return [directory / part["filename"] for part in state["_data_files"]]
    except FileNotFoundError as error:
        raise DataError(
            f"data.files: {directory} is a directory, and none that `save_to_disk` of datasets makes; name "
            f"its files, for example '{directory}/**/*.txt'"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data.files: {directory} is a damaged dataset directory ({error})") from error


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


def cut_jobs(file: SourceFile, job_bytes: int = JOB_BYTES) -> list[Job]:
    """Cut a file into jobs of about `job_bytes`, in its order; an empty file has one as well.

    Raises:
        DataError: a parquet or arrow file that is damaged; a file that cannot be read.
    """
    return list(each_job(file, job_bytes))


def each_job(file: SourceFile, job_bytes: int) -> Iterator[Job]:
    """`cut_jobs`, one by one: a file of lines is read only as far as it is cut."""
    path, kind = str(file.path), file.kind
    if kind == "jsonl" and file.nbytes > job_bytes:
        yield from _jobs_of_lines(path, file.nbytes, job_bytes)
    elif kind in ("parquet", "arrow"):
        from tierstream.engine.data.tables import cut  # pyarrow takes a moment

        yield from (Job(path, kind, *part) for part in cut(path, kind, job_bytes))
    else:
        yield Job(path, kind, 0, file.nbytes)


def _jobs_of_lines(path: str, nbytes: int, job_bytes: int) -> Iterator[Job]:
    """Equal byte ranges; lines are counted so that messages can name them."""
    line = 0
    try:
        with open(path, "rb") as handle:
            for start in range(0, nbytes, job_bytes):
                stop = min(start + job_bytes, nbytes)
                # The line that is cut by `start` belongs to the job before.
                yield Job(path, "jsonl", start, stop, line)
                left = stop - start
                while left > 0 and (data := handle.read(min(READ_BYTES, left))):
                    line += data.count(b"\n")
                    left -= len(data)
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
