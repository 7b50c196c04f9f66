"""Which file of an export holds which tensors, and the files themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray

from tierstream.engine.export.new_file import NewFile
from tierstream.engine.export.plan import ExportTensor
from tierstream.engine.weights.safetensors_dir import INDEX_FILE, SINGLE_FILE, CheckpointDir
from tierstream.engine.weights.tensor_entry import STORED_NAMES
from tierstream.io.errors import InvariantError

SHARD_BYTES = 5_000_000_000

#: File name -> its tensors, in order.
Shards: TypeAlias = Mapping[str, Sequence[ExportTensor]]


def plan_shards(
    tensors: Sequence[ExportTensor], source: CheckpointDir | None, max_shard_bytes: int | None
) -> Shards:
    """The files of `source`, if its names are those of the export and its tensors about as large (a few may
    have become fp32); else in the order of `tensors`, as transformers cuts them.

    Args:
        max_shard_bytes: cut anew into files of this size; a larger tensor has one of its own. None: as in
            `source`, else `SHARD_BYTES`.
    """
    shards = _as_in(source, tensors) if source is not None and max_shard_bytes is None else None
    if shards is None:
        by_key = {tensor.key: tensor for tensor in tensors}
        split = split_torch_state_dict_into_shards(
            {tensor.key: tensor.meta for tensor in tensors},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_bytes or SHARD_BYTES,
        )
        shards = {name: [by_key[key] for key in keys] for name, keys in split.filename_to_tensors.items()}
    # Larger types first keeps every tensor aligned to its type.
    return {name: sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for name, shard in shards.items()}


def _as_in(source: CheckpointDir, tensors: Sequence[ExportTensor]) -> dict[str, list[ExportTensor]] | None:
    entries = [source.tensors.get(tensor.key) for tensor in tensors]
    places = [entry for entry in entries if entry is not None]
    if len(places) < len(tensors):
        return None
    if sum(tensor.meta.nbytes for tensor in tensors) > 1.1 * sum(entry.nbytes for entry in places):
        return None
    files = {entry.file for entry in places}
    if any(file.parent != source.path or file.suffix != ".safetensors" for file in files):
        return None
    shards: dict[str, list[ExportTensor]] = {}
    in_order = sorted(zip(places, tensors, strict=True), key=lambda pair: (pair[0].file, pair[0].offset))
    for entry, tensor in in_order:
        shards.setdefault(entry.file.name if len(files) > 1 else SINGLE_FILE, []).append(tensor)
    return shards


def write_shards(
    shards: Shards,
    values: Callable[[ExportTensor], Iterable[NDArray[Any]]],
    directory: Path,
    progress: Callable[[int, int], object],
) -> None:
    """Write the files, and their index if there are several.

    Args:
        values: elements of a tensor in order, part by part.
        progress: called with the bytes of tensors written so far, and of all.
    """
    total = sum(tensor.meta.nbytes for shard in shards.values() for tensor in shard)
    done = 0
    for name, shard in shards.items():
        for nbytes in _write_shard(shard, values, directory / name):
            done += nbytes
            progress(done, total)
    if len(shards) > 1:
        places = {tensor.key: name for name, shard in shards.items() for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        with NewFile(directory / INDEX_FILE) as out:
            out.append(np.frombuffer(json.dumps(index, indent=2).encode(), np.uint8))


def _write_shard(
    tensors: Sequence[ExportTensor], values: Callable[[ExportTensor], Iterable[NDArray[Any]]], file: Path
) -> Iterator[int]:
    """Yields the bytes of each part once it is written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.meta.nbytes
        stored = STORED_NAMES[tensor.dtype]
        header[tensor.key] = {"dtype": stored, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(file) as out:
        out.append(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        for tensor in tensors:
            for part in values(tensor):
                out.append(part)
                yield part.nbytes
        if out.nbytes != 8 + len(text) + end:
            raise InvariantError(f"{file}: {out.nbytes} bytes written, {8 + len(text) + end} announced")
