"""A model directory, checked as a whole before a byte of weights is read: safetensors files, or those of
`torch.save` where there are no others (`engine/weights/torch_archive.py`).

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length N, N bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end)}}`, then the data without gaps; offsets count from its first
    byte and need not be aligned to anything. Reading by offset into our own buffers, instead of mapping the
    file, keeps the memory bounded and makes alignment a matter of no concern.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.weights import fp8
from tierstream.engine.weights.tensor_entry import (
    E8M0_VALUES,
    FLOAT_DTYPES,
    ITEM_BITS,
    BlockScales,
    TensorEntry,
)
from tierstream.engine.weights.torch_archive import read_archive
from tierstream.io import seam
from tierstream.io.errors import ModelSourceError
from tierstream.io.transfer import Direction, transfer_all, transfer_some

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ARCHIVE_INDEX_FILE = "pytorch_model.bin.index.json"
ARCHIVE_FILE = "pytorch_model.bin"
#: Longest header that the format's reference implementation accepts.
HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True)
class CheckpointDir:
    """A checked model directory. `unnamed_files`: files of tensors that hold none of this model and are left
    alone."""

    path: Path
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    unnamed_files: tuple[str, ...] = ()

    def read(self, name: str, row: int | None = None) -> NDArray[np.uint8]:
        """The bytes of one tensor, or of its element `row` along the first dimension."""
        return _read(self.tensors[name], row)

    def raw_slices(self, name: str, max_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """The bytes of one tensor in order, at most `max_bytes` at a time, each valid until the next."""
        entry = self.tensors[name]
        buffer = np.empty(max(1, min(max_bytes, entry.nbytes)), np.uint8)
        with _opened(entry.file) as fd:
            for start in range(0, entry.nbytes, buffer.size):
                part = buffer[: entry.nbytes - start]
                transfer_all(Direction.READ, fd, str(entry.file), part, entry.offset + start)
                yield part

    def slices(self, name: str, max_elements: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield `(first element, values)` over one tensor of a float type, in order.

        `values` is fp32, exact for all types but F64, at most `max_elements` long (in FP8: or one row) and
        valid until the next slice: all slices share one buffer for the stored bytes and one for the values.
        """
        entry = self.tensors[name]
        if entry.scales is not None:
            yield from _dequantised(entry, entry.scales, max_elements)
            return
        stored = FLOAT_DTYPES[entry.dtype]
        per_slice = max(1, min(max_elements, entry.numel))
        raw, values = np.empty(per_slice, stored), np.empty(per_slice, np.float32)
        with _opened(entry.file) as fd:
            for start in range(0, entry.numel, per_slice):
                count = min(per_slice, entry.numel - start)
                offset = entry.offset + start * stored.itemsize
                transfer_all(Direction.READ, fd, str(entry.file), raw[:count].view(np.uint8), offset)
                _to_fp32(raw[:count], entry.dtype, values[:count])
                yield start, values[:count]


def _read(entry: TensorEntry, row: int | None = None) -> NDArray[np.uint8]:
    nbytes = entry.nbytes if row is None else entry.nbytes // entry.shape[0]
    out = np.empty(nbytes, np.uint8)
    with _opened(entry.file) as fd:
        transfer_all(Direction.READ, fd, str(entry.file), out, entry.offset + (row or 0) * nbytes)
    return out


