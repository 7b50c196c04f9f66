"""Which samples an epoch takes of each entry of `data.files`, and in what order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Streams of random numbers, apart from each other: samples of an entry, entries among each other, rows,
#: samples of an entry that are kept to evaluate on.
SAMPLES, ENTRIES, ROWS, HELD_OUT = range(4)


def draw_order(seed: int, epoch: int, count: int, *, stream: int, entry: int = 0) -> NDArray[np.int64]:
    """An order of `count` things, drawn from the other arguments.

    Sorting the raw output of the generator gives the same order with every version of numpy; it promises that
    for `random_raw`, not for `permutation` (NEP 19).
    """
    counter = stream << 192 | entry << 128
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter)
    return np.argsort(generator.random_raw(count), kind="stable")


class Mixture:
    """Endless passes over the samples of each entry, cut into epochs.

    In epoch e an entry of weight w with n samples has the positions `[round(e w n), round((e + 1) w n))` of
    its passes, each pass in an order of its own. So with weight 0.5 two epochs see each sample once, and with
    3 every epoch sees it three times.

    Args:
        counts: samples of each entry.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._counts, self._weights, self._seed = counts, weights, seed
        self._first_numbers = np.cumsum([0, *counts[:-1]]).tolist()

    def samples(self, epoch: int) -> NDArray[np.int64]:
        """Samples of an epoch in order, entries mixed; counted through from the first entry to the last."""
        parts = [first + self._part(entry, epoch) for entry, first in enumerate(self._first_numbers)]
        samples = np.concatenate(parts)
        if len(parts) == 1:
            return samples
        return samples[draw_order(self._seed, epoch, samples.size, stream=ENTRIES)]

    def _part(self, entry: int, epoch: int) -> NDArray[np.int64]:
        count = self._counts[entry]
        start, stop = (round(end * self._weights[entry] * count) for end in (epoch, epoch + 1))
        drawn = []
        while start < stop:
            number, begin = divmod(start, count)
            end = min(count, begin + stop - start)
            drawn.append(draw_order(self._seed, number, count, stream=SAMPLES, entry=entry)[begin:end])
            start += end - begin
        return np.concatenate(drawn) if drawn else np.empty(0, np.int64)
