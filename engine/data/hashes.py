"""Hashes of the files of `data.files`, remembered: to read hundreds of GB at every start takes minutes.

`<cache_dir>/hashes.json` holds the SHA-256 of a file under its path, with its size, time of change (ns) and
inode. All three the same: the file is not read again. Whoever changes a file in place and puts its time back
must remove hashes.json. A file that was changed in the last `SETTLED_SECONDS` is not remembered: clocks of
file systems are coarse, and a second change might leave the same time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.io import durable
from tierstream.io.errors import DataError, StorageError

HASHES_FILE = "hashes.json"
#: A file that changed later is not remembered.
SETTLED_SECONDS = 10.0
#: Bytes that are hashed between two reports, after which they are remembered.
BATCH_BYTES = 4 << 30


def fingerprint_remembered(
    paths: Sequence[Path], memory: Path, on_bytes: Callable[[int, int], object]
) -> list[SourceFile]:
    """`fingerprint_files`, of which only files that are new or changed are read.

    Args:
        memory: the file hashes.json.
        on_bytes: told (done, total) of the files that are read.

    Raises:
        DataError: a file cannot be read.
    """
    remembered = _load(memory)
    known = dict(remembered)
    seen = {path: look(path) for path in paths}
    unread = [path for path in seen if known.get(str(path), [])[:3] != seen[path]]
    total, done = sum(seen[path][0] for path in unread), 0
    for batch in _batches(unread, seen):
        on_bytes(done, total)
        settled = time.time_ns() - SETTLED_SECONDS * 1e9
        hashed = fingerprint_files(batch)
        for file in hashed:
            known[str(file.path)] = [*seen[file.path], file.sha256]
        done += sum(file.nbytes for file in hashed)
        kept = {path: entry for path, entry in known.items() if entry[1] < settled}
        if kept != remembered:
            with suppress(StorageError):  # it only saves time, and a shared cache may be read-only
                durable.write_file(memory, json.dumps(kept).encode())
            remembered = kept
    return [SourceFile(path, known[str(path)][0], known[str(path)][3]) for path in paths]


def look(path: Path) -> list[int]:
    """Size, time of change (ns) and inode: what is the same as long as a file is.

    Raises:
        DataError: it cannot be looked at.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _load(memory: Path) -> dict[str, list]:
    try:
        return dict(json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError):
        return {}  # it only saves time


def _batches(paths: Sequence[Path], seen: dict[Path, list[int]]) -> Iterator[list[Path]]:
    batch: list[Path] = []
    nbytes = 0
    for path in paths:
        batch.append(path)
        nbytes += seen[path][0]
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
