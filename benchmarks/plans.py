"""The chosen plan of a small model on a drive that `tiers.throttle` makes slow, against plans at random.

    python benchmarks/plans.py [--dir DIRECTORY] [--plans 30] [--rounds 3] [--seed 0]

Steps of all plans take turns, so that what others do to the machine falls on all of them; then the chosen
plan and the fastest of the others do so again, and what that gives is compared. Ends with one line of JSON:
medians, forecasts, and the correlation of their ranks (Spearman).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import openmp  # noqa: F401

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.measure.machine import known_drives, load_profile
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.plan import ThrottleConfig, TiersConfig
from tierstream.engine.planner.case import case_of, plan_for, units_of
from tierstream.engine.planner.choose import choose
from tierstream.engine.planner.grid import Values, with_values
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import simulate
from tierstream.io.errors import BudgetError
from tierstream.io.scratch import ScratchFolder

_SEQ_LEN, _ROWS, _WARM_UP = 64, 4, 2
#: The fastest of many in a few rounds is partly a lucky one: so many of them meet the chosen plan again.
_FINALISTS, _FINAL_ROUNDS = 4, 15
_SHOWN = ("activations", "resident", "policy", "prefetch", "writeback")


def _config(folder: str, drive: str) -> RunConfig:
    shape = architecture("tiny", 6) | {"hidden_size": 128, "intermediate_size": 512}
    Path(folder, "config.json").write_text(json.dumps(shape))
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(config=folder, dtype="float32"),
        data=DataConfig(files=["random tokens"], seq_len=_SEQ_LEN),
        tiers=TiersConfig(
            gpu=ByteSize("16MiB"),
            dram=ByteSize("12MiB"),
            nvme_dirs=[drive],
            page=ByteSize("64KiB"),
            throttle=ThrottleConfig(read=ByteSize("10MiB"), write=ByteSize("8MiB")),
            backend="posix",
        ),
        train=TrainConfig(rows_per_step=_ROWS),
    )


def _drawn(config: RunConfig, machine: Machine, numbers: random.Random) -> Values:
    """A plan that fits, of all that could be, not only of the planner's grid."""
    units, _ = units_of(config)
    assert config.tiers.gpu is not None
    assert config.tiers.dram is not None
    while True:
        values: dict[str, Any] = {
            "tiers.activations": numbers.choice(["dram", "gpu"]),
            "tiers.resident": numbers.randrange(len(units.without_experts) + 1),
            "tiers.policy": numbers.choice(["lookahead", "lru"]),
            "tiers.prefetch": ByteSize(int(config.tiers.dram * numbers.uniform(0, 0.5))),
            "tiers.writeback": ByteSize(int(config.tiers.dram * numbers.uniform(0.02, 0.25))),
        }
        if values["tiers.activations"] == "gpu":
            boundary = 4 * _ROWS * _SEQ_LEN * units.anatomy.boundary_width
            values["tiers.gpu"] = ByteSize(config.tiers.gpu - boundary * len(units.layers))
        try:
            plan_for(with_values(config, values), machine, units)
        except BudgetError:
            continue
        return values


def _opened(configs: Sequence[RunConfig], drive: str, stack: ExitStack) -> list[TieredBench]:
    """A training of each, with files of its own."""
    benches = []
    for index, config in enumerate(configs):
        own = Path(drive, str(index))
        own.mkdir()
        placed = with_values(config, {"tiers.nvme_dirs": [str(own)]})
        setting = Setting(gpu=config.tiers.gpu, clip_norm=1.0, placement=config.optimizer.placement)
        known = known_drives(placed.tiers, load_profile(placed.tiers))
        batch = random_batch(1000, _ROWS, _SEQ_LEN, "cpu")
        benches.append(stack.enter_context(TieredBench(placed, [setting], known, batch)))
    return benches


def _turns(benches: Sequence[TieredBench], rounds: int, numbers: random.Random) -> list[float]:
    """Median seconds of a step of each; in another order in each round."""
    found: list[list[float]] = [[] for _ in benches]
    for _ in range(rounds):
        for index in numbers.sample(range(len(benches)), len(benches)):
            bench = benches[index]
            for _ in range(_WARM_UP):  # what the others did to the caches of the CPU
                bench.step(bench.cases[0])
            begin_s = perf_counter()
            bench.step(bench.cases[0])
            found[index].append(perf_counter() - begin_s)
    return [statistics.median(times) for times in found]


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(index) for index in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description="The chosen plan against plans at random.")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as folder, ScratchFolder(args.dir) as scratch:
        config = _config(folder, str(scratch.path))
        machine = Machine.here(config)
        choice = choose(config, machine)
        print(choice.describe(), flush=True)
        numbers = random.Random(args.seed)
        drawn = [_drawn(config, machine, numbers) for _ in range(args.plans)]
        plans = [choice.values, *drawn]
        configs = [with_values(config, values) for values in plans]
        foreseen = [simulate(case_of(each, machine), machine).step_s for each in configs]
        with ExitStack() as stack:
            benches = _opened(configs, str(scratch.path), stack)
            measured = _turns(benches, args.rounds, numbers)
            fastest = sorted(range(1, len(plans)), key=measured.__getitem__)[:_FINALISTS]
            finalists = [0, *fastest]
            final = _turns([benches[index] for index in finalists], _FINAL_ROUNDS, numbers)
    for index, (values, foreseen_s, measured_s) in enumerate(zip(plans, foreseen, measured, strict=True)):
        shown = ", ".join(f"{key} {values[f'tiers.{key}']}" for key in _SHOWN)
        who = "chosen" if index == 0 else f"random {index}"
        print(f"{who:10} measured {measured_s:.3f} s, foreseen {foreseen_s:.3f} s: {shown}")
    print(
        json.dumps({
            "chosen_s": final[0],
            "best_random_s": min(final[1:]),
            "final_s": dict(zip(finalists, final, strict=True)),
            "median_random_s": statistics.median(measured[1:]),
            "spearman": statistics.correlation(_ranks(foreseen), _ranks(measured)),
            "measured_s": measured,
            "foreseen_s": foreseen,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
