"""The NVMe tier: pages as chunk files of a zarr hierarchy, read and written in place by a backend.

Chunk files of durable planes are made at the start, with their space reserved: a drive that is too small says
so before step 0, and files that exist are overwritten about twice as fast as new ones grow. Files of step-
local planes are made when a page is first spilled.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierstream.io import seam
from tierstream.io.backend import File
from tierstream.io.drives import DirectoryLock, Drive, check_directories
from tierstream.io.durable import make_directories, remove_tree, write_file
from tierstream.io.errors import ConfigError, CorruptionError, StorageError, storage_errors
from tierstream.io.spread import Root, Spread
from tierstream.tiered.filled import Filled, Identity, identity_of
from tierstream.tiered.hierarchy import chunk_path, create_arrays, group_json, make_directory, read_small
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.readback import Checksums, ReadBack, ReadBackMode, compare, followed_by
from tierstream.tiered.stats import DriveTraffic

#: Attribute of the root group by which a later run knows what it may remove.
_MARKER = "tierstream_store"
#: Places in the list of counts behind `DriveTraffic`.
_READ, _WRITTEN, _CHECKED = range(3)


class ZarrDirectory:
    """Chunk files of a store on one or more drives; held by one process at a time.

    `create` makes it. Thread-safe.

    Attributes:
        roots: absolute paths, one per drive. The first holds the hierarchy that a zarr reader opens; chunk
            files on other drives are symbolic links there.
        filled: units that have their first values for good, those of an earlier process among them.
        doubt: why units that an earlier process recorded were not kept; empty if none were.
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        layout: Layout,
        spread: Spread[Page],
        readback: ReadBack,
        filled: Filled,
        doubt: str,
    ) -> None:
        self.roots = [drive.directory for drive in drives]
        self.layout = layout
        self._drives = drives
        self._spread = spread
        self._readback = readback
        self._readback.recall(filled.pages)
        self.filled, self.doubt = filled, doubt
        self._files: dict[Page, File] = {}
        self._traffic = [[0, 0, 0] for _ in drives]
        self._lock = threading.Lock()
        self._created: set[Page] = set()
        self._locks = ExitStack()

    @classmethod
    def create(
        cls,
        drives: Sequence[Drive],
        layout: Layout,
        attributes: Mapping[str, Any],
        *,
        readback: ReadBackMode = "sampled",
        values: Identity | None = None,
    ) -> Self:
        """Make the hierarchy anew and reserve the space of all durable planes.

        What an earlier store left in the directories is removed first, but for units that it has recorded as
        filled with the same values (`Filled`); other files in them are let alone.
        Pages are spread over the drives by their weights and their free space (`Spread`); pages of step-local
        planes take no space until they are spilled.

        Args:
            drives: directories, made if missing, with the backends that move their bytes; backends stay the
                caller's.
            layout: planes and page size.
            attributes: JSON values for the root group (model, run).
            readback: which pages are compared, when they are read, with checksums of what was written; see
                `ReadBack`.
            values: what the first values of all units follow from; None: units of an earlier store are of no
                use.

        Raises:
            ConfigError: no directory, or one named twice.
            StorageError: in use by another process, not writable, too little space (with all numbers).
        """
        real = [replace(drive, directory=os.path.realpath(drive.directory)) for drive in drives]
        paths = [drive.directory for drive in real]
        if not paths or len(set(paths)) != len(paths):
            raise ConfigError(
                f"NVMe directories {[drive.directory for drive in drives]}: name at least one, each of them "
                "once"
            )
        with ExitStack() as locks:
            for path in paths:
                make_directories(path)
                locks.enter_context(DirectoryLock(path))
            filled = Filled(paths, identity_of(values or {}, layout, paths), secrets.token_hex(8))
            old = {path: _read_marker(f"{path}/zarr.json") for path in paths}
            doubt = "" if values is None else filled.read(mark for _, mark in old.values())
            durable, step_local = (_pages(layout, durable=durable) for durable in (True, False))
            kept = [page for page in durable if page.unit in filled.units]
            found = _find(paths, layout, kept)
            if len(found) < len(kept):
                doubt, found = f"{len(kept) - len(found)} files of units that were filled are not there", {}
            if not found:
                filled.forget()
            for path, (units, _) in old.items():
                for unit in units:
                    if unit not in filled.units:
                        remove_tree(f"{path}/{unit}")
            spread = _spread(real, layout, durable, step_local, found)
            directory = cls(real, layout, spread, ReadBack(readback, durable + step_local), filled, doubt)
            directory._create(attributes, [page for page in durable if page not in found])
            directory._locks = locks.pop_all()
        return directory

    def read(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        """Fill the frame with the page; the future gives the bytes.

        Raises (from the future):
            StorageError: the read failed. CorruptionError: other bytes came back than were written.
        """
        future = self._file(page, _READ).read_into(frame, 0)
        written = self._readback.known(page)
        return future if written is None else followed_by(future, partial(self._check, page, frame, written))

    def write(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        """Write the frame to the page's chunk file, made now if the page is step-local; the future gives the
        bytes, or a StorageError.
        """
        spec = self.layout.spec(page.unit, page.plane)
        if self.filled.pages and (page.unit in self.filled.units or not spec.durable):
            self.filled.forget()  # a step has begun
        if not spec.durable and page not in self._created:
            self._create_chunk(page)
        checked = self._readback.choose(page)
        future = self._file(page, _WRITTEN).write_from(frame, 0)
        return followed_by(future, partial(self._readback.remember, page, frame)) if checked else future

    def record(self, pages: Iterable[Page]) -> None:
        """These pages, which are written, are all that have content of their units: a later process that
        fills a store with the same values goes on after them, until one of them is written again.

        Raises:
            StorageError: they cannot be made durable.
        """
        self.filled.add({page: self._readback.known(page) for page in pages})

    def path(self, page: Page) -> str:
        """The chunk file itself, not a link to it."""
        return chunk_path(self._drive_of(page).directory, *page)

    def traffic(self) -> dict[str, DriveTraffic]:
        """Bytes moved so far, by root."""
        with self._lock:
            return {
                root: DriveTraffic(*counts) for root, counts in zip(self.roots, self._traffic, strict=True)
            }

    def close(self) -> None:
        """Close the files and let go of the directories; a second call does nothing. The files stay."""
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()
        self._locks.close()

    def _drive_of(self, page: Page) -> Drive:
        return self._drives[self._spread.index_of(page)]

    def _file(self, page: Page, kind: int) -> File:
        """The page's chunk file, of which all bytes are going to be moved."""
        with self._lock:
            file = self._files.get(page)
            if file is None:
                file = self._drive_of(page).backend.open(self.path(page), writable=True)
                self._files[page] = file
            self._traffic[self._spread.index_of(page)][kind] += self.layout.page_nbytes(page)
            return file

    def _check(self, page: Page, frame: NDArray[np.uint8], written: Checksums) -> None:
        try:
            compare(page, frame, written, path=self.path(page), directory=self._drive_of(page).directory)
        except CorruptionError:
            self.filled.forget()
            raise
        with self._lock:
            self._traffic[self._spread.index_of(page)][_CHECKED] += len(frame)

    def _create(self, attributes: Mapping[str, Any], durable: Sequence[Page]) -> None:
        layout, kept = self.layout, self.filled.units
        units = sorted({spec.unit for spec in layout.planes.values()})
        marker = {"units": units, "mark": self.filled.mark}
        for root in self.roots:
            # Before anything else, so that what is left of a start that fails is known too.
            write_file(f"{root}/zarr.json", group_json({**attributes, _MARKER: marker}))
        new = [spec for spec in layout.planes.values() if spec.unit not in kept]
        create_arrays(self.roots[0], layout, new)
        for root in self.roots[1:]:
            for unit in sorted({spec.unit for spec in new}):
                make_directory(f"{root}/{unit}")
            for spec in new:
                make_directory(f"{root}/{spec.unit}/{spec.plane}")
                make_directory(f"{root}/{spec.unit}/{spec.plane}/c")
        for page in durable:
            self._create_chunk(page)

    def _create_chunk(self, page: Page) -> None:
        path = self.path(page)
        self._drive_of(page).backend.create(path, self.layout.page_nbytes(page))
        link = chunk_path(self.roots[0], *page)
        if link != path:
            with storage_errors("linking", link):
                seam.current().symlink(path, link)
        self._created.add(page)


def _pages(layout: Layout, *, durable: bool) -> list[Page]:
    specs = [spec for spec in layout.planes.values() if spec.durable == durable]
    return [page for spec in specs for page in layout.pages(spec.unit, spec.plane)]


def _find(roots: Sequence[str], layout: Layout, pages: Iterable[Page]) -> dict[Page, int]:
    """Of pages whose chunk file is there with its size: the root that it is in."""
    found = {}
    for page in pages:
        # The first root may have a link to the file of another.
        for index in reversed(range(len(roots))):
            path = chunk_path(roots[index], *page)
            with storage_errors("looking at", path), suppress(FileNotFoundError):
                if seam.current().stat(path).st_size == layout.page_nbytes(page):
                    found[page] = index
                break
    return found


def _spread(
    drives: Sequence[Drive],
    layout: Layout,
    durable: Iterable[Page],
    step_local: Iterable[Page],
    found: Mapping[Page, int],
) -> Spread[Page]:
    """Pages on drives, with space for all durable ones; those that are found on one stay there."""
    held = [0] * len(drives)
    for page, index in found.items():
        held[index] += layout.page_nbytes(page)
    # What must be on a certain drive is known only where there is one.
    need_bytes = layout.nbytes(durable=True) - held[0] if len(drives) == 1 else 0
    infos = check_directories((drive.directory, need_bytes) for drive in drives)
    held_of_volume: Counter[int] = Counter()
    for info, nbytes in zip(infos, held, strict=True):
        held_of_volume[info.device] += nbytes
    roots = [
        Root(
            directory=drive.directory,
            weight=drive.weight,
            capacity_bytes=info.free_bytes + held_of_volume[info.device],
            volume=info.device,
        )
        for drive, info in zip(drives, infos, strict=True)
    ]
    return Spread(
        roots,
        [(page, layout.page_nbytes(page)) for page in durable],
        [(page, layout.page_nbytes(page)) for page in step_local],
        placed=found,
    )


def _read_marker(group: str) -> tuple[list[str], str | None]:
    """Units and mark of the store whose root group is the file `group`; none if there is no such file."""
    text = read_small(group)
    if text is None:
        return [], None
    try:
        marker = json.loads(text)["attributes"][_MARKER]
        units = marker["units"]
    except (ValueError, KeyError, TypeError):
        raise StorageError(
            "using", group, detail="it belongs to something else: name an empty directory for the store"
        ) from None
    if not all(isinstance(unit, str) and unit not in ("", ".", "..") and "/" not in unit for unit in units):
        raise StorageError("using", group, detail="its list of units is damaged: remove the directory")
    return list(units), marker.get("mark")
