"""A zarr v3 hierarchy whose chunk files are raw pages: `<unit>/<plane>/zarr.json`, `<unit>/<plane>/c/<page>`.

Format: https://zarr-specs.readthedocs.io/en/latest/v3/core/ with the codec "bytes" alone, so a chunk file is
the page's little-endian bytes, padded to the full chunk at the end of the plane; a missing chunk file means
zeros. The few small JSON files are written here, because a library takes far longer for thousands of arrays
than the run's start may last; tests open them with zarr-python and with tensorstore.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tierstream.io import seam
from tierstream.io.errors import storage_errors
from tierstream.io.transfer import Direction, transfer_all
from tierstream.tiered.layout import Layout, PlaneSpec

Json = Mapping[str, Any]


def group_json(attributes: Json) -> bytes:
    """`zarr.json` of a group."""
    return _dump({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def array_json(spec: PlaneSpec, page_bytes: int) -> bytes:
    """`zarr.json` of a plane cut into pages of `page_bytes`, or into one that is as long as the plane."""
    chunk = min(page_bytes // spec.item_bytes, max(spec.numel, 1))
    codec: dict[str, Any] = {"name": "bytes"}
    if spec.item_bytes > 1:
        codec["configuration"] = {"endian": "little"}
    tensors = [
        {"name": tensor.name, "shape": list(tensor.shape), "offset": tensor.offset} for tensor in spec.tensors
    ]
    return _dump(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [spec.numel],
            "data_type": spec.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0.0 if spec.dtype in ("bfloat16", "float32") else 0,
            "codecs": [codec],
            "attributes": {"tensors": tensors},
        }
    )


def chunk_path(root: str, unit: str, plane: str, index: int) -> str:
    return f"{root}/{unit}/{plane}/c/{index}"


def create_arrays(root: str, layout: Layout, planes: Iterable[PlaneSpec]) -> None:
    """Make groups, arrays and empty chunk folders under an existing directory; no chunk file.

    Raises:
        StorageError: a unit is there already, or the drive refused.
    """
    units: set[str] = set()
    for spec in planes:
        unit = f"{root}/{spec.unit}"
        if spec.unit not in units:
            units.add(spec.unit)
            make_directory(unit)
            write_small(f"{unit}/zarr.json", group_json({}))
        make_directory(f"{unit}/{spec.plane}")
        make_directory(f"{unit}/{spec.plane}/c")
        write_small(f"{unit}/{spec.plane}/zarr.json", array_json(spec, layout.page_bytes))


def make_directory(path: str) -> None:
    with storage_errors("creating", path):
        seam.current().mkdir(path)


def write_small(path: str, data: bytes) -> None:
    """Write a file that another step makes durable, or that need not be."""
    calls = seam.current()
    with storage_errors("creating", path):
        fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        transfer_all(Direction.WRITE, fd, path, np.frombuffer(data, dtype=np.uint8), 0)
    finally:
        calls.close(fd)


def read_small(path: str) -> bytes | None:
    """All bytes of a file; None if there is no such file.

    Raises:
        StorageError: it cannot be read.
    """
    calls = seam.current()
    with storage_errors("reading", path):
        try:
            fd = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = np.empty(calls.fstat(fd).st_size, dtype=np.uint8)
            transfer_all(Direction.READ, fd, path, data, 0)
        finally:
            calls.close(fd)
    return data.tobytes()


def _dump(value: Json) -> bytes:
    return json.dumps(value, indent=1).encode()
