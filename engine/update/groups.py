"""AdamW's parameter groups: which learning rate and weight decay each parameter gets, by its name.

Decay is for matrices: `optimizer.weight_decay`, or the value of the first pattern in `weight_decay_by_name`
that fits the name. Vectors (norms, biases) never decay. The first pattern in `lr_scale_by_name` that fits
scales the learning rate of either. The first, so that an exception is written before its rule.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, groupby, zip_longest

from tierstream.engine.update.optimizer import Group, OptimizerConfig, by_name
from tierstream.io.errors import ConfigError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
#: In place of a pattern's index: no pattern fits.
_MATRIX, _VECTOR, _UNSCALED = -2, -1, -1


@dataclass(frozen=True)
class Groups:
    """The groups of a model.

    Attributes:
        table: those that have parameters; first the matrices and the vectors that no pattern fits.
        of: parameter -> index into `table`.
    """

    table: tuple[Group, ...]
    of: Mapping[str, int]

    def describe(self) -> Iterator[str]:
        """A line for each group."""
        for index, group in enumerate(self.table):
            names = [name for name, own in self.of.items() if own == index]
            rates = f"lr x {group.lr_scale:g}, weight decay {group.weight_decay:g}"
            yield f"optimizer: {len(names)} tensor{'s' * (len(names) != 1)}, {rates}: {common_names(names)}"


def common_names(names: Iterable[str]) -> str:
    """Names of tensors, those that layers have in common once: `model.layers.{0-3,5}.mlp.weight`."""
    numbers: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        texts, own = tuple(_NUMBER.split(name)), map(int, _NUMBER.findall(name))
        numbers.setdefault(texts, []).append(list(own))
    return ", ".join(
        "".join(chain.from_iterable(zip_longest(texts, map(_ranges, zip(*own, strict=True)), fillvalue="")))
        for texts, own in numbers.items()
    )


def _ranges(numbers: Iterable[int]) -> str:
    ordered = enumerate(sorted(set(numbers)))
    runs = [[number for _, number in run] for _, run in groupby(ordered, lambda item: item[1] - item[0])]
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if text.isdecimal() else f"{{{text}}}"


def find_groups(
    names: Sequence[str], vectors: Collection[str], config: OptimizerConfig, model: str
) -> Groups:
    """Groups of the parameters of a model.

    Args:
        names: of all parameters that are trained. vectors: of those that never decay.
        model: what errors call it.

    Raises:
        ConfigError: a pattern has no effect: it fits no name, or none that no pattern before it fits, or its
            decay is for vectors alone.
    """
    scales = by_name("lr_scale_by_name", config.lr_scale_by_name)
    decays = by_name("weight_decay_by_name", config.weight_decay_by_name)
    scaled = _first_fits("lr_scale_by_name", scales, names, model)
    decayed = _first_fits("weight_decay_by_name", decays, names, model)
    for index, (pattern, value) in enumerate(decays):
        own = [name for name, first in decayed.items() if first == index]
        if value > 0 and all(name in vectors for name in own):
            raise ConfigError(
                f"optimizer.weight_decay_by_name has '{pattern}={value:g}', which fits norms and biases "
                f"alone, like {own[0]}; they never decay: remove it"
            )
    scale_of = {_UNSCALED: 1.0} | {index: value for index, (_, value) in enumerate(scales)}
    decay_of = {_MATRIX: config.weight_decay, _VECTOR: 0.0}
    decay_of |= {index: value for index, (_, value) in enumerate(decays)}
    # Pattern by pattern, not value by value: where tensors lie does not depend on values.
    rule = {
        name: (scaled.get(name, _UNSCALED), _VECTOR if name in vectors else decayed.get(name, _MATRIX))
        for name in names
    }
    rules = sorted(set(rule.values()))
    table = tuple(Group(scale_of[scale], decay_of[decay]) for scale, decay in rules)
    return Groups(table, {name: rules.index(own) for name, own in rule.items()})


def _first_fits(
    key: str, patterns: Sequence[tuple[str, float]], names: Sequence[str], model: str
) -> dict[str, int]:
    """Name -> index of the first pattern that fits it; each pattern must have a name."""
    first: dict[str, int] = {}
    for index, (pattern, _) in enumerate(patterns):
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(
                f"optimizer.{key} has {pattern!r}, and no parameter of {model} that is trained has such a "
                f"name; they are like {names[0]} and {names[len(names) // 2]}"
            )
        own = [name for name in fitting if first.setdefault(name, index) == index]
        if not own:
            raise ConfigError(
                f"optimizer.{key} has {pattern!r}, but the first pattern that fits counts, and those before "
                f"it fit all of its parameters ({patterns[first[fitting[0]]][0]!r} fits {fitting[0]}); put "
                "it before them, or remove it"
            )
    return first
