"""Which experts had tokens, over the steps of a run, and what streaming them one by one has spared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counters of the experts' slots on the device since the run began; `since` gives what came between two
    readings.

    Attributes:
        hits, misses: experts that were wanted and lay in a slot, or had to come.
        guesses, right_guesses: experts read ahead, and those of them that were wanted afterwards.
        bytes_up: copied to the device.
    """

    hits: int
    misses: int
    guesses: int
    right_guesses: int
    bytes_up: int

    def since(self, earlier: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, key) - getattr(earlier, key) for key in self.__slots__))


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
    """

    def __init__(self, experts: Mapping[int, int], expert_bytes: int) -> None:
        self.layers = list(experts)
        self._experts, self._expert_bytes = dict(experts), expert_bytes
        shape = len(experts), max(experts.values(), default=0)
        self.tokens: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.steps: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.count = 0

    @property
    def experts(self) -> int:
        """Of all layers."""
        return sum(self._experts.values())

    def add(self, step: Sequence[Mapping[int, int]]) -> int:
        """A step: of each layer with experts the tokens of those that had any. Returns how many had."""
        hit = 0
        for row, tokens in enumerate(step):
            for expert, count in tokens.items():
                self.tokens[row, expert] += count
                self.steps[row, expert] += 1
            hit += len(tokens)
        self.count += 1
        return hit

    def hit_share(self) -> NDArray[np.float64]:
        """Of each layer the mean share of its experts that had tokens in a step."""
        sizes = np.array(list(self._experts.values()), np.float64)
        share: NDArray[np.float64] = self.steps.sum(axis=1) / np.maximum(sizes * self.count, 1)
        return share

    def bytes_spared(self, moved: CacheCounts, steps: int) -> int:
        """Bytes that `steps` steps did not copy to the device, against all experts of every layer once in
        forward and once in backward.
        """
        return 2 * steps * self._expert_bytes - moved.bytes_up
