"""Which tensors an exported checkpoint holds, under which names and from which parameters; no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers.core_model_loading import revert_weight_conversion

from tierstream.engine.model.carve import TORCH_DTYPES, tensors_by_part
from tierstream.engine.model.meta_model import is_kept_in_fp32
from tierstream.engine.weights.safetensors_dir import CheckpointDir, some
from tierstream.engine.weights.source import LoadPlan
from tierstream.engine.weights.tensor_entry import STORED_DTYPES
from tierstream.io.errors import InvariantError, ModelSourceError
from tierstream.tiered.layout import TensorSpec, Unit

ExportDtype = Literal["bfloat16", "float32"]
#: A tensor of a unit: a parameter, or a part of a stack.
Piece: TypeAlias = tuple[Unit, TensorSpec]


@dataclass(frozen=True, slots=True)
class Buffer:
    """It is this persistent buffer of the model."""

    name: str


@dataclass(frozen=True, slots=True)
class Carried:
    """It is this tensor of the model directory that the run began with."""

    checkpoint: CheckpointDir
    key: str


@dataclass(frozen=True, slots=True)
class Elements:
    """It has the elements of these pieces, one after another."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """It is what transformers calls `name` when it reverts these pieces, stacks being of the parts given."""

    pieces: tuple[Piece, ...]
    name: str


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor of the exported checkpoint: `key` is its name there, `origin` what it is made of."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Buffer | Carried | Elements | Computed

    @property
    def meta(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def plan_export(model: Any, units: Iterable[Unit], dtype: ExportDtype | None) -> list[ExportTensor]:
    """The tensors of a checkpoint of `model`, unit after unit, under the names that its family uses on disk.

    Tied parameters appear once, under the name of the unit's tensor.

    Args:
        dtype: type of the weights; None: that of each unit. What the family keeps in fp32 stays fp32.
    """
    groups: dict[str, list[Piece]] = {}  # units, and modules of experts
    for unit, spec in tensors_by_part(model, units):
        group = unit.name if spec.part is None else spec.name.rpartition(".")[0]
        groups.setdefault(group, []).append((unit, spec))
    metas = [_metas(model, pieces, dtype) for pieces in groups.values()]
    shapes = {name: tuple(meta.shape) for found in metas for name, meta in found.items()}
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if odd := dict(shapes.items() ^ parameters.items()):
        raise InvariantError(f"units and model differ in {some(sorted(odd))}")
    tensors: list[ExportTensor] = []
    for pieces, of_pieces in zip(groups.values(), metas, strict=True):
        tensors += _reverted(model, pieces, of_pieces)
    return tensors + _buffers(model, parameters, dtype)


def plan_carried(source: LoadPlan, dtype: torch.dtype) -> list[ExportTensor]:
    """What the family leaves aside of the model directory that the run began with (layers that predict
    further tokens): as it is stored there, but in `dtype` what is in FP8.

    Raises:
        ModelSourceError: a tensor has a type that torch has not.
    """
    tensors = []
    for key in source.unused:
        entry = source.checkpoint.tensors[key]
        kind = STORED_DTYPES.get(entry.dtype) if entry.scales is None else dtype
        if kind is None:
            raise ModelSourceError(
                f"{entry.file}: {key}, which {source.checkpoint.path} holds beside the model, has the type "
                f"{entry.dtype} and cannot be exported; remove it from the model directory"
            )
        tensors.append(ExportTensor(key, entry.shape, kind, Carried(source.checkpoint, key)))
    return tensors


def _metas(model: Any, pieces: Sequence[Piece], dtype: ExportDtype | None) -> dict[str, torch.Tensor]:
    """Whole parameters, without memory."""
    metas: dict[str, torch.Tensor] = {}
    parts: dict[str, int] = {}
    for unit, spec in pieces:
        parts[spec.name] = parts.get(spec.name, 0) + 1
        shape = spec.shape if spec.part is None else (parts[spec.name], *spec.shape)
        kind = export_dtype(model, unit, spec, dtype)
        metas[spec.name] = torch.empty(shape, dtype=kind, device="meta")
    return metas


def _reverted(model: Any, pieces: Sequence[Piece], metas: Mapping[str, torch.Tensor]) -> list[ExportTensor]:
    """A renaming gives back the very tensor; what comes back as another one was computed."""
    names = {id(value): name for name, value in metas.items()}
    made = revert_weight_conversion(model, dict(metas))
    renamed = {names[id(value)] for value in made.values() if id(value) in names}
    computed = tuple((unit, spec) for unit, spec in pieces if spec.name not in renamed)
    by_part: dict[int | None, tuple[Piece, ...]] = {}
    for piece in computed:
        part = piece[1].part
        by_part[part] = (*by_part.get(part, ()), piece)
    single = {}
    if computed and None not in by_part:
        ones = {name: meta[:1] for name, meta in metas.items() if name not in renamed}
        single = _single_names(made, revert_weight_conversion(model, ones), len(by_part))
    tensors = []
    for key, value in made.items():
        origin: Elements | Computed
        if id(value) in names:
            origin = Elements(tuple(piece for piece in pieces if piece[1].name == names[id(value)]))
        elif key in single:
            part, name = single[key]
            origin = Computed(by_part[part], name)
        else:
            origin = Computed(computed, key)
        tensors.append(ExportTensor(key, tuple(value.shape), value.dtype, origin))
    return tensors


def _single_names(
    made: Mapping[str, torch.Tensor], made_of_one: Mapping[str, torch.Tensor], count: int
) -> dict[str, tuple[int, str]]:
    """Of tensors that are each made of one part of stacks: the part, and the name if it were the only one.

    A part is known by its number in the name, where the only one has 0.
    """
    found: dict[str, tuple[int, str]] = {}
    for single, value in made_of_one.items():
        words = single.split(".")
        for place in (place for place, word in enumerate(words) if word == "0"):
            keys = [".".join([*words[:place], str(part), *words[place + 1 :]]) for part in range(count)]
            if all(key in made and made[key].shape == value.shape for key in keys):
                found |= {key: (part, single) for part, key in enumerate(keys)}
    return found


def _buffers(model: Any, parameters: Iterable[str], dtype: ExportDtype | None) -> list[ExportTensor]:
    """The persistent buffers; with a `dtype` floating ones in it, but for what the family keeps in fp32."""
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    buffers = {name: value for name, value in buffers.items() if name not in model.all_tied_weights_keys}
    if unfilled := [name for name, value in buffers.items() if value.is_meta]:
        raise InvariantError(f"buffers have no values yet: {some(unfilled)}")
    names = {id(value): name for name, value in buffers.items()}
    kinds = {name: value.dtype for name, value in buffers.items()}
    if dtype is not None:
        wanted = TORCH_DTYPES[dtype]
        kinds |= {
            name: torch.float32 if is_kept_in_fp32(model, name, wanted) else wanted
            for name, value in buffers.items()
            if value.is_floating_point()
        }
    return [
        ExportTensor(key, tuple(value.shape), kinds[names[id(value)]], Buffer(names[id(value)]))
        for key, value in revert_weight_conversion(model, dict(buffers)).items()
    ]


def export_dtype(model: Any, unit: Unit, spec: TensorSpec, dtype: ExportDtype | None) -> torch.dtype:
    """Type in which one parameter is exported."""
    if dtype is None or dtype == unit.dtype:
        return TORCH_DTYPES[unit.dtype]
    if is_kept_in_fp32(model, spec.name, TORCH_DTYPES[dtype]):
        return torch.float32
    return TORCH_DTYPES[dtype]
