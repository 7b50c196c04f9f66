"""The steps of a run, simulated: the executor's own script, store, slots and order of updates, against the
clock of a machine that need not be there. What moves, and in which order, is what the run itself would do;
how long it takes follows from the machine's rates.

    forecast = simulate(case_of(config, machine), machine)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from tierstream.engine.planner.case import Case
from tierstream.engine.planner.clock import Steps
from tierstream.engine.planner.coarse import coarser
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.planner.hardware import Hardware
from tierstream.engine.planner.host import Host
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.times import LayerTimes, modelled_times
from tierstream.engine.trace.summary import summarise
from tierstream.io.transfer import Direction

#: (step, layer) -> the experts of the layer that have tokens in it.
ExpertUse = Callable[[int, int], Sequence[int]]


def simulate(
    case: Case,
    machine: Machine,
    steps: int = 3,
    *,
    times: LayerTimes | None = None,
    experts: ExpertUse | None = None,
) -> Forecast:
    """Run some steps in simulated time; the forecast is of the last, which is in steady state.

    Args:
        steps: at least 2; the first begins with no page in DRAM and nothing to update.
        times: of the device; None: modelled from the machine's rates.
        experts: which have tokens; None: tokens go to experts at random, all equally likely, and a case of
            many pages is made coarser.
    """
    times = times or modelled_times(case, machine)
    if experts is None:
        case = coarser(case)
        experts = expected_use(case)
    hardware = Hardware(case, machine)
    host = Host(hardware, case, times, experts)
    before: Mapping[str, float] = {}
    counted: Mapping[str, int] = {}
    ends = [0.0]

    def run() -> Steps[None]:
        nonlocal before, counted
        for step in range(steps):
            before, counted = _busy(hardware), _moved(hardware)
            hardware.notes.recording = step == steps - 1
            yield from host.step(step)
            ends.append(hardware.clock.now_s)

    hardware.clock.start(run())
    hardware.clock.run_until(lambda: len(ends) > steps)
    busy, moved = Counter(_busy(hardware)), Counter(_moved(hardware))
    spans = hardware.notes.spans
    step_s = ends[-1] - ends[-2]
    (traced,) = summarise(spans)
    return Forecast(
        step_s=step_s,
        steps_s=[end - begin for begin, end in pairwise(ends)],
        tokens_per_s=case.plan.tokens_per_step / step_s,
        busy_s={name: seconds - before[name] for name, seconds in busy.items()},
        idle_s=traced.idle_s,
        nbytes={name: nbytes - counted[name] for name, nbytes in moved.items()},
        dram_peak_bytes=hardware.store.stats.frames_in_use_peak * case.layout.page_bytes,
        spans=spans,
    )


def expected_use(case: Case, seed: int = 0) -> ExpertUse:
    """As many experts of each layer as have tokens on average where all are equally likely, drawn anew in
    every step.
    """
    tokens = case.plan.tokens_per_step
    wanted = []
    for experts, passed_by in zip(case.units.experts, case.units.passed_by, strict=True):
        if not experts:
            wanted.append(0)
            continue
        # The share of its experts that a token does not go to.
        missed = (passed_by / sum(unit.parameters for unit in experts)) ** tokens
        wanted.append(round(len(experts) * (1 - missed)))

    def use(step: int, layer: int) -> Sequence[int]:
        drawn = random.Random(f"{seed} {step} {layer}")
        return sorted(drawn.sample(range(len(case.units.experts[layer])), wanted[layer]))

    return use


def _busy(hardware: Hardware) -> dict[str, float]:
    found = {
        "compute": hardware.compute.busy_s,
        "upload": hardware.up.busy_s,
        "download": hardware.down.busy_s,
        "update": hardware.kernel.busy_s,
        "interpreter": hardware.interpreter.busy_s,
    }
    return found | {drive.rates.directory: drive.busy_s for drive in hardware.drives}


def _moved(hardware: Hardware) -> dict[str, int]:
    found = {"upload": hardware.up.nbytes, "download": hardware.down.nbytes}
    for direction, name in ((Direction.READ, "nvme read"), (Direction.WRITE, "nvme write")):
        found[name] = sum(drive.nbytes[direction] for drive in hardware.drives)
    return found
