"""Steps as the planner foresees them, beside the same steps measured: small models on the CPU, their state in
DRAM or on a drive that `tiers.throttle` makes slow.

    python benchmarks/forecast.py [--dir DIRECTORY] [--rounds 3] [--steps 5] [--only NAME...]

Two forecasts of each case: with the times of layers that the machine's rates give ("modelled"), and with
those of the same model alone in DRAM, between two updates ("timed"). The cases take turns; in each round of a
case its layers, its steps and the machine are measured, one after the other. Medians of the rounds, which all
are in the line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import openmp  # noqa: F401

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.measure.machine import known_drives, load_profile
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import ThrottleConfig, TiersConfig
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.times import Known, times_of_trace
from tierstream.engine.trace.trace import Span, Track
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.scratch import ScratchFolder

_SEQ_LEN, _WARM_UP = 128, 3
_EARLY = Setting(clip_norm=None, check_finite=False)
_DEFERRED = Setting(clip_norm=1.0)
_SLOW = ThrottleConfig(read=ByteSize(200 << 20), write=ByteSize(160 << 20))
_SHARED = ThrottleConfig(total=ByteSize(240 << 20), latency_s=0.002)


class _Shape(NamedTuple):
    name: str
    hidden: int
    layers: int


#: Large enough that Python does not set the pace of a step.
_DENSE, _MOE = _Shape("tiny", 512, 6), _Shape("tiny-moe", 256, 4)


@dataclass(frozen=True, kw_only=True)
class _Case:
    shape: _Shape
    rows: int
    setting: Setting = _DEFERRED
    throttle: ThrottleConfig | None = None
    dram: int | None = None
    tiers: dict[str, Any] = field(default_factory=dict)
    moe: MoeConfig = field(default_factory=MoeConfig)

    @property
    def place(self) -> tuple[_Shape, int]:
        """What the device's times depend on."""
        return self.shape, self.rows


_CASES = {
    "dense, DRAM, small step": _Case(shape=_DENSE, rows=1),
    "dense, DRAM, large step": _Case(shape=_DENSE, rows=8),
    "dense, DRAM, early updates": _Case(shape=_DENSE, rows=1, setting=_EARLY),
    "dense, drive, small step": _Case(shape=_DENSE, rows=1, throttle=_SLOW, dram=140 << 20),
    "dense, drive, large step": _Case(shape=_DENSE, rows=8, throttle=_SLOW, dram=190 << 20),
    "dense, drive, early updates": _Case(
        shape=_DENSE, rows=1, setting=_EARLY, throttle=_SLOW, dram=140 << 20
    ),
    "dense, drive, lru": _Case(
        shape=_DENSE, rows=1, throttle=_SLOW, dram=140 << 20, tiers={"policy": "lru"}
    ),
    "dense, shared drive": _Case(shape=_DENSE, rows=1, throttle=_SHARED, dram=190 << 20),
    "experts, DRAM": _Case(shape=_MOE, rows=1),
    "experts, drive": _Case(shape=_MOE, rows=8, throttle=_SLOW, dram=52 << 20),
    "experts, drive, lazy": _Case(
        shape=_MOE, rows=1, throttle=_SLOW, dram=52 << 20, moe=MoeConfig(idle="lazy")
    ),
}


def _config(case: _Case, folder: str, nvme_dir: str | None) -> RunConfig:
    shape = architecture(case.shape.name, case.shape.layers) | {"hidden_size": case.shape.hidden}
    if "moe_intermediate_size" in shape:
        shape |= {"moe_intermediate_size": case.shape.hidden}
    else:
        shape |= {"intermediate_size": 4 * case.shape.hidden}
    Path(folder, "config.json").write_text(json.dumps(shape))
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(config=folder, dtype="float32"),
        data=DataConfig(files=["random tokens"], seq_len=_SEQ_LEN),
        optimizer=case.setting.optimizer(OptimizerConfig()),
        tiers=TiersConfig(
            nvme_dirs=None if nvme_dir is None else [nvme_dir],
            dram=None if case.dram is None else ByteSize(case.dram),
            throttle=case.throttle or ThrottleConfig(),
            backend="posix",
            **case.tiers,
        ),
        moe=case.moe,
        train=TrainConfig(rows_per_step=case.rows),
    )


