"""Timing that can be believed: all cases side by side, round after round in random order, medians with their
spread.

On a machine that others use too, two numbers taken minutes apart cannot be compared; two that were taken in
turn, several times, can.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

#: What sets a case apart from the others: "threads" -> 8.
Labels: TypeAlias = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one case.

    Attributes:
        amount: what was done, in the case's unit.
        seconds: wall time it took.
        cpu_s: processor time of the process in it, user and system, all threads.
        note: what a reader must know of this run, e.g. "page cache".
    """

    amount: float
    seconds: float
    cpu_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to be measured: `run` does it once, in full, and says how long it took."""

    labels: Labels
    unit: str
    run: Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Measurement:
    """All counted runs of a case.

    Attributes:
        unit: what `rates` count per second: "B" or "parameters".
        rates: one per round, in order of time.
        cpu_s_per_giga: processor seconds per 10^9 units, median.
        note: the notes of its runs, each once.
    """

    labels: Labels
    unit: str
    rates: tuple[float, ...]
    cpu_s_per_giga: float
    note: str = ""
    median: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median", statistics.median(self.rates))

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (max(self.rates) - min(self.rates)) / self.median

    def to_json(self) -> dict[str, Any]:
        return {
            **self.labels,
            "unit": f"{self.unit}/s",
            "median": self.median,
            "lowest": min(self.rates),
            "highest": max(self.rates),
            "rates": list(self.rates),
            "cpu_s_per_giga": self.cpu_s_per_giga,
            "note": self.note,
        }


def timed(amount: float, run: Callable[[], object]) -> Sample:
    """Runs it and takes the time."""
    cpu, begin = time.process_time(), time.perf_counter()
    run()
    return Sample(amount, time.perf_counter() - begin, time.process_time() - cpu)


def measure(
    cases: Sequence[Case],
    *,
    rounds: int,
    warmups: int = 1,
    seed: int = 0,
    on_run: Callable[[Case], None] = lambda case: None,
    on_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Runs every case once per round, in an order drawn anew for each, and sums up.

    Args:
        cases: what is measured; the result has the same order.
        rounds: rounds that count, at least 1.
        warmups: rounds before them that do not.
        seed: of the orders.
        on_run: called after each run (a progress bar). on_round: after each round, those that do not count
            too.
    """
    order = random.Random(seed)
    samples: list[list[Sample]] = [[] for _ in cases]
    for turn in range(warmups + rounds):
        for index in order.sample(range(len(cases)), len(cases)):
            sample = cases[index].run()
            if turn >= warmups:
                samples[index].append(sample)
            on_run(cases[index])
        on_round()
    return [_sum_up(case, taken) for case, taken in zip(cases, samples, strict=True)]


def _sum_up(case: Case, samples: Sequence[Sample]) -> Measurement:
    return Measurement(
        labels=case.labels,
        unit=case.unit,
        rates=tuple(sample.amount / sample.seconds for sample in samples),
        cpu_s_per_giga=statistics.median(1e9 * sample.cpu_s / sample.amount for sample in samples),
        note="; ".join(dict.fromkeys(sample.note for sample in samples if sample.note)),
    )