def _to_fp32(raw: NDArray[Any], dtype: str, values: NDArray[np.float32]) -> None:
    if dtype == "BF16":
        np.left_shift(raw, 16, out=values.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(over="ignore"):  # an F64 beyond fp32 becomes inf, which loading refuses
            values[:] = raw


def _dequantised(
    entry: TensorEntry, scales: BlockScales, max_elements: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Slices of whole rows."""
    rows, columns = entry.shape[-2:]
    grid = _grid(scales.entry, entry.numel // (rows * columns) if entry.numel else 0)
    total = entry.numel // columns if columns else 0
    per_slice = max(1, min(max_elements // max(1, columns), total))
    raw = np.empty((per_slice, columns), np.uint8)
    values = np.empty((per_slice, columns), np.float32)
    with _opened(entry.file) as fd:
        for row in range(0, total, per_slice):
            count = min(per_slice, total - row)
            part = raw[:count]
            transfer_all(Direction.READ, fd, str(entry.file), part.reshape(-1), entry.offset + row * columns)
            fp8.dequantise(part, row, rows, grid, scales.block, values[:count])
            yield row * columns, values[:count].reshape(-1)


def _grid(entry: TensorEntry, matrices: int) -> NDArray[np.float32]:
    """Scales, fp32 [matrices, row blocks, column blocks]."""
    raw, values = _read(entry), np.empty(entry.numel, np.float32)
    if entry.dtype in FLOAT_DTYPES:
        _to_fp32(raw.view(FLOAT_DTYPES[entry.dtype]), entry.dtype, values)
    else:
        np.take(E8M0_VALUES, raw, out=values)
    if values.size == 1:
        return np.broadcast_to(values, (matrices, 1, 1))
    return values.reshape(matrices, *entry.shape[-2:])


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointDir:
    """Read and compare index, files and headers of a model directory, sharded or not. No weight is read.

    Raises:
        ModelSourceError: anything that does not fit, naming the file and the remedy.
    """
    root = Path(os.path.abspath(path))
    if not root.is_dir():
        raise ModelSourceError(
            f"model directory {root} {'is not a directory' if root.exists() else 'does not exist'}; "
            "give the path of a downloaded model (names on the hub are not looked up)"
        )
    try:
        present = sorted(name for name in os.listdir(root) if name.endswith(".safetensors"))
    except OSError as error:
        raise ModelSourceError(f"model directory {root} cannot be listed: {error.strerror}") from error
    index = _find_index(root)
    if index is not None:
        opened = _open_indexed(root, index, present, read_header)
    elif SINGLE_FILE in present or len(present) == 1:
        name = SINGLE_FILE if SINGLE_FILE in present else present[0]
        others = tuple(other for other in present if other != name)
        opened = CheckpointDir(root, {entry.name: entry for entry in read_header(root / name)}, others)
    elif present:
        raise ModelSourceError(
            f"{root} holds {len(present)} safetensors files ({some(present)}) but neither {INDEX_FILE} nor "
            f"{SINGLE_FILE}; download the index file of this model again"
        )
    else:
        opened = _open_archives(root)
    return replace(opened, tensors=fp8.pair_scales(root, opened.tensors))


def _open_archives(root: Path) -> CheckpointDir:
    """Files of `torch.save`, only under the names that transformers gives to weights: other .bin files in
    such a directory hold anything."""
    if os.path.lexists(root / ARCHIVE_INDEX_FILE):
        present = sorted(file.name for file in root.glob("pytorch_model*.bin"))
        return _open_indexed(root, root / ARCHIVE_INDEX_FILE, present, read_archive)
    if os.path.lexists(root / ARCHIVE_FILE):
        return CheckpointDir(root, {entry.name: entry for entry in read_archive(root / ARCHIVE_FILE)})
    raise ModelSourceError(
        f"{root} holds no safetensors file, and no {ARCHIVE_FILE} either; is it a model directory?"
    )


def read_header(file: Path) -> list[TensorEntry]:
    """Tensors of one safetensors file in file order, after checking that the file holds exactly the bytes it
    promises."""
    where = _describe(file)
    try:
        with _opened(file) as fd:
            size = seam.current().fstat(fd).st_size
            prefix = np.zeros(8, np.uint8)
            transfer_some(Direction.READ, fd, str(file), prefix, 0)
            if prefix.tobytes() == b"version ":
                raise ModelSourceError(
                    f"{where} is a pointer of Git LFS in place of the file; get the file with `git lfs pull`"
                )
            length = int.from_bytes(prefix.tobytes(), "little")
            if not 2 <= length <= min(size - 8, HEADER_BYTES_MAX):
                raise ModelSourceError(
                    f"{where} is not a safetensors file, or cut off: {size} bytes with a header of {length}; "
                    "download it again"
                )
            text = np.empty(length, np.uint8)
            transfer_all(Direction.READ, fd, str(file), text, 8)
    except OSError as error:
        raise ModelSourceError(f"{where} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.tobytes())
        header.pop("__metadata__", None)
        entries = [_entry(name, info, file, 8 + length) for name, info in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelSourceError(f"{where} has a damaged header ({error!r}); download it again") from error
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = 8 + length
    for entry in entries:
        if entry.offset != end:
            raise ModelSourceError(
                f"{where} has a damaged header: tensor {entry.name} starts at byte {entry.offset}, not "
                f"{end}; download it again"
            )
        end += entry.nbytes
    if end != size:
        state = "is cut off" if size < end else "is longer than its header says"
        raise ModelSourceError(
            f"{where} {state}: {size} bytes, its header describes {end}; download it again"
        )
    return entries


def _entry(name: str, info: Mapping[str, Any], file: Path, data_start: int) -> TensorEntry:
    """One header record; any surprise is a ValueError, TypeError or KeyError."""
    dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name} with shape {shape} at {begin}..{end}")
    bits = ITEM_BITS[dtype]
    if (end - begin) * 8 != prod(shape) * bits:
        raise ValueError(
            f"tensor {name}: {dtype}{shape} takes {prod(shape) * bits // 8} bytes, not {end - begin}"
        )
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, end - begin)


def _find_index(root: Path) -> Path | None:
    if os.path.lexists(root / INDEX_FILE):
        return root / INDEX_FILE
    found = sorted(root.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise ModelSourceError(
            f"{root} has several index files ({some([f.name for f in found])}) and none is {INDEX_FILE}; "
            "keep one of them"
        )
    return found[0] if found and not os.path.lexists(root / SINGLE_FILE) else None


def _open_indexed(
    root: Path, index: Path, present: list[str], read_entries: Callable[[Path], list[TensorEntry]]
) -> CheckpointDir:
    """Compare the index with the files and their headers, in both directions."""
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not os.path.lexists(root / name)]
    if absent:
        raise ModelSourceError(
            f"{len(absent)} of the {len(names)} shards that {index} names are missing: {some(absent)}; "
            "download them again"
        )
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        _collect(tensors, read_entries(root / name))
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].file != root / shard:
            place = f"it is in {tensors[tensor].file.name}" if tensor in tensors else "no shard holds it"
            raise ModelSourceError(
                f"{index} says that tensor {tensor} is in {shard}, but {place}: the index and the shards are "
                "of different versions; download both again"
            )
    unnamed = [name for name in present if name not in names]
    for name in unnamed:
        twice = [entry.name for entry in read_entries(root / name) if entry.name in tensors]
        if twice or _is_shard_name(name):
            what = f"and also holds {some(twice)}" if twice else "though its name is that of a shard"
            raise ModelSourceError(
                f"{root / name} is not named by {index.name}, {what}; remove it or the index"
            )
    return CheckpointDir(root, tensors, tuple(unnamed))


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shards = set(weight_map.values())
    except OSError as error:
        raise ModelSourceError(f"{_describe(index)} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelSourceError(
            f"{index} is no index of a sharded model ({error!r}); download it again"
        ) from error
    for name in shards:
        if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in Path(name).parts:
            raise ModelSourceError(
                f"{index} names the shard {name!r}; a shard must be a file inside the model directory"
            )
    if not weight_map:
        raise ModelSourceError(f"{index} names no tensor; download it again")
    return {str(tensor): shard for tensor, shard in weight_map.items()}


def _collect(tensors: dict[str, TensorEntry], entries: list[TensorEntry]) -> None:
    for entry in entries:
        if entry.name in tensors:
            raise ModelSourceError(
                f"tensor {entry.name} is stored twice, in {tensors[entry.name].file} and in {entry.file}; "
                "remove the shard of the other version"
            )
        tensors[entry.name] = entry


def _is_shard_name(name: str) -> bool:
    """Whether a file is called as one of a numbered set, e.g. `model-00002-of-00005.safetensors`."""
    head, _, tail = name.rpartition(".")[0].rpartition("-of-")
    return tail.isdigit() and head.rpartition("-")[2].isdigit()


def _describe(file: Path) -> str:
    """The path, with where it points if it is a link (the hub's cache is made of links)."""
    return f"{file} (link to {os.readlink(file)})" if file.is_symlink() else str(file)


def some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    fd = seam.current().open(str(file), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        seam.current().close(fd)
