"""Checkpoint names and parameter names, through transformers' own mapping, without reading weights.

Most tensors are only renamed. Some families store other tensors than they compute with (one matrix per expert
on disk, all experts stacked in the model); transformers describes that by `WeightConverter`s, which are run
here on meta tensors to learn what they make, and later on real ones, one expert at a time where the layout
allows it. Weights in MXFP4 are dequantised (`engine/weights/mxfp4.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tierstream.engine.weights.mxfp4 import Mxfp4Stack, find_stacks
from tierstream.engine.weights.safetensors_dir import CheckpointDir
from tierstream.io.errors import ModelSourceError

#: Elements that are handed on in fp32 at once.
SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Conversion:
    """Parameters that transformers computes from several stored tensors.

    Attributes:
        targets: parameter name -> the shape that comes out.
        sources: pattern of the converter -> the stored tensors that it collects, in order.
        stacked: every target is a stack over the stored tensors (of experts), so that rows can be made one by
            one.
    """

    first_target: str
    targets: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, tuple[str, ...]]
    stacked: bool
    converter: Any = field(repr=False)
    model: Any = field(repr=False)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.sources.values() for key in keys)

    def stream(self, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, int, NDArray[np.float32]]]:
        """Yield `(parameter, first element, fp32 values)`; `read(key)` gives a stored tensor.

        Tensors in the type of the parameter are converted in it, as transformers does; others in fp32, so
        that nothing is rounded here.
        """
        rows = len(next(iter(self.sources.values())))
        wanted = self.model.state_dict()[self.first_target].dtype
        for row in range(rows if self.stacked else 1):
            chosen = slice(row, row + 1) if self.stacked else slice(None)
            tensors = {pattern: [read(key) for key in keys[chosen]] for pattern, keys in self.sources.items()}
            if any(tensor.dtype != wanted for group in tensors.values() for tensor in group):
                tensors = {
                    pattern: [tensor.float() for tensor in group] for pattern, group in tensors.items()
                }
            made = _convert(self.converter, self.model, self.first_target, tensors, self.sources)
            del tensors
            for name in list(made):
                first = row * prod(self.targets[name][1:]) if self.stacked else 0
                values = made.pop(name).contiguous().view(-1)
                for start in range(0, values.numel(), SLICE_ELEMENTS):
                    yield name, first + start, values[start : start + SLICE_ELEMENTS].float().numpy()


@dataclass(frozen=True)
class ResolvedNames:
    """`direct`: parameter or buffer -> stored tensor that it equals; `unexpected`: stored tensors that belong
    nowhere -> the name that they would have in the model."""

    direct: Mapping[str, str]
    conversions: tuple[Conversion | Mxfp4Stack, ...]
    unexpected: Mapping[str, str]


def resolve_names(model: Any, checkpoint: CheckpointDir) -> ResolvedNames:
    """Find the parameter of every stored tensor.

    Raises:
        ModelSourceError: two tensors claim one parameter, some names carry the base model's prefix and others
            lack it, transformers' conversion fails, or the shapes of weights in MXFP4 do not fit.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    meta, prefix = model.state_dict(), model.base_model_prefix
    quantised = find_stacks(checkpoint)
    packed = {entry.name for pair in quantised.values() for entry in pair}
    direct: dict[str, str] = {}
    stacks: list[Mxfp4Stack] = []
    collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected: dict[str, str] = {}
    bare: list[str] = []
    prefixed: list[str] = []
    for key in sorted((checkpoint.tensors.keys() | quantised.keys()) - packed, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, meta)
        if target not in meta and key in meta:  # as transformers: a renaming that should not have fired
            target, pattern = rename_source_key(key, [], [], prefix, meta)
        if target not in meta:
            stored = [entry.name for entry in quantised[key]] if key in quantised else [key]
            unexpected |= dict.fromkeys(stored, target)
            continue
        if target.startswith(f"{prefix}."):
            without_prefix, _ = rename_source_key(key, renamings, converters)
            (bare if without_prefix != target else prefixed).append(key)
        if key in quantised:
            stacks.append(Mxfp4Stack(target, *quantised[key]))
        elif pattern is not None:
            _, sources = collected.setdefault(target, (by_pattern[pattern], defaultdict(list)))
            sources[pattern].append(key)
        elif target in direct:
            raise ModelSourceError(
                f"{checkpoint.path}: {direct[target]} and {key} are both the parameter {target}"
            )
        else:
            direct[target] = key
    if bare and prefixed:
        _refuse_two_prefixes(checkpoint, prefix, bare, prefixed)
    conversions = tuple(
        _plan_conversion(model, checkpoint, target, converter, sources)
        for target, (converter, sources) in collected.items()
    )
    return ResolvedNames(direct, (*conversions, *stacks), unexpected)


def _refuse_two_prefixes(
    checkpoint: CheckpointDir, prefix: str, bare: list[str], prefixed: list[str]
) -> NoReturn:
    odd = min(bare, prefixed, key=len)
    raise ModelSourceError(
        f"{checkpoint.path}: {len(odd)} tensors, the first {odd[0]}, are named "
        f"{'without' if odd is bare else 'with'} the prefix '{prefix}.' and the others are not: shards "
        "of different versions; download them again"
    )


def _plan_conversion(
    model: Any, checkpoint: CheckpointDir, target: str, converter: Any, sources: Mapping[str, list[str]]
) -> Conversion:
    """Run the converter on meta tensors to learn names and shapes of what it makes."""
    metas = {
        pattern: [torch.empty(checkpoint.tensors[key].shape, device="meta") for key in keys]
        for pattern, keys in sources.items()
    }
    counts = {len(keys) for keys in sources.values()}
    rows = counts.pop() if len(counts) == 1 else 0
    first = converter.operations[0]
    try:
        made = _convert(converter, model, target, metas, sources)
        stacked = rows > 1 and isinstance(first, MergeModulelist) and first.dim == 0
        if stacked:
            one = _convert(converter, model, target, {p: t[:1] for p, t in metas.items()}, sources)
            stacked = one.keys() == made.keys() and all(
                one[name].shape == (1, *value.shape[1:]) and value.shape[0] == rows
                for name, value in made.items()
            )
    except (
        Exception
    ) as error:  # a converter is any code of transformers; on bad shapes it raises what it likes
        groups = " and ".join(
            f"{len(keys)} tensors like {keys[0]} {list(checkpoint.tensors[keys[0]].shape)}"
            for keys in sources.values()
        )
        raise ModelSourceError(
            f"{checkpoint.path}: transformers cannot make {target} of {groups}: {error}"
        ) from error
    shapes_made = {name: tuple(value.shape) for name, value in made.items()}
    frozen = {pattern: tuple(keys) for pattern, keys in sources.items()}
    return Conversion(target, shapes_made, frozen, stacked, converter, model)


def _convert(
    converter: Any,
    model: Any,
    target: str,
    tensors: Mapping[str, list[torch.Tensor]],
    sources: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """One run of a `WeightConverter` on its own copy (converters keep what they collect)."""
    run = deepcopy(converter)
    for pattern in sources:
        for key, tensor in zip(sources[pattern], tensors[pattern], strict=False):
            run.add_tensor(target, key, pattern, tensor)
    made = run.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
