"""A decoder as units: what of it is streamed as one, and the planes of all that. No torch: a plan needs no
model, and `engine.model.carve` finds the units of one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

from tierstream.engine.update.groups import Groups, common_names
from tierstream.tiered.layout import Kinds, Layout, PlaneSpec, TensorSpec, Unit, kinds_of

EMBED, AROUND, HEAD = "embed", "around", "head"


def layer_name(index: int) -> str:
    return f"layers.{index}"


@dataclass(frozen=True)
class Anatomy:
    """How a decoder is put together; modules by their names.

    Attributes:
        tables: those beside the layers that look rows up, the input embedding first.
        norm: the one whose output is the decoder's; None: there is none.
        decoder_output: class of what the decoder returns.
        plain_logits: the logits are what the output matrix gives, and nothing is done to them.
        rows_dim: dimension of the layers' input in which the rows lie; None: rows cannot run apart.
        boundary_width: elements of the layers' input per token.
        tuple_of: length of the tuple that layers return, of which the first are the hidden states and nobody
            needs the rest; None: they return the hidden states alone.
        extras_width: elements per token of what else layers have gradients for, all of them together: inputs
            of their own, keys and values that they share.
    """

    tables: tuple[str, ...]
    norm: str | None
    decoder_output: type
    plain_logits: bool
    rows_dim: int | None
    boundary_width: int
    tuple_of: int | None
    extras_width: int


class LayerSums(NamedTuple):
    """Sums over the units of a layer: elements without padding, edges of all tensors, tensors, and matrices
    that are multiplied with, also in stacks.
    """

    parameters: int
    edges: int
    tensors: int
    matrices: int


@dataclass(frozen=True)
class ModelUnits:
    """A decoder as units.

    Attributes:
        tables: of further modules that look rows up.
        around: all else around the layers but the final norm, one for each type.
        layers: of each layer what all of its tokens need.
        beside: of each layer the tensors of another type (a router in fp32 among bf16), streamed with it.
        experts: of each layer its experts, in order; none in a dense layer, nor where they are part of it.
        passed_by: of each layer the parameters of experts that a token does not go to; 0 in a dense one.
        head: final norm and output matrix.
        beside_head: of the two what is frozen where the other is not.
        tied: the output matrix is the embedding; then the final norm lives in `embed` and `head is embed`.
    """

    embed: Unit
    tables: tuple[Unit, ...]
    around: tuple[Unit, ...]
    layers: tuple[Unit, ...]
    beside: tuple[tuple[Unit, ...], ...]
    experts: tuple[tuple[Unit, ...], ...]
    passed_by: tuple[int, ...]
    head: Unit
    beside_head: tuple[Unit, ...]
    tied: bool
    groups: Groups
    anatomy: Anatomy

    @cached_property
    def begin(self) -> tuple[Unit, ...]:
        """What comes before the layers."""
        return (self.embed, *self.tables, *self.around)

    @property
    def end(self) -> tuple[Unit, ...]:
        """What comes after the layers and not before them."""
        return self.beside_head if self.tied else (self.head, *self.beside_head)

    @cached_property
    def without_experts(self) -> tuple[Unit, ...]:
        """In forward order, those that every step computes with."""
        parts = zip(self.layers, self.beside, strict=True)
        return (*self.begin, *(unit for layer, beside in parts for unit in (layer, *beside)), *self.end)

    @cached_property
    def in_forward_order(self) -> tuple[Unit, ...]:
        layers = (unit for index in range(len(self.layers)) for unit in self.of_layer(index))
        return (*self.begin, *layers, *self.end)

    def of_layer(self, index: int) -> tuple[Unit, ...]:
        return (self.layers[index], *self.beside[index], *self.experts[index])

    @cached_property
    def backward_from(self) -> int:
        """The first layer that has a backward: what comes before it is frozen. All layers have if something
        around them is trained; none has if the head alone is."""
        if any(unit.trained for unit in self.begin):
            return 0
        layers = range(len(self.layers))
        trained = (index for index in layers if any(unit.trained for unit in self.of_layer(index)))
        return next(trained, len(layers))

    @cached_property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(unit.parameters for unit in self.in_forward_order)

    @cached_property
    def frozen(self) -> int:
        """Those of them that are not trained."""
        return sum(unit.parameters for unit in self.in_forward_order if not unit.trained)

    @cached_property
    def layers_summed(self) -> tuple[LayerSums, ...]:
        """Of each layer, with its experts; found once, for they are thousands and plans are many."""
        return tuple(map(_summed, map(self.of_layer, range(len(self.layers)))))

    @cached_property
    def flop_per_token(self) -> int:
        """8 per parameter (2 forward, 2 recompute, 4 backward, of these 2 for its own gradient if it is
        trained), 2 in layers without a backward; of experts for those that the token goes to. Embedding
        look-up is free, attention not counted.
        """
        without = {unit.name for index in range(self.backward_from) for unit in self.of_layer(index)}

        def per_parameter(unit: Unit) -> int:
            return 2 if unit.name in without else 8 if unit.trained else 6

        return self._flop_per_token(per_parameter)

    @cached_property
    def forward_flop_per_token(self) -> int:
        """Those of them that belong to forward."""
        return self._flop_per_token(lambda unit: 2)

    def _flop_per_token(self, per_parameter: Callable[[Unit], int]) -> int:
        lookups = {unit.name for unit in (self.tables if self.tied else (self.embed, *self.tables))}
        computed = (unit for unit in self.in_forward_order if unit.name not in lookups)
        total = sum(per_parameter(unit) * unit.parameters for unit in computed)
        for layer, experts, passed_by in zip(self.layers, self.experts, self.passed_by, strict=True):
            total -= per_parameter((experts or (layer,))[0]) * passed_by
        return total

    def state_planes(self, master: str, grad_dtype: str) -> tuple[Mapping[tuple[str, str], PlaneSpec], Kinds]:
        """(unit, plane) -> it, of all units, and the kinds of planes; made once as well. See `state_planes`
        for the arguments."""
        if (found := self._planes.get((master, grad_dtype))) is None:
            of_units = (state_planes(unit, master, grad_dtype) for unit in self.in_forward_order)
            planes = {(spec.unit, spec.plane): spec for spec in chain.from_iterable(of_units)}
            found = self._planes[master, grad_dtype] = planes, kinds_of(planes.values())
        return found

    @cached_property
    def _planes(self) -> dict[tuple[str, str], tuple[Mapping[tuple[str, str], PlaneSpec], Kinds]]:
        return {}

    def describe(self) -> Iterator[str]:
        """What is frozen, and how the rest is trained: a line for each."""
        units = (unit for unit in self.in_forward_order if not unit.trained)
        names = dict.fromkeys(tensor.name for unit in units for tensor in unit.tensors)
        if names:
            yield f"frozen: {len(names)} tensor{'s' * (len(names) != 1)}: {common_names(names)}"
        yield from self.groups.describe()

    def decayed(self) -> list[str]:
        """Parameters that weight decay moves."""
        return [name for name, group in self.groups.of.items() if self.groups.table[group].weight_decay]


def numbered(first: Unit, count: int) -> tuple[Unit, ...]:
    """The experts of a layer, by its first: they are alike but for their numbers."""
    stem, dtype, numel = first.name.rpartition(".")[0], first.dtype, first.numel
    fields = [(t.name, t.shape, t.offset, t.group) for t in first.tensors]
    return tuple(
        Unit(f"{stem}.{number}", dtype, tuple([TensorSpec(*own, number) for own in fields]), numel)
        for number in range(count)
    )


def _summed(units: Iterable[Unit]) -> LayerSums:
    parameters = edges = tensors = matrices = 0
    for unit in units:
        parameters += unit.parameters
        edges += sum([sum(tensor.shape) for tensor in unit.tensors])
        tensors += len(unit.tensors)
        matrices += sum([math.prod(tensor.shape[:-2]) for tensor in unit.tensors if len(tensor.shape) > 1])
    return LayerSums(parameters, edges, tensors, matrices)


def state_planes(unit: Unit, master: str, grad_dtype: str) -> list[PlaneSpec]:
    """The planes of one unit (docs/design.md section 3); `grad` is the only one that is not durable. A frozen
    one has its weights alone.

    Args:
        grad_dtype: of units in bfloat16. That of a unit in fp32 is fp32: with narrower elements than its
            weights, a page of it would belong to two granules.
    """
    name, numel, tensors = unit.name, unit.numel, unit.tensors
    kinds = _state_kinds(unit.dtype, unit.trained, master, grad_dtype)
    return [PlaneSpec(name, plane, dtype, numel, durable, tensors) for plane, dtype, durable in kinds]


@cache
def _state_kinds(dtype: str, trained: bool, master: str, grad_dtype: str) -> Sequence[tuple[str, str, bool]]:
    """(plane, dtype, durable) of a unit's planes."""
    weight = ("weight", dtype, True)
    if not trained:
        return [weight]
    moments = ("exp_avg", "float32", True), ("exp_avg_sq", "float32", True)
    if dtype != "bfloat16":
        return [weight, *moments, ("grad", "float32", False)]
    low = ("master_low", "uint16", True) if master == "split" else ("master", "float32", True)
    return [weight, low, *moments, ("grad", grad_dtype, False)]


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
    state, kinds = units.state_planes(master, grad_dtype)
    planes, counted = dict(state), Counter(kinds)
    for name in resident:
        if (spec := planes.pop((name, "grad"), None)) is not None:
            counted -= kinds_of([spec])
    if boundary_nbytes is not None:
        for index in range(units.backward_from, len(units.layers)):
            name = activation_unit(index)
            spec = PlaneSpec(name, "activation", "uint8", boundary_nbytes, False)
            planes[name, "activation"] = spec
            counted += kinds_of([spec])
    return Layout(page_bytes, planes, counted)
