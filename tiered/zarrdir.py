"""The NVMe tier: pages as chunk files of a zarr hierarchy, read and written in place by a backend.

Chunk files of durable planes are made at the start, with their space reserved: a drive that is too small says
so before step 0, and files that exist are overwritten about twice as fast as new ones grow. Files of step-
local planes are made when a page is first spilled.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierstream.io import seam
from tierstream.io.backend import Backend, File
from tierstream.io.drives import DirectoryLock, Spread, check_directories
from tierstream.io.durable import make_directories, remove_tree
from tierstream.io.errors import ConfigError, StorageError, storage_errors
from tierstream.tiered.hierarchy import (
    chunk_path,
    create_arrays,
    group_json,
    make_directory,
    read_small,
    write_small,
)
from tierstream.tiered.layout import Layout, Page

#: Attribute of the root group by which a later run knows what it may remove.
_MARKER = "tierstream_store"


class ZarrDirectory:
    """Chunk files of a store in one or more directories, one per drive; held by one process at a time.

    `create` makes it. Thread-safe.

    Attributes:
        roots: absolute paths. The first holds the hierarchy that a zarr reader opens; chunk files on other
            drives are symbolic links there.
    """

    def __init__(self, roots: Sequence[Path], layout: Layout, backend: Backend, locks: ExitStack) -> None:
        self.roots = [os.path.abspath(root) for root in roots]
        self.layout = layout
        self._backend = backend
        self._locks = locks
        specs = sorted(layout.planes.values(), key=lambda spec: not spec.durable)
        pages = [page for spec in specs for page in layout.pages(spec.unit, spec.plane)]
        self._spread = Spread(self.roots, ((page, layout.page_nbytes(page)) for page in pages))
        self._files: dict[Page, File] = {}
        self._files_lock = threading.Lock()
        self._created: set[Page] = set()

    @classmethod
    def create(
        cls, roots: Sequence[Path], layout: Layout, backend: Backend, attributes: Mapping[str, Any]
    ) -> Self:
        """Make the hierarchy anew and reserve the space of all durable planes.

        What an earlier store left in the directories is removed first; other files in them are let alone.

        Args:
            roots: directories, made if missing; one per drive.
            layout: planes and page size.
            backend: moves the bytes; stays the caller's.
            attributes: JSON values for the root group (model, run).

        Raises:
            ConfigError: no directory, or one named twice.
            StorageError: in use by another process, not writable, too little space (with both numbers).
        """
        paths = [os.path.realpath(root) for root in roots]
        if not paths or len(set(paths)) != len(paths):
            raise ConfigError(
                f"NVMe directories {[str(root) for root in roots]}: name at least one, each of them once"
            )
        with ExitStack() as locks:
            for path in paths:
                make_directories(path)
                locks.enter_context(DirectoryLock(path))
            directory = cls([Path(path) for path in paths], layout, backend, locks)
            directory._remove_old()
            directory._create(attributes)
            directory._locks = locks.pop_all()
        return directory

    def read(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        """Fill the frame with the page; the future gives the bytes, or a StorageError."""
        return self._file(page).read_into(frame, 0)

    def write(self, page: Page, frame: NDArray[np.uint8]) -> Future[int]:
        """Write the frame to the page's chunk file, made now if the page is step-local; else as `read`."""
        spec = self.layout.spec(page.unit, page.plane)
        if not spec.durable and page not in self._created:
            self._create_chunk(page)
        return self._file(page).write_from(frame, 0)

    def path(self, page: Page) -> str:
        """The chunk file itself, not a link to it."""
        return chunk_path(self._spread.root_of(page), *page)

    def close(self) -> None:
        """Close the files and let go of the directories; a second call does nothing. The files stay."""
        with self._files_lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()
        self._locks.close()

    def _file(self, page: Page) -> File:
        with self._files_lock:
            file = self._files.get(page)
            if file is None:
                file = self._files[page] = self._backend.open(self.path(page), writable=True)
            return file

    def _remove_old(self) -> None:
        for root in self.roots:
            for unit in _units_of_old(f"{root}/zarr.json"):
                remove_tree(f"{root}/{unit}")

    def _create(self, attributes: Mapping[str, Any]) -> None:
        layout = self.layout
        durable = [spec for spec in layout.planes.values() if spec.durable]
        pages = [page for spec in durable for page in layout.pages(spec.unit, spec.plane)]
        needs = dict.fromkeys(self.roots, 0)
        for page in pages:
            needs[self._spread.root_of(page)] += layout.page_nbytes(page)
        check_directories(needs.items())
        units = sorted({spec.unit for spec in layout.planes.values()})
        for root in self.roots:
            # Before anything else, so that what is left of a start that fails is known too.
            write_small(f"{root}/zarr.json", group_json({**attributes, _MARKER: {"units": units}}))
        create_arrays(self.roots[0], layout, layout.planes.values())
        for root in self.roots[1:]:
            for unit in units:
                make_directory(f"{root}/{unit}")
            for spec in layout.planes.values():
                make_directory(f"{root}/{spec.unit}/{spec.plane}")
                make_directory(f"{root}/{spec.unit}/{spec.plane}/c")
        for page in pages:
            self._create_chunk(page)

    def _create_chunk(self, page: Page) -> None:
        path = self.path(page)
        self._backend.create(path, self.layout.page_nbytes(page))
        link = chunk_path(self.roots[0], *page)
        if link != path:
            with storage_errors("linking", link):
                seam.current().symlink(path, link)
        self._created.add(page)


def _units_of_old(group: str) -> list[str]:
    """Units of the store whose root group is the file `group`; none if there is no such file."""
    text = read_small(group)
    if text is None:
        return []
    try:
        units = json.loads(text)["attributes"][_MARKER]["units"]
    except (ValueError, KeyError, TypeError):
        raise StorageError(
            "using", group, detail="it belongs to something else: name an empty directory for the store"
        ) from None
    if not all(isinstance(unit, str) and unit not in ("", ".", "..") and "/" not in unit for unit in units):
        raise StorageError("using", group, detail="its list of units is damaged: remove the directory")
    return list(units)
