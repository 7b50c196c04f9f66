"""What recording a trace costs: steps with and without one, of the same training, in turn.

    python benchmarks/trace_cost.py [--device cuda] [--shape tiny] [--layers 4] [--rows 8] [--seq-len 1024]
        [--steps 10] [--rounds 10] [--nvme-dir DIR --dram 8GiB]

Every round runs some steps of both kinds, in random order; medians, and the median of the ratios of a round.
The end of a trace waits for all lanes, once for its steps. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import openmp  # noqa: F401

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.measure.machine import known_drives, load_profile
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.plan import TiersConfig
from tierstream.io.measure import Case, measure, timed
from tierstream.io.scratch import ScratchFolder


def run_config(args: argparse.Namespace, folder: str, nvme_dirs: list[str] | None) -> RunConfig:
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(config=folder),
        data=DataConfig(files=["random tokens"], seq_len=args.seq_len),
        tiers=TiersConfig(nvme_dirs=nvme_dirs, dram=args.dram),
        train=TrainConfig(rows_per_step=args.rows, device=args.device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording a trace costs.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nvme-dir")
    parser.add_argument("--dram", type=ByteSize)
    args = parser.parse_args()
    shape, events = architecture(args.shape, args.layers), list[int]()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        Path(folder, "config.json").write_text(json.dumps(shape))
        dirs = [stack.enter_context(ScratchFolder(args.nvme_dir)).path] if args.nvme_dir else None
        config = run_config(args, folder, dirs)
        batch = random_batch(shape["vocab_size"], args.rows, args.seq_len, args.device)
        known = known_drives(config.tiers, load_profile(config.tiers))
        bench = stack.enter_context(TieredBench(config, [Setting(clip_norm=1.0)], known, batch))
        (case,) = bench.cases
        bench.run(case, 2)
        tokens = args.steps * case.plan.tokens_per_step
        off = Case({"trace": "off"}, "tokens", lambda: bench.run(case, args.steps))
        on = Case(
            {"trace": "on"},
            "tokens",
            lambda: timed(tokens, lambda: events.append(len(bench.record(case, args.steps)))),
        )
        plain, traced = measure([off, on], rounds=args.rounds)
    ratios = [a / b for a, b in zip(plain.rates, traced.rates, strict=True)]
    cost = {
        "ms_per_step_off": 1e3 * case.plan.tokens_per_step / plain.median,
        "ms_per_step_on": 1e3 * case.plan.tokens_per_step / traced.median,
        "cost_percent": 100 * (statistics.median(ratios) - 1),
        "quartiles_percent": [100 * (q - 1) for q in statistics.quantiles(ratios)[::2]],
        "events_per_step": statistics.median(events) / args.steps,
    }
    print(
        f"without a trace {cost['ms_per_step_off']:.2f} ms a step, with one {cost['ms_per_step_on']:.2f} ms"
    )
    print(f"median of {args.rounds} rounds: {cost['cost_percent']:+.2f} %")
    print(json.dumps(vars(args) | cost))


if __name__ == "__main__":
    main()
