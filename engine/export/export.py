"""A trained model as a Hugging Face directory: sharded safetensors under the names of the original
checkpoint.

Weights go from the planes to the shards in slices: neither a shard nor a tensor is ever whole in memory, but
where transformers has to take a parameter apart (stacked experts into tensors of each): then one expert is.
The directory is complete or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.core_model_loading import revert_weight_conversion

from tierstream import _native
from tierstream.engine.export.files import write_descriptions
from tierstream.engine.export.model_card import RunFacts
from tierstream.engine.export.plan import (
    Buffer,
    Carried,
    Computed,
    Elements,
    ExportDtype,
    ExportTensor,
    Piece,
    export_dtype,
    plan_carried,
    plan_export,
)
from tierstream.engine.export.shards import plan_shards, write_shards
from tierstream.engine.weights.safetensors_dir import CheckpointDir
from tierstream.engine.weights.source import LoadPlan
from tierstream.io import drives, durable
from tierstream.io.errors import ConfigError, TierstreamError
from tierstream.tiered.layout import TensorSpec, Unit
from tierstream.tiered.snapshot import Snapshot

#: Host memory that an export may take for its buffers.
EXPORT_BUFFER_BYTES = 16 << 20

#: `read(unit name, first element, out)` fills `out`: uint16 asks for the bits of bf16 weights, float32 for
#: the fp32 masters (of a unit in fp32, or frozen, these are its weights).
ReadRange: TypeAlias = Callable[[str, int, NDArray[Any]], None]


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """What was written; `nbytes` of weights, `carried` of the tensors from the source."""

    path: Path
    shards: int
    tensors: int
    carried: int
    nbytes: int


def export_model(
    read: ReadRange,
    model: Any,
    units: Iterable[Unit],
    out_dir: Path,
    *,
    dtype: ExportDtype | None = None,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    source: LoadPlan | None = None,
    code_dir: Path | None = None,
    new_ids: bool = False,
    max_shard_bytes: int | None = None,
    facts: RunFacts | None = None,
    progress: Callable[[int, int], object] = lambda done_bytes, total_bytes: None,
    buffer_bytes: int = EXPORT_BUFFER_BYTES,
) -> ExportInfo:
    """Write `out_dir`, which `from_pretrained` loads without the network.

    Args:
        read: gives the values of the units; see `ReadRange`.
        model: the meta model; only its persistent buffers are read from it.
        dtype: type of the weights; None: as trained. What the family keeps in fp32 stays fp32.
        tokenizer_dir: its tokenizer and chat templates are copied.
        chat_template: takes the place of the tokenizer's own (of several the default); None: that stays.
        source: model directory whose weights the run began with. Its generation_config.json, code (that of
            `code_dir`, if given) and licence are copied, and tensors that the family leaves aside.
        new_ids: the configuration's special ids become the tokenizer's: a new model stops where that says.
        max_shard_bytes: see `plan_shards`.
        facts: for the model card; None: no card.
        progress: called with the bytes of tensors written so far, and of all.

    Raises:
        ConfigError: `out_dir` exists.
        StorageError: too little free space (before anything is written), or an I/O error.
        DataError: the tokenizer cannot be loaded.
        ModelSourceError: see `plan_carried`.
    """
    if out_dir.exists() or out_dir.is_symlink():
        raise ConfigError(f"export directory {out_dir} exists; name a new one, or remove it")
    carried = plan_carried(source, getattr(torch, dtype) if dtype else model.dtype) if source else []
    tensors = plan_export(model, units, dtype) + carried
    source_dir = source.checkpoint.path if source else None
    shards = plan_shards(tensors, source.checkpoint if source else None, max_shard_bytes)
    nbytes = sum(tensor.meta.nbytes for tensor in tensors)
    with _new_directory(out_dir, nbytes) as directory:
        write_shards(shards, _Values(read, model, dtype, buffer_bytes).slices, directory, progress)
        write_descriptions(
            model,
            dtype,
            directory,
            name=out_dir.name,
            tokenizer_dir=tokenizer_dir,
            chat_template=chat_template,
            source_dir=source_dir,
            code_dir=code_dir or source_dir,
            new_ids=new_ids,
            facts=facts,
        )
    return ExportInfo(out_dir, len(shards), len(tensors), len(carried), nbytes)


@contextmanager
def _new_directory(path: Path, nbytes: int) -> Iterator[Path]:
    """One beside `path`, with space for `nbytes`; it is called `path` in the end, or removed."""
    temporary = path.with_name(path.name + ".tmp")
    durable.make_directories(path.absolute().parent)
    durable.remove_tree(temporary)
    drives.check_directory(path.absolute().parent, nbytes)
    try:
        durable.make_directories(temporary)
        yield temporary
        durable.publish_directory(temporary, path)
    except BaseException:
        with suppress(TierstreamError):
            durable.remove_tree(temporary)
        raise


def snapshot_reader(snapshot: Snapshot) -> ReadRange:
    """Weights or masters of a checkpoint of a run."""

    def read(unit: str, start_element: int, out: NDArray[Any]) -> None:
        planes = snapshot.planes
        if planes[unit, "weight"].item_bytes == out.itemsize:
            snapshot.read_range(unit, "weight", start_element, out)
        elif (unit, "master") in planes:
            snapshot.read_range(unit, "master", start_element, out)
        else:
            weight, low = np.empty(out.size, np.uint16), np.zeros(out.size, np.uint16)
            snapshot.read_range(unit, "weight", start_element, weight)
            if (unit, "master_low") in planes:  # else it is frozen, and its weight is all of it
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
                yield _as_bytes(self._model.state_dict()[name].cpu().to(tensor.dtype))
            case Carried(checkpoint, key):
                yield from self._carried(checkpoint, key, tensor.dtype)
            case Elements(pieces):
                for unit, spec in pieces:
                    yield from self._of_piece(unit, spec)
            case Computed(pieces, name):
                if self._computed[0] != pieces:  # tensors of the same pieces follow one another
                    self._computed = ((), {})
                    self._computed = (pieces, self._compute(pieces))
                yield _as_bytes(self._computed[1][name])

    def _carried(self, checkpoint: CheckpointDir, key: str, dtype: torch.dtype) -> Iterator[NDArray[Any]]:
        if checkpoint.tensors[key].scales is None:
            yield from checkpoint.raw_slices(key, 8 * self._slice_elements)
            return
        for _, values in checkpoint.slices(key, self._slice_elements):
            yield torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()

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
