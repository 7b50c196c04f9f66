"""Carves a transformers decoder into units.

Nothing here goes by the model's name: the embedding, the layers and the output matrix are found through
`engine/model/decoder.py` and transformers' own accessors (`get_input_embeddings`, `get_output_embeddings`),
and what lies outside is the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierstream.engine.model.anatomy import find_anatomy
from tierstream.engine.model.decoder import layers_of
from tierstream.engine.model.units import AROUND, EMBED, HEAD, ModelUnits, layer_name, numbered
from tierstream.engine.update.groups import common_names, find_groups
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError, ModelSourceError
from tierstream.tiered.layout import FROZEN, TensorSpec, Unit, pack_unit

if TYPE_CHECKING:
    from tierstream.engine.moe.config import MoeConfig

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def experts_of(layer: nn.Module) -> nn.Module | None:
    """The module that holds a layer's experts, each parameter of it a stack; None in a dense layer.

    It is known by the flags that transformers' `use_experts_implementation` gives to such a module. One that
    norms the experts' outputs itself is none: it does not go through the experts interface expert by expert.
    """
    found = [module for module in layer.modules() if _holds_experts(module)]
    return found[0] if len(found) == 1 else None


def _holds_experts(module: nn.Module) -> bool:
    return (
        hasattr(module, "_apply_gate")
        and hasattr(module, "is_transposed")
        and not getattr(module, "has_post_expert_norm", False)
    )


def tensors_by_part(model: nn.Module, units: Iterable[Unit]) -> Iterator[tuple[Unit, TensorSpec]]:
    """Every tensor of `units`, unit after unit; in place of a stack of experts, its parts."""
    stacks = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if _holds_experts(module)
        for key, _ in module.named_parameters(recurse=False)
    }
    for unit in units:
        for spec in unit.tensors:
            whole_stack = spec.part is None and spec.name in stacks
            yield from ((unit, part) for part in (spec.parts() if whole_stack else (spec,)))


def find_units(
    model: Any, *, experts_apart: bool = True, optimizer: OptimizerConfig | None = None
) -> ModelUnits:
    """Units of a causal language model built by transformers (on any device, `meta` included). Parameters
    that do not require gradients are frozen.

    Args:
        experts_apart: each expert is a unit; else those of a layer are part of it.
        optimizer: its groups decide where a tensor lies in its unit. None: the default one.

    Raises:
        ModelSourceError: the model has no decoder layers, or parameters that tierstream cannot stream yet, or
            some without elements.
        ConfigError: see `find_groups`; an expert is frozen in part.
    """
    layers, output, kind = layers_of(model), model.get_output_embeddings(), type(model).__name__
    known = model.get_input_embeddings() is not None and output is not None
    if not layers or not known:
        raise ModelSourceError(
            f"{kind} is not a decoder with layers, input embedding and output head; it cannot be streamed"
        )
    if empty := [name for name, parameter in model.named_parameters() if not parameter.numel()]:
        raise ModelSourceError(
            f"{kind}: {common_names(empty)} would have no elements; correct the sizes in the config.json"
        )
    anatomy = find_anatomy(model)
    packer = _Packer(model, experts_apart, optimizer or OptimizerConfig())
    embedding, *tables = (list(model.get_submodule(name).parameters()) for name in anatomy.tables)
    norm = [] if anatomy.norm is None else list(model.get_submodule(anatomy.norm).parameters())
    ids_of_ends = {id(p) for p in (*norm, *output.parameters())} - {id(p) for p in embedding}
    ids_elsewhere = {id(p) for p in chain(embedding, *tables, *(layer.parameters() for layer in layers))}
    ends = [p for p in model.parameters() if id(p) in ids_of_ends]
    around = [p for p in model.parameters() if id(p) not in ids_of_ends | ids_elsewhere]
    tied = any(p is e for p in output.parameters() for e in embedding)
    moving = embedding[0].requires_grad
    with_embedding = [p for p in ends if p.requires_grad == moving] if tied else []
    embed = packer.whole(EMBED, [*embedding, *with_embedding])
    own = packer.ends([p for p in ends if all(p is not other for other in with_embedding)])
    head, *beside_head = (embed, *own) if tied else own
    parts = [packer.layer(layer_name(index), layer) for index, layer in enumerate(layers)]
    return ModelUnits(
        embed=embed,
        tables=tuple(packer.whole(f"tables.{index}", own) for index, own in enumerate(tables)),
        around=packer.by_kind(AROUND, around),
        layers=tuple(main for main, _, _ in parts),
        beside=tuple(beside for _, beside, _ in parts),
        experts=tuple(experts for _, _, experts in parts),
        passed_by=tuple(packer.passed_by(layer) for layer in layers),
        head=head,
        beside_head=tuple(beside_head),
        tied=tied,
        groups=packer.groups,
        anatomy=anatomy,
    )


def units_of_run(model: Any, moe: MoeConfig, optimizer: OptimizerConfig) -> ModelUnits:
    """`find_units` as the settings of a run want it."""
    return find_units(model, experts_apart=moe.experts_apart, optimizer=optimizer)


class _Packer:
    """Makes units of a model's parameters."""

    def __init__(self, model: Any, experts_apart: bool, optimizer: OptimizerConfig) -> None:
        self._kind, self._apart = type(model).__name__, experts_apart
        self._active = getattr(model.config, "num_experts_per_tok", None)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        modules = (experts_of(layer) for layer in layers_of(model))
        stacks = [p for module in modules if module for p in module.parameters(recurse=False)]
        self._stacks = {id(p) for p in stacks}
        # A stack of vectors is a matrix by accident.
        vectors = {n for n, p in model.named_parameters() if p.dim() - (id(p) in self._stacks) < 2}
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self.groups = find_groups(trained, vectors, optimizer, self._kind)
        fewest, active = min((len(p) for p in stacks), default=None), self._active or 1
        if fewest is not None and fewest < active:
            raise ModelSourceError(
                f"{self._kind}: a layer has {fewest} experts and each token goes to {active} of them "
                "(num_experts_per_tok); correct the config.json"
            )

    def whole(self, unit_name: str, parameters: Sequence[nn.Parameter]) -> Unit:
        """One unit."""
        (unit,) = self._of_one_type(unit_name, parameters)
        return unit

    def ends(self, parameters: Sequence[nn.Parameter]) -> tuple[Unit, ...]:
        """What is trained, and what is not."""
        return self._of_one_type(HEAD, parameters)

    def _of_one_type(self, unit_name: str, parameters: Sequence[nn.Parameter]) -> tuple[Unit, ...]:
        units = self.by_kind(unit_name, parameters)
        if len({unit.dtype for unit in units}) > 1:
            raise ModelSourceError(
                f"{self._kind}: the parameters of {unit_name} have the types {units[0].dtype} and "
                f"{', '.join(unit.dtype for unit in units[1:])}; only layers may have more than one"
            )
        return units

    def layer(self, unit_name: str, layer: nn.Module) -> tuple[Unit, tuple[Unit, ...], tuple[Unit, ...]]:
        """The layer's own unit, those beside it, those of its experts."""
        parameters = list(layer.parameters())
        stacks = [p for p in parameters if self._apart and id(p) in self._stacks]
        dense = [p for p in parameters if not self._apart or id(p) not in self._stacks]
        main, *beside = self.by_kind(unit_name, dense)
        frozen, trained = (
            [self._names[id(p)] for p in stacks if p.requires_grad is on] for on in (False, True)
        )
        if frozen and trained:
            raise ConfigError(
                f"{frozen[0]} is frozen and {trained[0]} is trained (model.freeze, model.train_only), but an "
                "expert is streamed as one: freeze neither or both, or use moe.stream: layers"
            )
        experts = numbered(self._first_expert(unit_name, stacks), len(stacks[0])) if stacks else ()
        return main, tuple(beside), experts

    def passed_by(self, layer: nn.Module) -> int:
        """Parameters of the experts that a token does not go to; as if to all, if that is not known."""
        stacks = [p for p in layer.parameters() if id(p) in self._stacks]
        if not stacks or self._active is None:
            return 0
        return (len(stacks[0]) - self._active) * sum(p[0].numel() for p in stacks)

    def _first_expert(self, layer: str, stacks: Sequence[nn.Parameter]) -> Unit:
        unit_name = f"{layer}.experts.0"
        tensors = [(self._names[id(p)], tuple(p.shape[1:]), self._group(p)) for p in stacks]
        return pack_unit(unit_name, self._dtype(unit_name, stacks), tensors, part=0)

    def by_kind(self, unit_name: str, parameters: Iterable[nn.Parameter]) -> tuple[Unit, ...]:
        """One unit of what is trained and one of what is not, for each type, and none of nothing; first the
        one with the most elements, which gets the name. The others are named by what sets them apart.
        """
        by_kind: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in {id(p): p for p in parameters}.values():
            by_kind.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        kinds = sorted(by_kind, key=lambda kind: -sum(p.numel() for p in by_kind[kind]))

        def name(kind: tuple[bool, torch.dtype]) -> str:
            trained, dtype = (
                own if own != first else None for own, first in zip(kind, kinds[0], strict=True)
            )
            how = [] if trained is None else ["trained" if trained else "frozen"]
            return ".".join(
                [unit_name, *how, *([] if dtype is None else [self._dtype(unit_name, by_kind[kind])])]
            )

        return tuple(self._pack(name(kind), by_kind[kind]) for kind in kinds)

    def _pack(self, unit_name: str, parameters: Sequence[nn.Parameter]) -> Unit:
        tensors = [(self._names[id(p)], tuple(p.shape), self._group(p)) for p in parameters]
        return pack_unit(unit_name, self._dtype(unit_name, parameters), tensors)

    def _group(self, parameter: nn.Parameter) -> int:
        return self.groups.of.get(self._names[id(parameter)], FROZEN)

    def _dtype(self, unit_name: str, parameters: Sequence[nn.Parameter]) -> str:
        kinds = {p.dtype for p in parameters}
        if len(kinds) != 1 or not kinds <= set(DTYPE_NAMES):
            raise ModelSourceError(
                f"{self._kind}: parameters of {unit_name} have the types {', '.join(map(str, kinds))}; only "
                "bfloat16 and float32 are supported"
            )
        return DTYPE_NAMES[kinds.pop()]
