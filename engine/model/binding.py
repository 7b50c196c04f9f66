"""Puts streamed tensors into a module whose parameters live on `meta`, and takes them out again.

`module._parameters[name] = tensor` costs 2 microseconds for a layer and needs no hook on submodules, so a
module that uses another module's weight directly is bound like any other (docs/design.md section 5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tierstream.engine.model.carve import TORCH_DTYPES
from tierstream.tiered.layout import Unit


class Binding:
    """Where the tensors of units sit in some modules (a layer; the final norm and the output matrix); what
    else is in these modules stays as it is.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], *units: Unit) -> None:
        self._units = units
        tensors = (tensor for unit in units for tensor in unit.tensors)
        index_of = {tensor.name: i for i, tensor in enumerate(tensors)}
        canonical = {id(parameter): name for name, parameter in model.named_parameters()}
        self._places = [
            (submodule, leaf, parameter, index_of[canonical[id(parameter)]])
            for module in modules
            for submodule in module.modules()
            for leaf, parameter in submodule._parameters.items()
            if parameter is not None and canonical[id(parameter)] in index_of
        ]

    @property
    def unit(self) -> Unit:
        """The only one."""
        (unit,) = self._units
        return unit

    def tensors(self, *flats: torch.Tensor) -> list[torch.Tensor]:
        """Views into the bytes of each unit (uint8, flat), one per tensor, unit after unit."""
        made = []
        for unit, flat in zip(self._units, flats, strict=True):
            dtype = TORCH_DTYPES[unit.dtype]
            values = flat[: unit.numel * dtype.itemsize].view(dtype)
            made += [values[t.offset : t.end].view(t.shape) for t in unit.tensors]
        return made

    @property
    def used(self) -> list[int]:
        """Indices into the tensors of those that these modules hold, each once."""
        return sorted({index for *_, index in self._places})

    @contextlib.contextmanager
    def bound(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        for submodule, leaf, _, index in self._places:
            submodule._parameters[leaf] = tensors[index]  # type: ignore[assignment]
        try:
            yield
        finally:
            for submodule, leaf, parameter, _ in self._places:
                submodule._parameters[leaf] = parameter