@contextmanager
def _bench(config: RunConfig, setting: Setting) -> Iterator[TieredBench]:
    known = known_drives(config.tiers, load_profile(config.tiers))
    batch = random_batch(1000, config.train.rows_per_step, config.data.seq_len, "cpu")
    with TieredBench(config, [setting], known, batch) as bench:
        yield bench


def _alone(case: _Case, steps: int) -> Known:
    """Times of the device, with all state in DRAM and nothing to update beside it."""
    spans = list[Span]()
    with TemporaryDirectory() as folder:
        plain = replace(case, throttle=None, dram=None, tiers={}, moe=MoeConfig())
        with _bench(_config(plain, folder, None), _DEFERRED) as bench:
            for step in range(_WARM_UP + steps):
                bench.cases[0].runtime.flush()
                found = bench.record(bench.cases[0], 1)
                spans += found if step >= _WARM_UP else []
    return times_of_trace(spans)


def _run(case: _Case, directory: str, steps: int, timed: Known) -> dict[str, float | int]:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        nvme = None if case.throttle is None else stack.enter_context(ScratchFolder(directory)).path
        config = _config(case, folder, nvme)
        with _bench(config, case.setting) as bench:
            runtime = bench.cases[0].runtime
            for _ in range(_WARM_UP):
                bench.step(bench.cases[0])
            before = runtime.traffic()
            spans = bench.record(bench.cases[0], steps)
            moved = runtime.traffic().since(before)
            used = [sorted(tokens) for tokens in runtime.expert_tokens()]
        machine = Machine.here(config)
        planned = case_of(config, machine)
        measured_s = statistics.median(s.end_s - s.begin_s for s in spans if s.track is Track.STEPS)
        foreseen = simulate(planned, machine, times=timed, experts=lambda step, layer: used[layer])
        modelled = simulate(planned, machine, experts=lambda step, layer: used[layer])
    return {
        "measured_s": measured_s,
        "timed_s": foreseen.step_s,
        "modelled_s": modelled.step_s,
        "read": moved.bytes_read["nvme"] // steps,
        "read_foreseen": foreseen.nbytes["nvme read"],
        "written": moved.bytes_written["nvme"] // steps,
        "written_foreseen": foreseen.nbytes["nvme write"],
    }


def _shown(name: str, rounds: list[dict[str, float | int]]) -> str:
    row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    ratios = {
        which: statistics.median(each[f"{which}_s"] / each["measured_s"] for each in rounds)
        for which in ("timed", "modelled")
    }
    moved = (
        f"{what} {row[what] / 1e6:.1f} MB, foreseen {row[f'{what}_foreseen'] / 1e6:.1f}"
        for what in ("read", "written")
    )
    return (
        f"{name:28} measured {row['measured_s']:.3f} s, timed {row['timed_s']:.3f} s "
        f"({ratios['timed']:.2f}), modelled {row['modelled_s']:.3f} s ({ratios['modelled']:.2f}); "
        f"{'; '.join(moved)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps foreseen, beside steps measured.")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(_CASES), default=list(_CASES))
    args = parser.parse_args()
    found: dict[str, list[dict[str, float | int]]] = {name: [] for name in args.only}
    for _ in range(args.rounds):
        for name in args.only:
            case = _CASES[name]
            alone = _alone(case, args.steps)  # anew: what others leave of the machine changes
            found[name].append(_run(case, args.dir, args.steps, alone))
            print(_shown(name, found[name][-1:]), flush=True)
    for name, rounds in found.items():
        print(_shown(name, rounds))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
