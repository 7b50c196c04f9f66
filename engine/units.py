"""Carves a transformers decoder into units, and says which parameter goes to AdamW's decayed group.

Nothing here goes by the model's name: the embedding, the layers and the output matrix are found through
transformers' own accessors (`get_decoder`, `get_input_embeddings`, `get_output_embeddings`), and what lies
outside is the head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Layout, PlaneSpec, Unit, pack_unit

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

EMBED, HEAD = "embed", "head"


def layer_name(index: int) -> str:
    return f"layers.{index}"


@dataclass(frozen=True)
class ModelUnits:
    """A decoder as units. `tied`: the output matrix is the embedding; then the final norm lives in `embed`
    and `head is embed`.
    """

    embed: Unit
    layers: tuple[Unit, ...]
    head: Unit
    tied: bool

    @property
    def in_forward_order(self) -> tuple[Unit, ...]:
        ends = () if self.tied else (self.head,)
        return (self.embed, *self.layers, *ends)

    @property
    def numel(self) -> int:
        """Trained parameters, without padding."""
        return sum(tensor.numel for unit in self.in_forward_order for tensor in unit.tensors)

    def decayed(self) -> list[str]:
        return [tensor.name for unit in self.in_forward_order for tensor in unit.tensors if tensor.decay]

    def not_decayed(self) -> list[str]:
        return [tensor.name for unit in self.in_forward_order for tensor in unit.tensors if not tensor.decay]


def find_units(model: Any) -> ModelUnits:
    """Units of a causal language model built by transformers (on any device, `meta` included).

    Raises:
        ModelSourceError: the model has no decoder layers, or parameters that tierstream cannot stream yet.
    """
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    kind = type(model).__name__
    if not isinstance(layers, nn.ModuleList) or not layers or embedding is None or output is None:
        raise ModelSourceError(
            f"{kind} is not a decoder with layers, input embedding and output head; it cannot be streamed"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def pack(unit_name: str, parameters: Iterable[nn.Parameter]) -> Unit:
        unique = list({id(p): p for p in parameters}.values())
        dtypes = {p.dtype for p in unique}
        if len(dtypes) != 1 or not dtypes <= set(DTYPE_NAMES):
            raise ModelSourceError(
                f"{kind}: the parameters of {unit_name} have the types {sorted(map(str, dtypes))}; "
                "one of bfloat16, float32 for the whole unit is supported"
            )
        tensors = [(names[id(p)], tuple(p.shape), p.dim() >= 2) for p in unique]
        return pack_unit(unit_name, DTYPE_NAMES[dtypes.pop()], tensors)

    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    of_embedding = list(embedding.parameters())
    outside = [
        p for p in model.parameters() if id(p) not in in_layers and all(p is not e for e in of_embedding)
    ]
    tied = any(p is e for p in output.parameters() for e in of_embedding)
    packed_layers = tuple(pack(layer_name(i), layer.parameters()) for i, layer in enumerate(layers))
    if tied:
        ends = pack(EMBED, [*of_embedding, *outside])
        return ModelUnits(ends, packed_layers, ends, tied=True)
    return ModelUnits(pack(EMBED, of_embedding), packed_layers, pack(HEAD, outside), tied=False)


def state_planes(unit: Unit, *, master: str, grad_dtype: str) -> list[PlaneSpec]:
    """The planes of one unit (docs/design.md section 3); `grad` is the only one that is not durable.

    Args:
        grad_dtype: of units in bfloat16. That of a unit in fp32 is fp32: with narrower elements than its
            weights, a page of it would belong to two granules.
    """
    kinds: list[tuple[str, str]] = [("weight", unit.dtype)]
    if unit.dtype == "bfloat16":
        kinds.append(("master_low", "uint16") if master == "split" else ("master", "float32"))
    kinds += [("exp_avg", "float32"), ("exp_avg_sq", "float32")]
    planes = [PlaneSpec(unit.name, plane, dtype, unit.numel, True, unit.tensors) for plane, dtype in kinds]
    waits_as = grad_dtype if unit.dtype == "bfloat16" else "float32"
    return [*planes, PlaneSpec(unit.name, "grad", waits_as, unit.numel, False, unit.tensors)]


def activation_unit(index: int) -> str:
    """Name under which the store keeps the input of layer `index` during a step."""
    return f"boundary.{index}"


def build_layout(
    units: ModelUnits,
    *,
    page_bytes: int,
    master: str,
    grad_dtype: str,
    boundary_nbytes: int | None,
    resident: Collection[str] = (),
) -> Layout:
    """Layout of a run.

    Args:
        boundary_nbytes: bytes of one layer-boundary activation of the step, None if they stay on the GPU.
        resident: units that stay on the GPU, whose gradients need no plane.
    """
    planes = {
        (spec.unit, spec.plane): spec
        for unit in units.in_forward_order
        for spec in state_planes(unit, master=master, grad_dtype=grad_dtype)
        if spec.durable or unit.name not in resident
    }
    if boundary_nbytes is not None:
        for index in range(len(units.layers)):
            name = activation_unit(index)
            planes[name, "activation"] = PlaneSpec(name, "activation", "uint8", boundary_nbytes, False)
    return Layout(page_bytes, planes)
