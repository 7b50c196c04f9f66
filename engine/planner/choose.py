"""The fastest plan of a run on a machine, by branch and bound over what changes no bit of it (grid.py).

A way to divide the device's memory and the work is a branch, and its leaves are the settings of the store.
A branch that cannot be faster than the best plan so far (floor.py) is cut; of the others the most promising
comes next, and of the leaves of a branch those whose settings have all done well: what is slow is not tried
in every combination. So what is found is the fastest of the grid, up to the tolerance; and where the budget
of simulations ends the search, it is known how much faster another could be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.engine.planner.case import Case, plan_for, units_of
from tierstream.engine.planner.coarse import coarser, grain_for
from tierstream.engine.planner.floor import floor_s
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.planner.grid import Refused, Values, divisions, store_settings, with_values
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.times import LayerTimes, modelled_times
from tierstream.io.errors import BudgetError

#: A plan need not be looked for that is faster by less.
TOLERANCE = 0.01
#: Pages of a state that is simulated many times, and frames for them: plans are compared, and all are coarse.
_PAGES, _FRAMES = 600, 96


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that was looked at, or a branch of them.

    Attributes:
        values: of the keys that were open.
        floor_s: no plan of the branch has a faster step; None: it does not fit.
        step_s: simulated; None: it was not.
        why: it is not the one.
    """

    values: Values
    floor_s: float | None = None
    step_s: float | None = None
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        config: the run, with nothing open any more.
        values: what was chosen of it.
        forecast: of its steps, in pages that may be larger than those of the run.
        floor_s: no plan of the grid has a step faster than this.
        alternatives: the fastest first.
        suggested: what would be faster and changes bits, so that the user alone may choose it.
    """

    config: RunConfig
    values: Values
    forecast: Forecast
    floor_s: float
    alternatives: Sequence[Alternative]
    suggested: Sequence[Alternative] = ()

    def describe(self) -> str:
        """One line; without the forecast, which is that of the search, in coarse pages."""
        values = ", ".join(f"{key} {value}" for key, value in self.values.items())
        apart = self.forecast.step_s / self.floor_s - 1
        proof = "no other is faster" if apart <= 0 else f"no other is faster by more than {100 * apart:.0f} %"
        return f"{values or 'nothing left open'}; {proof}"


def choose(
    config: RunConfig,
    machine: Machine,
    *,
    model: tuple[ModelUnits, int] | None = None,
    simulations: int = 24,
    tolerance: float = TOLERANCE,
) -> Choice:
    """The fastest plan; what the run file sets stays.

    Args:
        model: as `units_of` gives it, where it is known.
        simulations: at most.
        tolerance: share of a step's time by which another plan of the grid may be faster.

    Raises:
        BudgetError: nothing fits, as the run itself would say.
        ConfigError, ModelSourceError: as before the first step of the run.
    """
    search = _Search(config, machine, *(model or units_of(config)))
    best = search.run(simulations, tolerance)
    chosen = with_values(config, best.values)
    return Choice(
        config=chosen,
        values=best.values,
        forecast=best.forecast,
        floor_s=search.floor_s,
        alternatives=search.alternatives,
        suggested=_suggested(search, best, tolerance),
    )


@dataclass(frozen=True)
class _Branch:
    """A division of the device's memory, with the settings of the store that a run has by itself.

    Attributes:
        case: to be simulated, in pages that may be larger.
        plan: with its own pages.
        least_s: (key, value) -> the fastest step so far of a leaf with that setting.
    """

    values: Values
    config: RunConfig
    plan: Plan
    case: Case
    times: LayerTimes
    floor_s: float
    least_s: dict[tuple[str, Any], float] = field(default_factory=dict)

    def promise_s(self, values: Values) -> float:
        """What the slowest of a leaf's settings has come to at best; the floor while nothing is known."""
        known = (self.least_s[setting] for setting in values.items() if setting in self.least_s)
        return max(known, default=self.floor_s)

    def note(self, values: Values, step_s: float) -> None:
        """A leaf was simulated."""
        for setting in values.items():
            self.least_s[setting] = min(step_s, self.least_s.get(setting, step_s))

    def leaves(self) -> Iterator[tuple[Values, Case]]:
        for own in store_settings(self.config, self.plan):
            plan = replace(
                self.case.plan,
                policy=own.get("tiers.policy", self.plan.policy),
                prefetch_bytes=int(own.get("tiers.prefetch", self.plan.prefetch_bytes)),
                writeback_bytes=int(own.get("tiers.writeback", self.plan.writeback_bytes)),
            )
            yield {**self.values, **own}, replace(self.case, plan=plan)


