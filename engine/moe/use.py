"""Which experts had tokens, over the steps of a run, and what streaming them one by one has spared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import Unit


def expected_with_tokens(experts: Sequence[Unit], passed_by: int, tokens: int) -> int:
    """How many experts of a layer have tokens in a step, on average, where tokens go to all equally likely.

    Args:
        passed_by: parameters of those that a token does not go to.
    """
    if not experts:
        return 0
    missed = (passed_by / sum(unit.parameters for unit in experts)) ** tokens
    return round(len(experts) * (1 - missed))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counters of the experts' slots on the device, since the run began or in some steps."""

    hits: int
    """Experts that were wanted and lay in a slot."""
    misses: int
    """Experts that were wanted and had to come."""
    guesses: int
    """Experts read ahead."""
    right_guesses: int
    """Of those, the ones that were wanted afterwards."""
    bytes_up: int
    """Copied to the device."""

    def since(self, earlier: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, key) - getattr(earlier, key) for key in self.__slots__))

    def plus(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, key) + getattr(other, key) for key in self.__slots__))


NO_COUNTS = CacheCounts(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """What a step did with experts; counts are over all layers."""

    with_tokens: int
    """Experts that had any."""
    experts: int
    """All there are."""
    cache: CacheCounts
    """Of the slots on the device."""
    bytes_spared: int
    """Not copied there, against all experts of every layer once in forward and once in backward."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ExpertStep:
        """Of what JSON holds. Raises TypeError or KeyError."""
        return cls(**{**plain, "cache": CacheCounts(**plain["cache"])})


class ExpertUse:
    """Tokens of each expert, added up.

    Args:
        experts: layer -> number of its experts; only of layers that have some, in order.
        expert_bytes: of the weights of all experts of all layers.

    Attributes:
        layers: with experts.
        tokens: int64 [layers, experts]; where a layer has fewer experts than another, zeros.
        steps: with which of them each expert had tokens: int64 [layers, experts].
        count: steps so far.
        moved: in all of them.
    """

    def __init__(self, experts: Mapping[int, int], expert_bytes: int) -> None:
        self.layers = list(experts)
        self._experts, self._expert_bytes = dict(experts), expert_bytes
        shape = len(experts), max(experts.values(), default=0)
        self.tokens: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.steps: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.count = 0
        self.moved = NO_COUNTS

    @property
    def experts(self) -> int:
        """Of all layers."""
        return sum(self._experts.values())

    def add(self, tokens: Sequence[Mapping[int, int]], moved: CacheCounts) -> ExpertStep:
        """A step.

        Args:
            tokens: of each layer with experts, expert -> its tokens, of those that had any.
            moved: in this step.
        """
        for row, own in enumerate(tokens):
            for expert, count in own.items():
                self.tokens[row, expert] += count
                self.steps[row, expert] += 1
        self.count += 1
        self.moved = self.moved.plus(moved)
        spared = 2 * self._expert_bytes - moved.bytes_up
        return ExpertStep(sum(map(len, tokens)), self.experts, moved, spared)

    def hit_share(self) -> NDArray[np.float64]:
        """Of each layer the mean share of its experts that had tokens in a step."""
        sizes = np.array(list(self._experts.values()), np.float64)
        share: NDArray[np.float64] = self.steps.sum(axis=1) / np.maximum(sizes * self.count, 1)
        return share

    def describe(self) -> str:
        """For people, in one line."""
        moved, share = self.moved, 100 * self.steps.sum() / max(1, self.experts * self.count)
        wanted, spared = moved.hits + moved.misses, 2 * self.count * self._expert_bytes - moved.bytes_up
        text = f"experts: {share:.0f} % had tokens in a step; "
        text += f"{100 * moved.hits / max(1, wanted):.0f} % of their uses found them on the device"
        if moved.guesses:
            right = 100 * moved.right_guesses / moved.guesses
            text += f" ({right:.0f} % of {moved.guesses} guesses were right)"
        return f"{text}; {format_bytes(max(0, spared))} less copied than by whole layers"
