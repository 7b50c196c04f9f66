"""A part of a run's layers in place of all of them. A mixture of experts has hundreds of thousands of pages,
and its layers are alike: a few, with as large a share of the DRAM, tell what all of them take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from tierstream.engine.device.memory import DeviceMemory, divide_as
from tierstream.engine.model.units import ModelUnits, build_layout
from tierstream.engine.plan import Plan
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.coarse import FRAMES_FEWEST
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import ExpertUse, expected_use, simulate
from tierstream.engine.planner.times import Known, modelled_times
from tierstream.tiered.layout import Layout

#: A case with more pages than the one is simulated by a part of it, which has the other: half a second.
WHOLE_PAGES, PART_PAGES = 3000, 1000
#: As few layers as show how one follows another, and as few experts as take turns in a layer.
_LAYERS_LEAST, _EXPERTS_LEAST, _EXPERT_SLOTS_LEAST = 2, 12, 4
#: Of a part whose pages are too small: what is simulated in some seconds.
_PART_PAGES_MOST = 6000


@dataclass(frozen=True)
class Sample:
    """A part of a case.

    Attributes:
        times: of the compute lane.
        scale: resource -> what the case takes of it, by what the part takes; "bytes" for links and drives.
        share: pages of the part, by those of the case.
    """

    case: Case
    times: Known
    experts: ExpertUse
    scale: Mapping[str, float]
    share: float

    def busy_s(self, forecast: Forecast) -> dict[str, float]:
        """Resource -> seconds of the whole case."""
        return {name: s * self.scale.get(name, self.scale["bytes"]) for name, s in forecast.busy_s.items()}


@dataclass(frozen=True)
class Prediction:
    """A forecast of a whole case.

    Attributes:
        share: of the pages, that was simulated.
        growth: see `Pace`.
    """

    forecast: Forecast
    share: float
    growth: float = 1.0


@dataclass(frozen=True)
class Pace:
    """Of the steps of a case.

    Attributes:
        busy_s: seconds of a step in which the busiest resource works.
        waits_s: in which it waits, in the part that was simulated.
    """

    busy_s: float
    waits_s: float

    def step_s(self, growth: float) -> float:
        """Seconds of a step, if its busiest resource waits for so many times what it does in the part."""
        return self.busy_s + growth * self.waits_s


def pace(case: Case, machine: Machine) -> Pace:
    """As `predict`, but for the growth, which hardly depends on what is changed of a case."""
    if case.layout.page_total <= WHOLE_PAGES:
        return Pace(simulate(case, machine).step_s, 0.0)
    part = take_sample(case, machine)
    return _pace(part, _simulated(part, machine))[0]


def predict(case: Case, machine: Machine, *, pages: int = PART_PAGES) -> Prediction:
    """`simulate`; where there are many pages, a part with so many. What a resource does grows with the part;
    what the busiest one waits for is partly of each layer and partly of the step, its begin and its end: a
    second part, of half the size, tells how much.
    """
    if case.layout.page_total <= WHOLE_PAGES:
        return Prediction(simulate(case, machine), 1.0)
    part = take_sample(case, machine, pages)
    found = _simulated(part, machine)
    paced, longest = _pace(part, found)
    small = _simulated(take_sample(case, machine, pages // 2), machine)
    sizes = [each.busy_s[longest] / paced.busy_s for each in (small, found)]
    more_s = max(0.0, paced.waits_s - small.step_s + small.busy_s[longest])
    grown_s = more_s * (1 - sizes[1]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    growth = 1 + grown_s / paced.waits_s if paced.waits_s else 1.0
    busy_s, step_s, nbytes = part.busy_s(found), paced.step_s(growth), part.scale["bytes"]
    idle = (step_s - busy_s["compute"]) / max(sum(found.idle_s.values()), 1e-9)
    forecast = replace(
        found,
        step_s=step_s,
        steps_s=[seconds * step_s / found.step_s for seconds in found.steps_s],
        tokens_per_s=case.plan.tokens_per_step / step_s,
        busy_s=busy_s,
        idle_s={cause: idle * seconds for cause, seconds in found.idle_s.items()},
        nbytes={link: int(nbytes * count) for link, count in found.nbytes.items()},
        dram_peak_bytes=min(case.plan.dram_bytes, int(found.dram_peak_bytes * nbytes)),
    )
    return Prediction(forecast, part.share, growth)


def _pace(part: Sample, found: Forecast) -> tuple[Pace, str]:
    """And the busiest resource."""
    busy_s = part.busy_s(found)
    longest = max(busy_s, key=busy_s.__getitem__)
    return Pace(busy_s[longest], found.step_s - found.busy_s[longest]), longest


def _simulated(part: Sample, machine: Machine) -> Forecast:
    return simulate(part.case, machine, times=part.times, experts=part.experts)


def take_sample(case: Case, machine: Machine, pages: int = PART_PAGES) -> Sample:
    """A part of so many pages, or thereabouts."""
    everything, layers = case.layout.page_total, len(case.units.layers)
    most = max(map(len, case.units.experts))
    kept_layers = min(layers, max(_LAYERS_LEAST, layers * pages // everything))
    kept_experts = min(most, max(_EXPERTS_LEAST, most * layers * pages // (kept_layers * everything)))
    choice = _Choice(case.units, kept_layers, kept_experts)
    layout, grain = _in_few_pages(case, choice.units)
    plan = _plan(case, choice, layout)
    stays = plan.device.resident
    planes = {key: spec for key, spec in layout.planes.items() if spec.durable or spec.unit not in stays}
    layout = Layout(layout.page_bytes, planes)
    part = replace(case, units=choice.units, layout=layout, plan=plan, grain=case.grain * grain)
    times = modelled_times(case, machine)
    own = choice.times(times)
    return Sample(
        part,
        own,
        choice.experts(expected_use(case)),
        {
            "compute": _compute_s(case, times) / _compute_s(part, own),
            "update": _updated(case) / max(1, _updated(part)),
            "interpreter": everything / (grain * layout.page_total),
            "bytes": _nbytes(case.layout) / _nbytes(layout),
        },
        min(1.0, grain * layout.page_total / everything),
    )


def _in_few_pages(case: Case, units: ModelUnits) -> tuple[Layout, int]:
    """The planes of a part, and how many pages of the run are one of theirs: more than one where a small DRAM
    tier made pages so small that even a part has too many. What so few frames hold makes no difference then.
    """
    layout_of = partial(
        build_layout, units, master=case.config.optimizer.master,
        grad_dtype=case.config.optimizer.grad_dtype, boundary_nbytes=case.plan.boundary_nbytes,
    )  # fmt: skip
    layout = layout_of(page_bytes=case.layout.page_bytes)
    grain = -(-layout.page_total // _PART_PAGES_MOST)
    return (layout_of(page_bytes=grain * layout.page_bytes) if grain > 1 else layout), grain


class _Choice:
    """Some layers, evenly spread, and some experts of each."""

    def __init__(self, units: ModelUnits, layers: int, experts: int) -> None:
        self._layers = _spread(len(units.layers), layers)
        self._experts = [
            _spread(len(units.experts[i]), min(experts, len(units.experts[i]))) for i in self._layers
        ]
        self._shares = [
            len(kept) / len(units.experts[i]) if kept else 1.0
            for i, kept in zip(self._layers, self._experts, strict=True)
        ]
        self.units = replace(
            units,
            layers=tuple(units.layers[i] for i in self._layers),
            beside=tuple(units.beside[i] for i in self._layers),
            experts=tuple(
                tuple(units.experts[i][expert] for expert in kept)
                for i, kept in zip(self._layers, self._experts, strict=True)
            ),
            passed_by=tuple(
                int(units.passed_by[i] * share) for i, share in zip(self._layers, self._shares, strict=True)
            ),
        )

    def times(self, whole: Known) -> Known:
        """Those of the part: with fewer experts, a layer computes for as much less time."""
        seconds = dict(whole.seconds)
        for layer, share in zip(self.units.layers, self._shares, strict=True):
            for what in ("forward", "backward"):
                seconds[what, layer.name] *= share
        return Known(seconds)

    def experts(self, whole: ExpertUse) -> ExpertUse:
        """Of the experts that have tokens those that are there."""

        def use(step: int, layer: int) -> list[int]:
            chosen = set(whole(step, self._layers[layer]))
            return [index for index, expert in enumerate(self._experts[layer]) if expert in chosen]

        return use


def _spread(count: int, wanted: int) -> list[int]:
    """So many of the numbers below `count`, from the middles of equal parts."""
    return [(2 * index + 1) * count // (2 * wanted) for index in range(wanted)]


def _plan(case: Case, choice: _Choice, layout: Layout) -> Plan:
    """With as large a share of the DRAM, of the slots and of the units that stay as there is of the state."""
    plan, share = case.plan, _nbytes(layout) / _nbytes(case.layout)
    least = FRAMES_FEWEST * layout.page_bytes

    def part(nbytes: int, least: int) -> int:
        whole = nbytes if layout.page_bytes == case.layout.page_bytes else max(nbytes, least)
        return min(whole, max(least, int(nbytes * share)))

    return replace(
        plan,
        page_bytes=layout.page_bytes,
        dram_bytes=part(plan.dram_bytes, least),
        prefetch_bytes=part(plan.prefetch_bytes, least // 4),
        writeback_bytes=part(plan.writeback_bytes, least // 8),
        device=_device(case, choice.units, layout, share),
    )


def _device(case: Case, units: ModelUnits, layout: Layout, share: float) -> DeviceMemory:
    memory, stays, left = case.plan.device, set(case.plan.device.resident), 0.0
    left = share * sum(unit.numel for unit in case.units.in_forward_order if unit.name in stays)
    resident = []
    for unit in units.without_experts:
        if unit.name in stays and left >= unit.numel / 2:
            resident.append(unit.name)
            left -= unit.numel
    streamed = sum(unit.name not in resident for unit in units.layers)
    slots = max(min(2, streamed), memory.layer_slots * len(units.layers) // len(case.units.layers))
    expert_nbytes = None
    if memory.expert_slots is not None:
        count, size = memory.expert_slots
        expert_nbytes = min(count, max(_EXPERT_SLOTS_LEAST, int(count * share))) * size
    return divide_as(
        units, layout, boundary_nbytes=case.plan.boundary_nbytes, expert_nbytes=expert_nbytes,
        resident=tuple(resident), layer_slots=min(streamed, slots),
    )  # fmt: skip


def _nbytes(layout: Layout) -> int:
    return layout.nbytes(durable=True) + layout.nbytes(durable=False)


def _updated(case: Case) -> int:
    """Parameters whose update goes through the store."""
    resident = case.plan.device.resident
    return sum(
        unit.numel for unit in case.units.in_forward_order if unit.trained and unit.name not in resident
    )


def _compute_s(case: Case, times: Known) -> float:
    units = case.units
    own = [(what, unit.name) for what in ("forward", "backward") for unit in (*units.begin, *units.layers)]
    own += [("head", units.head.name), *(("adamw", name) for name in case.plan.device.resident)]
    return sum(times.compute_s(*key) for key in own)