@dataclass(frozen=True)
class _Best:
    values: Values
    forecast: Forecast
    branch: _Branch
    case: Case


class _Search:
    def __init__(self, config: RunConfig, machine: Machine, units: ModelUnits, vocabulary: int) -> None:
        self._config, self.machine, self._units, self._vocabulary = config, machine, units, vocabulary
        self._simulated: list[_Best] = []
        self._aside: list[Alternative] = []

    def branch(self, values: Values) -> _Branch:
        """Raises BudgetError: it does not fit."""
        config = with_values(self._config, values)
        plan, layout = plan_for(config, self.machine, self._units)
        exact = Case(config, self._units, layout, plan, self._vocabulary)
        case = coarser(exact, grain_for(exact, _PAGES, _FRAMES))
        times = modelled_times(exact, self.machine)
        return _Branch(values, config, plan, case, times, floor_s(case, self.machine, times))

    def run(self, simulations: int, tolerance: float) -> _Best:
        open_ = [(branch, *next(branch.leaves())) for branch in self._branches()]
        while open_:
            promises_s = [branch.promise_s(values) for branch, values, _ in open_]
            branch, values, case = open_.pop(promises_s.index(min(promises_s)))
            best_s = min((each.forecast.step_s for each in self._simulated), default=float("inf"))
            if branch.floor_s * (1 + tolerance) >= best_s:
                self._leave(branch, values, f"takes {branch.floor_s:.3g} s at least")
            elif len(self._simulated) >= simulations:
                self._leave(branch, values, f"not looked at, after {simulations} simulations")
            else:
                forecast = simulate(case, self.machine, times=branch.times)
                self._simulated.append(_Best(values, forecast, branch, case))
                if not branch.least_s:
                    open_ += [(branch, *leaf) for leaf in list(branch.leaves())[1:]]
                branch.note(values, forecast.step_s)
        self._simulated.sort(key=lambda each: each.forecast.step_s)
        return self._simulated[0]

    @property
    def floor_s(self) -> float:
        left = [each.floor_s for each in self._aside if each.floor_s is not None]
        return min([self._simulated[0].forecast.step_s, *left])

    @property
    def alternatives(self) -> list[Alternative]:
        best, *slower = self._simulated
        found = []
        for each in slower:
            step_s = each.forecast.step_s
            more = 100 * (step_s / best.forecast.step_s - 1)
            found.append(
                Alternative(
                    values=each.values, floor_s=each.branch.floor_s, step_s=step_s,
                    why=f"{more:.1f} % slower, bound by {each.forecast.resource}",
                )
            )  # fmt: skip
        return found + self._aside

    def _branches(self) -> list[_Branch]:
        found, refusals = [], list[BudgetError]()
        for values in divisions(self._config, self.machine, self._units):
            if isinstance(values, Refused):
                self._aside.append(Alternative(values=values.values, why=values.why))
                refusals.append(BudgetError(values.why))
            else:
                found.append(self.branch(values))
        if not found:
            raise refusals[0]
        return found

    def _leave(self, branch: _Branch, values: Values, why: str) -> None:
        self._aside.append(Alternative(values=values, floor_s=branch.floor_s, why=why))


def _suggested(search: _Search, best: _Best, tolerance: float) -> list[Alternative]:
    """All rows in one chunk, where the run file has fewer: other sums, and so other bits."""
    train = best.branch.config.train
    if not train.chunks_rows:
        return []
    values = {"train.rows_per_chunk": None}
    branch = search.branch({**best.branch.values, **values})
    forecast = simulate(replace(branch.case, plan=best.case.plan), search.machine, times=branch.times)
    if forecast.step_s * (1 + tolerance) >= best.forecast.step_s:
        return []
    why = "changes bits; needs more of the device's memory beside tiers.gpu"
    return [Alternative(values=values, floor_s=branch.floor_s, step_s=forecast.step_s, why=why)]
