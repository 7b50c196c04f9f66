"""Which tensors an exported checkpoint holds, under which names and from which parameters; no weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.core_model_loading import revert_weight_conversion

from tierstream.engine.meta_model import is_kept_in_fp32
from tierstream.engine.safetensors_dir import some
from tierstream.engine.units import TORCH_DTYPES
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import TensorSpec, Unit

ExportDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor of the exported checkpoint.

    Attributes:
        key: its name there.
        unit: the unit that it comes from; None: a persistent buffer of the model.
        members: the parameters (or the buffer) that it is made of.
        renamed: it has the elements of its one member, in their order; else transformers computes it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: Unit | None
    members: tuple[str, ...]
    renamed: bool

    @property
    def meta(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def plan_export(model: Any, units: Iterable[Unit], dtype: ExportDtype | None) -> list[ExportTensor]:
    """The tensors of a checkpoint of `model`, unit after unit, under the names that its family uses on disk.

    Tied parameters appear once, under the name of the unit's tensor.

    Args:
        dtype: type of the weights; None: that of each unit. What the family keeps in fp32 stays fp32.
    """
    tensors: list[ExportTensor] = []
    for unit in units:
        metas = {
            spec.name: torch.empty(spec.shape, dtype=export_dtype(model, unit, spec, dtype), device="meta")
            for spec in unit.tensors
        }
        tensors += _reverted(model, unit, metas)
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    buffers = {name: value for name, value in buffers.items() if name not in model.all_tied_weights_keys}
    tensors += _reverted(model, None, buffers)
    if unfilled := [name for name, value in buffers.items() if value.is_meta]:
        raise InvariantError(f"buffers have no values yet: {some(unfilled)}")
    exported = {member for tensor in tensors for member in tensor.members}
    if exported != parameters | buffers.keys():
        raise InvariantError(
            f"units and model differ in {some(sorted(exported ^ (parameters | buffers.keys())))}"
        )
    return tensors


def _reverted(model: Any, unit: Unit | None, values: dict[str, torch.Tensor]) -> list[ExportTensor]:
    """A renaming gives back the very tensor; what comes back as another one was computed."""
    names = {id(value): name for name, value in values.items()}
    made = revert_weight_conversion(model, dict(values))
    renamed = {names[id(value)] for value in made.values() if id(value) in names}
    computed = tuple(name for name in values if name not in renamed)
    tensors = []
    for key, value in made.items():
        member = names.get(id(value))
        members = computed if member is None else (member,)
        tensors.append(ExportTensor(key, tuple(value.shape), value.dtype, unit, members, member is not None))
    return tensors


def export_dtype(model: Any, unit: Unit, spec: TensorSpec, dtype: ExportDtype | None) -> torch.dtype:
    """Type in which one parameter is exported."""
    if dtype is None or dtype == unit.dtype:
        return TORCH_DTYPES[unit.dtype]
    if is_kept_in_fp32(model, spec.name, TORCH_DTYPES[dtype]):
        return torch.float32
    return TORCH_DTYPES[dtype]
