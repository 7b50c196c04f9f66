"""The steps of a run, simulated: the executor's own script, store, slots and order of updates, against the
clock of a machine that need not be there. What moves, and in which order, is what the run itself would do;
how long it takes follows from the machine's rates.

    forecast = foresee(case_of(config, machine), machine)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstream.engine.planner.case import Case
from tierstream.engine.planner.clock import Steps
from tierstream.engine.planner.coarse import coarser, grain_for
from tierstream.engine.planner.forecast import Forecast
from tierstream.engine.planner.hardware import Hardware
from tierstream.engine.planner.host import Host
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.times import LayerTimes, modelled_times
from tierstream.engine.trace.summary import summarise
from tierstream.engine.trace.trace import Span
from tierstream.io.transfer import Direction

#: (step, layer) -> the experts of the layer that have tokens in it.
ExpertUse = Callable[[int, int], Sequence[int]]

#: A step is settled that moves as many bytes between DRAM and drives as the step before it, to this part.
_SETTLED = 0.02
#: The second step is the first with updates, so the third is the first that has one like it before it. With
#: `lru` DRAM fills with what it will keep in four to six. Some cases never settle: pages take turns.
_STEPS_WITH_UPDATES, _STEPS_MOST = 2, 9


def foresee(case: Case, machine: Machine, grain: int | None = None) -> Forecast:
    """`simulate`, in pages so large that it takes a second at most.

    Args:
        grain: pages that are one; None: as many as it takes (see `grain_for`).
    """
    few = coarser(case, grain_for(case) if grain is None else grain)
    return simulate(few, machine, times=modelled_times(case, machine))


def simulate(
    case: Case,
    machine: Machine,
    steps: int | None = None,
    *,
    times: LayerTimes | None = None,
    experts: ExpertUse | None = None,
) -> Forecast:
    """Run steps in simulated time, until one is in steady state; the forecast is of that one.

    Args:
        steps: at least 2, the forecast is of the last; None: as many as it takes. The first begins with no
            page in DRAM and nothing to update.
        times: of the device; None: modelled from the machine's rates.
        experts: which have tokens; None: tokens go to experts at random, all equally likely.
    """
    times = times or modelled_times(case, machine)
    experts = experts or expected_use(case)
    hardware = Hardware(case, machine)
    host = Host(hardware, case, times, experts)
    made, ended = list[_Step](), False

    def run() -> Steps[None]:
        nonlocal ended
        while not ended:
            begin_s, busy, moved = hardware.clock.now_s, _busy(hardware), _moved(hardware)
            hardware.notes.begin(recording=len(made) + 1 >= (steps or _STEPS_WITH_UPDATES))
            yield from host.step(len(made))
            made.append(
                _Step(
                    hardware.clock.now_s - begin_s,
                    {name: seconds - busy[name] for name, seconds in _busy(hardware).items()},
                    {name: nbytes - moved[name] for name, nbytes in _moved(hardware).items()},
                    hardware.notes.spans,
                )
            )
            if steps is None:
                ended = _is_settled(made, case.plan.dram_bytes) or len(made) == _STEPS_MOST
            else:
                ended = len(made) == steps

    hardware.clock.start(run())
    hardware.clock.run_until(lambda: ended)
    step = made[-1] if steps is not None else _steady(made, case.plan.dram_bytes)
    (traced,) = summarise(step.spans)
    return Forecast(
        step_s=step.seconds,
        steps_s=[each.seconds for each in made],
        tokens_per_s=case.plan.tokens_per_step / step.seconds,
        busy_s=step.busy_s,
        idle_s=traced.idle_s,
        nbytes=step.nbytes,
        spans=step.spans,
    )


@dataclass(frozen=True)
class _Step:
    """One simulated step; busy seconds, bytes moved and spans as in `Forecast`."""

    seconds: float
    busy_s: Mapping[str, float]
    nbytes: Mapping[str, int]
    spans: Sequence[Span]

    @property
    def drive_nbytes(self) -> int:
        return self.nbytes["nvme read"] + self.nbytes["nvme write"]


def _is_settled(made: Sequence[_Step], dram_bytes: int) -> bool:
    """The last step moved as many bytes as the one before it, or it moved so many that what it found in DRAM
    makes no difference.
    """
    if len(made) < _STEPS_WITH_UPDATES:
        return False
    before, last = (step.drive_nbytes for step in made[-2:])
    alike = len(made) > _STEPS_WITH_UPDATES and abs(last - before) <= _SETTLED * before
    return alike or dram_bytes <= _SETTLED * last


def _steady(made: Sequence[_Step], dram_bytes: int) -> _Step:
    """The last step where it has settled, else the median of the later half."""
    if _is_settled(made, dram_bytes):
        return made[-1]
    half = sorted(made[len(made) // 2 :], key=lambda step: step.seconds)
    return half[len(half) // 2]


def expected_use(case: Case, seed: int = 0) -> ExpertUse:
    """As many experts of each layer as have tokens on average where all are equally likely, drawn anew in
    every step.
    """
    wanted = case.script.with_tokens

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
