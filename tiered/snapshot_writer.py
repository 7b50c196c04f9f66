"""Writes a snapshot: the durable planes of a store, as they are at one instant, and a state. What is in one
and how it is read: `tierstream.tiered.snapshot`.

Writing goes to `<path>.tmp` beside the target, so that the last step is a rename on one drive:

1. groups and arrays (`zarr.json`), then every page as a chunk file, its CRC-32C taken from the bytes that are
   written; 2. `manifest.json`; 3. fsync of every file and directory; 4. rename to `<path>`; 5. fsync of the
   parent.

A crash before step 4 leaves a `.tmp` that nobody takes for a snapshot and that the next writer removes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierstream._native import crc32c
from tierstream.io.backend import Backend
from tierstream.io.drives import check_directory
from tierstream.io.durable import make_directories, publish_directory, remove_tree
from tierstream.io.errors import CheckpointError, TierstreamError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.capture import Capture, Piece
from tierstream.tiered.hierarchy import chunk_path, create_arrays, group_json, make_directory, write_small
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.manifest import Manifest, encode, plain_json
from tierstream.tiered.store import Store

#: Pages written at once, and threads that write them: enough for the rate of a drive, few enough that what a
#: step reads and writes there does not wait behind them.
_PAGES_AT_ONCE, _THREADS = 2, 4
#: Room asked for beside the pages: JSON files, folders.
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What was written.

    Attributes:
        path: absolute path.
        nbytes: bytes of all pages.
        page_count: pages that have a file; those never written have none.
    """

    path: Path
    nbytes: int
    page_count: int


def write_snapshot(store: Store, path: str | os.PathLike[str], state: Mapping[str, object]) -> SnapshotInfo:
    """`write_capture` of the store as it is now."""
    with store.capture() as capture:
        return write_capture(capture, path, state)


def write_capture(
    capture: Capture, path: str | os.PathLike[str], state: Mapping[str, object], *, replace: bool = False
) -> SnapshotInfo:
    """Write the captured planes and `state` to the directory `path`, durably. After an error `path` is what
    it was before.

    Args:
        capture: of a store, which may be used meanwhile. The caller closes it.
        path: its parent directories are made.
        state: JSON values.
        replace: a directory at `path` stands until the new one takes its place; else it is an error.

    Raises:
        CheckpointError: `path` exists.
        StorageError: too little space (both numbers, before anything is written), or an I/O error.
    """
    plain = plain_json(state)
    target = os.path.abspath(path)
    if os.path.lexists(target) and not replace:
        raise CheckpointError(f"checkpoint {target} exists: remove it or write to another directory")
    parent, temporary = os.path.dirname(target), f"{target}.tmp"
    make_directories(parent)
    remove_tree(temporary)
    durable = {key: spec for key, spec in capture.layout.planes.items() if spec.durable}
    layout = Layout(capture.layout.page_bytes, durable)
    nbytes = sum(map(layout.page_nbytes, capture.pages))
    try:
        make_directory(temporary)
        # There and not in the parent: a scratch file that it leaves when killed goes with the rest.
        check_directory(temporary, nbytes + _SLACK_BYTES)
        write_small(f"{temporary}/zarr.json", group_json({}))
        create_arrays(temporary, layout, durable.values())
        checksums: dict[Page, int | None] = {page: None for key in durable for page in layout.pages(*key)}
        checksums.update(_write_pages(capture, temporary))
        write_small(f"{temporary}/manifest.json", encode(Manifest(layout, checksums, plain)))
        publish_directory(temporary, target, replace=replace)
    except BaseException:
        with suppress(TierstreamError):
            remove_tree(temporary)
        raise
    return SnapshotInfo(Path(target), nbytes, len(capture.pages))


def _write_pages(capture: Capture, root: str) -> dict[Page, int]:
    """Write what is captured; page -> its checksum. After an error no further page is begun."""
    checksums: dict[Page, int] = {}
    backend = PosixBackend(threads=_THREADS)

    def work() -> None:
        try:
            while (piece := capture.take()) is not None:
                try:
                    checksums[piece.page] = _write_page(backend, root, piece)
                finally:
                    capture.give_back(piece)
        except BaseException:
            capture.close()
            raise

    try:
        with ThreadPoolExecutor(_PAGES_AT_ONCE, thread_name_prefix="tierstream-snapshot") as pool:
            workers = [pool.submit(work) for _ in range(_PAGES_AT_ONCE)]
        for worker in workers:
            worker.result()
    finally:
        backend.close()
    return checksums


def _write_page(backend: Backend, root: str, piece: Piece) -> int:
    path = chunk_path(root, *piece.page)
    backend.create(path, len(piece.array))
    file = backend.open(path, writable=True)
    try:
        written = file.write_from(piece.array, 0)
        checksum = crc32c(piece.array.data)
        written.result()
    finally:
        file.close()
    return checksum
