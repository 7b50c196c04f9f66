"""A trained model as a Hugging Face directory: sharded safetensors under the names of the original
checkpoint.

Weights go from the planes to the shards in slices: neither a shard nor a tensor is ever whole in memory, but
where transformers has to take a parameter apart (stacked experts into tensors of each): then one expert is.
The directory is complete or not there.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray
from transformers.core_model_loading import revert_weight_conversion

from tierstream import _native
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.export_plan import (
    Buffer,
    Computed,
    Elements,
    ExportDtype,
    ExportTensor,
    Piece,
    export_dtype,
    plan_export,
)
from tierstream.engine.new_file import NewFile
from tierstream.engine.tensor_entry import STORED_NAMES
from tierstream.io import drives, durable
from tierstream.io.errors import ConfigError, InvariantError, TierstreamError, storage_errors
from tierstream.tiered.layout import TensorSpec, Unit
from tierstream.tiered.snapshot import Snapshot

#: Host memory that an export may take for its buffers.
EXPORT_BUFFER_BYTES = 64 << 20
SHARD_BYTES = 5_000_000_000

#: `read(unit name, first element, out)` fills `out`: uint16 asks for the bits of bf16 weights, float32 for
#: the fp32 masters (of a unit in fp32 these are its weights).
ReadRange: TypeAlias = Callable[[str, int, NDArray[Any]], None]

#: What a tokenizer is made of, chat templates included.
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """What was written; `nbytes` of weights."""

    path: Path
    shards: int
    tensors: int
    nbytes: int


def export_model(
    read: ReadRange,
    model: Any,
    units: Iterable[Unit],
    out_dir: Path,
    *,
    dtype: ExportDtype | None = None,
    tokenizer_dir: Path | None = None,
    source_dir: Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    buffer_bytes: int = EXPORT_BUFFER_BYTES,
) -> ExportInfo:
    """Write `out_dir`, which `from_pretrained` loads without the network.

    Args:
        read: gives the values of the units; see `ReadRange`.
        model: the meta model; only its persistent buffers are read from it.
        dtype: type of the weights; None: as trained. What the family keeps in fp32 stays fp32.
        tokenizer_dir: its tokenizer and chat templates are copied.
        source_dir: model directory whose weights the run began with; its generation_config.json is copied.
            None: a new model, whose special ids become those of the tokenizer.
        max_shard_bytes: a larger tensor has a shard of its own.

    Raises:
        ConfigError: `out_dir` exists.
        StorageError: too little free space (before anything is written), or an I/O error.
        DataError: the tokenizer cannot be loaded.
    """
    if out_dir.exists() or out_dir.is_symlink():
        raise ConfigError(f"export directory {out_dir} exists; name a new one, or remove it")
    tensors = plan_export(model, units, dtype)
    nbytes = sum(tensor.meta.nbytes for tensor in tensors)
    temporary = out_dir.with_name(out_dir.name + ".tmp")
    durable.make_directories(out_dir.absolute().parent)
    durable.remove_tree(temporary)
    drives.check_directory(out_dir.absolute().parent, nbytes)
    try:
        durable.make_directories(temporary)
        shards = _write_weights(
            _Values(read, model, dtype, buffer_bytes), tensors, temporary, max_shard_bytes
        )
        _write_descriptions(model, dtype, temporary, tokenizer_dir, source_dir)
        durable.publish_directory(temporary, out_dir)
    except BaseException:
        with suppress(TierstreamError):
            durable.remove_tree(temporary)
        raise
    return ExportInfo(out_dir, shards, len(tensors), nbytes)


def snapshot_reader(snapshot: Snapshot) -> ReadRange:
    """Weights or masters of a checkpoint of a run."""

    def read(unit: str, start_element: int, out: NDArray[Any]) -> None:
        planes = {plane for name, plane in snapshot.planes if name == unit}
        if out.dtype == np.uint16 or not planes & {"master", "master_low"}:
            snapshot.read_range(unit, "weight", start_element, out)
        elif "master" in planes:
            snapshot.read_range(unit, "master", start_element, out)
        else:
            weight, low = np.empty(out.size, np.uint16), np.empty(out.size, np.uint16)
            snapshot.read_range(unit, "weight", start_element, weight)
            snapshot.read_range(unit, "master_low", start_element, low)
            _native.join_master(weight, low, out)

    return read


class _Values:
    """The bytes of exported tensors, slice by slice."""

    def __init__(self, read: ReadRange, model: Any, dtype: ExportDtype | None, buffer_bytes: int) -> None:
        self._read, self._model, self._dtype = read, model, dtype
        # An element takes at most 8 bytes here: fp32 joined from two 16-bit halves, or rounded to 16 bits.
        self._slice_elements = max(1, buffer_bytes // 8)
        self._computed: tuple[tuple[Piece, ...], dict[str, torch.Tensor]] = ((), {})

    def slices(self, tensor: ExportTensor) -> Iterator[NDArray[Any]]:
        """The elements in order, as bf16 bits, float32 or bytes."""
        match tensor.origin:
            case Buffer(name):
                yield _as_bytes(self._model.state_dict()[name].cpu())
            case Elements(pieces):
                for unit, spec in pieces:
                    yield from self._of_piece(unit, spec)
            case Computed(pieces, name):
                if self._computed[0] != pieces:  # tensors of the same pieces follow one another
                    self._computed = ((), {})
                    self._computed = (pieces, self._compute(pieces))
                yield _as_bytes(self._computed[1][name])

    def _of_piece(self, unit: Unit, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        rounded = export_dtype(self._model, unit, spec, self._dtype) == torch.bfloat16
        for start in range(spec.offset, spec.end, self._slice_elements):
            count = min(self._slice_elements, spec.end - start)
            out: NDArray[Any] = np.empty(count, np.uint16 if rounded else np.float32)
            if rounded and unit.dtype == "float32":
                master = np.empty(count, np.float32)
                self._read(unit.name, start, master)
                _native.round_bf16(master, out)
            else:
                self._read(unit.name, start, out)
            yield out

    def _compute(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """What transformers makes of parameters, or of stacks of some parts."""
        of_name: dict[str, list[Piece]] = {}
        for unit, spec in pieces:
            of_name.setdefault(spec.name, []).append((unit, spec))
        whole = {}
        for name, found in of_name.items():
            flat = torch.from_numpy(
                np.concatenate([part for unit, spec in found for part in self._of_piece(unit, spec)])
            )
            flat = flat.view(torch.bfloat16) if flat.dtype == torch.uint16 else flat
            spec = found[0][1]
            whole[name] = flat.reshape(spec.shape if spec.part is None else (len(found), *spec.shape))
        return dict(revert_weight_conversion(self._model, whole))


def _as_bytes(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_weights(
    values: _Values, tensors: Sequence[ExportTensor], directory: Path, max_shard_bytes: int
) -> int:
    """Write the shards, and their index if there are several; returns their number."""
    by_key = {tensor.key: tensor for tensor in tensors}
    split = split_torch_state_dict_into_shards(
        {tensor.key: tensor.meta for tensor in tensors},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for name, keys in split.filename_to_tensors.items():
        # Larger types first keeps every tensor aligned to its type; otherwise in the order of the units.
        shard = sorted((by_key[key] for key in keys), key=lambda tensor: -tensor.dtype.itemsize)
        _write_shard(values, shard, directory / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index)
    return len(split.filename_to_tensors)


def _write_shard(values: _Values, tensors: Sequence[ExportTensor], file: Path) -> None:
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
            for part in values.slices(tensor):
                out.append(part)
        if out.nbytes != 8 + len(text) + end:
            raise InvariantError(f"{file}: {out.nbytes} bytes written, {8 + len(text) + end} announced")


def _write_descriptions(
    model: Any,
    dtype: ExportDtype | None,
    directory: Path,
    tokenizer_dir: Path | None,
    source_dir: Path | None,
) -> None:
    """config.json, generation_config.json and the tokenizer."""
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.dtype = getattr(torch, dtype) if dtype is not None else model.dtype
    config.architectures = [type(model).__name__]
    if hasattr(config, "auto_map"):  # the exported model is transformers' own; no code comes with it
        del config.auto_map
    settings = source_dir / "generation_config.json" if source_dir is not None else None
    settings = settings if settings is not None and settings.is_file() else None
    if tokenizer_dir is not None:
        _copy_tokenizer(tokenizer_dir, directory)
        tokenizer = load_tokenizer(directory)
        if source_dir is None:  # a new model stops where this tokenizer ends a text
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                token_id = getattr(tokenizer, key)
                if token_id is None or token_id < config.vocab_size:
                    setattr(config, key, token_id)
                    setattr(generation, key, token_id)
    with storage_errors("writing", directory):
        config.save_pretrained(directory)
        if settings is not None:
            shutil.copyfile(settings, directory / settings.name)
        else:
            generation.save_pretrained(directory)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    files = {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        target = directory / file.relative_to(source)
        with storage_errors("copying", file, detail=f"to {target}"):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with NewFile(file) as out:
        out.append(np.frombuffer(json.dumps(content, indent=2).encode(), np.uint8))
