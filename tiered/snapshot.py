"""Snapshots: the durable planes of a store and a state, in a directory that is complete or not there. How one
is written: `tierstream.tiered.snapshot_writer`.

A `.tmp` is what a crash left of one, and no snapshot. Pages go through leases of the store, a few at a time,
so restoring needs no memory beyond the DRAM budget.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self, TypeVar

from numpy.typing import NDArray

from tierstream.io import seam
from tierstream.io.backend import Backend
from tierstream.io.errors import CheckpointError, StorageError, storage_errors
from tierstream.io.posix import PosixBackend
from tierstream.io.transfer import Direction, transfer_all
from tierstream.tiered.arena import Arena
from tierstream.tiered.hierarchy import chunk_path, read_small
from tierstream.tiered.layout import Layout, Page, PlaneSpec, TensorSpec
from tierstream.tiered.lease import Intent
from tierstream.tiered.manifest import Manifest, decode
from tierstream.tiered.pagereader import SCRATCH_BYTES, Bytes, PageReader, PlaneReader
from tierstream.tiered.store import Store

#: Planes under way at once, each in one frame.
_WORKERS = 4

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Snapshot:
    """A complete snapshot on disk; `open` makes it.

    Attributes:
        path: absolute path.
        state: the state that was written with it.
        layout: page size and planes of the snapshot.
        planes: (unit, plane) -> plane.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.state: dict[str, Any] = manifest.state
        self.layout = manifest.layout
        self.planes: Mapping[tuple[str, str], PlaneSpec] = manifest.layout.planes
        self._manifest = manifest
        self._verified: set[Page] = set()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a snapshot after checking that every file is there with its size.

        Raises:
            CheckpointError: no such directory, incomplete, damaged, or of another version.
        """
        root = os.path.abspath(path)
        name = f"{root}/manifest.json"
        if not os.path.isdir(root):
            raise CheckpointError(f"checkpoint {root}: there is no such directory")
        data = read_small(name)
        if data is None:
            raise CheckpointError(
                f"checkpoint {root} is incomplete: {name} is missing, so its writing was interrupted; use "
                "another checkpoint and remove this one"
            )
        manifest = decode(data, name)
        for page, checksum in manifest.checksums.items():
            if checksum is not None:
                _check_size(root, page, manifest.layout.page_nbytes(page))
        return cls(Path(root), manifest)

    def read_range(self, unit: str, plane: str, start_element: int, out: NDArray[Any]) -> None:
        """Copy elements `[start_element, start_element + len(out))` of a plane.

        Every page is checked against its checksum the first time that some of it is read.

        Args:
            unit: name of the unit.
            plane: name of the plane.
            start_element: first element.
            out: flat array of the plane's dtype; bfloat16 also as uint16 bit patterns.

        Raises:
            CheckpointError: a page is damaged.
            StorageError: it cannot be read.
            InvariantError: unknown plane, wrong dtype, or out of range.
        """
        target = self.layout.range_bytes(unit, plane, start_element, out)
        scratch = _scratch()
        for page, inside, outside in self.layout.pieces(unit, plane, start_element, out.size):
            reader = PageReader(self._manifest, str(self.path), page, _read_buffered, scratch)
            if page in self._verified and self._manifest.checksums[page] is not None:
                _read_buffered(reader.path, target[outside], inside.start)
                continue
            reader.skip(inside.start)
            reader.read(target[outside])
            reader.finish()
            self._verified.add(page)

    def restore(self, store: Store, progress: Callable[[int], object] = lambda nbytes: None) -> None:
        """Set all durable planes of a store, whose pages may have another size, checking every page.

        Args:
            progress: called, in this thread, with the bytes of each plane that is done.

        Raises:
            CheckpointError: the planes are not those of the store, each difference by name; or a page is
                damaged, and then the store's planes are not to be used.
            StorageError: an I/O error.
        """
        self._check_planes(store.layout)
        with _backend() as backend:
            for nbytes in _in_parallel(partial(self._restore_plane, store, backend), self.planes.values()):
                progress(nbytes)

    def verify(self) -> None:
        """Read everything and check it.

        Raises:
            CheckpointError: a page is damaged.
            StorageError: a page cannot be read.
        """
        with _backend() as backend:
            for _ in _in_parallel(partial(self._verify_plane, backend), self.planes.values()):
                pass

    def _restore_plane(self, store: Store, backend: Backend, spec: PlaneSpec) -> int:
        """Returns its bytes."""
        reader = self._plane_reader(backend, spec)
        for page in store.layout.pages(spec.unit, spec.plane):
            start, end = store.layout.page_span(page)
            nbytes = (end - start) * spec.item_bytes
            if reader.is_zero(nbytes) and not store.has_content(page):
                reader.pass_zeros(nbytes)
                continue
            with store.acquire([(page, Intent.OVERWRITE)], scheduled=False) as lease:
                reader.read(lease.arrays[0][:nbytes])
        return spec.nbytes

    def _verify_plane(self, backend: Backend, spec: PlaneSpec) -> None:
        reader, buffer = self._plane_reader(backend, spec), _scratch()
        for start in range(0, spec.nbytes, len(buffer)):
            reader.read(buffer[: spec.nbytes - start])

    def _plane_reader(self, backend: Backend, spec: PlaneSpec) -> PlaneReader:
        def read_at(path: str, target: Bytes, offset: int) -> None:
            file = backend.open(path, writable=False)
            try:
                file.read_into(target, offset).result()
            finally:
                file.close()

        scratch = _scratch()
        return PlaneReader(self._manifest, str(self.path), spec.unit, spec.plane, read_at, scratch)

    def _check_planes(self, layout: Layout) -> None:
        """Refuse a layout whose durable planes are not those of the snapshot."""
        theirs = {key: spec for key, spec in layout.planes.items() if spec.durable}
        problems = [
            *(f"{'/'.join(key)} is only in the checkpoint" for key in self.planes.keys() - theirs.keys()),
            *(f"{'/'.join(key)} is not in the checkpoint" for key in theirs.keys() - self.planes.keys()),
            *(
                f"{'/'.join(key)}: {difference}"
                for key in self.planes.keys() & theirs.keys()
                if (difference := _difference(self.planes[key], theirs[key]))
            ),
        ]
        if problems:
            shown = "; ".join(sorted(problems)[:10])
            raise CheckpointError(
                f"checkpoint {self.path} does not fit the model of this run in {len(problems)} planes: "
                f"{shown}; use the model and the optimizer settings that it was written with"
            )


def _difference(ours: PlaneSpec, theirs: PlaneSpec) -> str:
    """What differs between a plane in the checkpoint and in the store; empty if nothing does."""
    if (ours.dtype, ours.numel) != (theirs.dtype, theirs.numel):
        return f"{ours.numel} x {ours.dtype} in the checkpoint, {theirs.numel} x {theirs.dtype} in this run"
    for mine, other in zip_longest(ours.tensors, theirs.tensors):
        if mine != other:
            return f"{_describe(mine)} in the checkpoint, {_describe(other)} in this run"
    return ""


def _describe(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "nothing"
    name = tensor.name if tensor.part is None else f"{tensor.name}[{tensor.part}]"
    return f"{name} {list(tensor.shape)} at {tensor.offset}, group {tensor.group}"


def _check_size(root: str, page: Page, nbytes: int) -> None:
    path = chunk_path(root, *page)
    try:
        actual = seam.current().stat(path).st_size
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {root} is incomplete: {path} is missing; use another checkpoint"
        ) from error
    except OSError as cause:
        raise StorageError("looking at", path, cause) from cause
    if actual != nbytes:
        raise CheckpointError(
            f"checkpoint {root} is damaged: {path} has {actual} bytes, its manifest says {nbytes}; use "
            "another checkpoint"
        )


def _scratch() -> Bytes:
    """A buffer in huge pages, as frames are: direct I/O into small ones takes nearly twice the time."""
    return Arena([SCRATCH_BYTES]).frames[0]


def _read_buffered(path: str, target: Bytes, offset: int) -> None:
    calls = seam.current()
    with storage_errors("opening", path):
        fd = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        transfer_all(Direction.READ, fd, path, target, offset)
    finally:
        calls.close(fd)


@contextmanager
def _backend() -> Iterator[Backend]:
    backend = PosixBackend()
    try:
        yield backend
    finally:
        backend.close()


def _in_parallel(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Results of `work` in order. After an error no further item is begun, and the first error is raised."""
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tierstream-snapshot")
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
