"""Which units of a store have their first values on the drives for good: filling that was cut off goes on
after them.

`filled.json` in the first directory of a store says so. It is written, whole or not at all, when files, names
and bytes of these units are synced, and removed, durably, before anything of them changes. It counts if it is
undamaged, is about the same values in the same places, and no other store was made in any of the directories
since: each has the mark that the creation of a store leaves there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from tierstream.io import seam
from tierstream.io.durable import sync_directory, sync_tree, write_file
from tierstream.io.errors import storage_errors
from tierstream.tiered.hierarchy import read_small
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.manifest import json_checksum
from tierstream.tiered.readback import Checksums

#: What the values of a store are and where they lie: name of a part -> its fingerprint.
Identity = Mapping[str, str]
_NAME = "filled.json"
_VERSION = 1


def identity_of(values: Identity, layout: Layout, roots: Sequence[str]) -> Identity:
    """`values`, with what a store adds to it."""
    durable = (spec for spec in layout.planes.values() if spec.durable)
    planes = json.dumps([spec._asdict() | {"tensors": [*map(asdict, spec.tensors)]} for spec in durable])
    return {
        **values,
        "planes": hashlib.sha256(planes.encode()).hexdigest(),
        "page size": str(layout.page_bytes),
        "directories": json.dumps(list(roots)),
    }


class Filled:
    """The record of a store. Only pages that have content count as pages of a unit here.

    Args:
        roots: directories of the store. identity: see `identity_of`. mark: of the store's creation.

    Attributes:
        pages: of units that are recorded -> their checksums, where known.
        other: parts of the identity in which a record was found to differ, so that it does not count.
    """

    def __init__(self, roots: Sequence[str], identity: Identity, mark: str) -> None:
        self._roots, self._identity, self._mark = roots, identity, mark
        self.pages: dict[Page, Checksums | None] = {}
        self.other: list[str] = []

    @property
    def units(self) -> set[str]:
        return {page.unit for page in self.pages}

    def read(self, marks: Iterable[str | None]) -> str:
        """Take over what is recorded; says why not, if there is a record that does not count.

        Args:
            marks: that are in the directories now.
        """
        path = f"{self._roots[0]}/{_NAME}"
        data = read_small(path)
        if data is None:
            return ""
        try:
            outer = json.loads(data)
            body = outer["filled"]
            intact = outer["crc32c"] == json_checksum(body) and body["version"] == _VERSION
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            return f"{path} is damaged"
        theirs: Identity = body["identity"]
        parts = sorted(self._identity.keys() | theirs.keys())
        self.other = [part for part in parts if theirs.get(part) != self._identity.get(part)]
        if self.other:
            return f"{path} is of other {' and '.join(self.other)}"
        if set(marks) != {body["mark"]}:
            return f"{path} is older than what is in the directories"
        self._mark = body["mark"]
        self.pages = {
            Page(unit, plane, index): None if sums is None else np.array(sums, np.uint32)
            for unit, plane, index, sums in body["pages"]
        }
        return ""

    @property
    def mark(self) -> str:
        return self._mark

    def add(self, pages: Mapping[Page, Checksums | None]) -> None:
        """Record whole units, whose bytes the drives have been given. Raises StorageError."""
        for unit in sorted({page.unit for page in pages}):
            for root in self._roots:
                sync_tree(f"{root}/{unit}")
        for root in self._roots:
            sync_directory(root)
        self.pages.update(pages)
        body = {
            "version": _VERSION,
            "identity": dict(self._identity),
            "mark": self._mark,
            "pages": [[*page, None if s is None else s.tolist()] for page, s in self.pages.items()],
        }
        outer = {"crc32c": json_checksum(body), "filled": body}
        write_file(f"{self._roots[0]}/{_NAME}", json.dumps(outer).encode())

    def forget(self) -> None:
        """Nothing is recorded any more, in any of the directories. Raises StorageError."""
        self.pages = {}
        for root in self._roots:
            path = f"{root}/{_NAME}"
            if not os.path.lexists(path):
                continue
            with storage_errors("removing", path), suppress(FileNotFoundError):
                seam.current().unlink(path)
            sync_directory(root)
