"""What a checkpoint costs the training beside which it is written: cycles of steps with one and without one,
in turn.

    python benchmarks/checkpoint_cost.py [--device cuda] [--shape qwen2.5-1.5b --layers 4 | --config FILE]
        [--rows 8] [--seq-len 1024] [--cycle 4] [--rounds 6] [--copy-memory SIZE]
        [--nvme-dir DIR --dram 8GiB] [--run-dir DIR]

A cycle begins with a checkpoint or without; its wall-clock time takes in what is done between steps: with a
checkpoint the update, which else hides in the next forward. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import openmp  # noqa: F401

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.metrics import PlanReport, StepMetrics
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.plan import TiersConfig
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io.scratch import ScratchFolder

VOCABULARY = 512
#: Steps before the first cycle.
WARM_UP = 3


class Cycles(Callback):
    """Asks for a checkpoint at the begin of every second cycle, and takes the times."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: list[float] = []
        self._begins: list[float] = []
        self.written_s: list[float] = []
        self.parameters = 0

    def on_plan(self, plan: PlanReport) -> None:
        self.parameters = plan.parameters

    def on_step(self, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        self._ends.append(now)
        self._begins.append(now - metrics.step_s)
        if (metrics.step - WARM_UP) % (2 * self._steps) == 0:
            self.control.save()

    def on_event(self, text: str) -> None:
        if found := re.fullmatch(r"checkpoint .* \(([\d.]+) s\)", text):
            self.written_s.append(float(found[1]))

    def cycles(self, *, saved: bool) -> list[list[float]]:
        """Seconds of each cycle, and of each of its steps."""
        first = WARM_UP - 1 + (0 if saved else self._steps)
        result = []
        for start in range(first, len(self._ends) - self._steps, 2 * self._steps):
            steps = range(start + 1, start + 1 + self._steps)
            whole = self._ends[start + self._steps] - self._ends[start]
            result.append([whole, *(self._ends[step] - self._begins[step] for step in steps)])
        return result


def medians(cycles: list[list[float]]) -> list[float]:
    return [round(statistics.median(column), 3) for column in zip(*cycles, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs the training beside it.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--config", type=Path, help="config.json of another architecture")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--cycle", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--copy-memory", type=ByteSize)
    parser.add_argument("--nvme-dir")
    parser.add_argument("--dram", type=ByteSize)
    parser.add_argument("--run-dir")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(dir=args.run_dir))
        dirs = [stack.enter_context(ScratchFolder(args.nvme_dir)).path] if args.nvme_dir else None
        shape = json.dumps(architecture(args.shape, args.layers)) if args.config is None else None
        Path(folder, "config.json").write_text(shape or args.config.read_text())
        words = random.Random(0).choices(["tier", "page", "plane", "unit", "step", "lane"], k=200_000)
        Path(folder, "corpus.txt").write_text(" ".join(words))
        config = RunConfig(
            run_dir=f"{folder}/run",
            model=ModelConfig(config=folder),
            data=DataConfig(files=[f"{folder}/corpus.txt"], vocab_size=VOCABULARY, seq_len=args.seq_len),
            tiers=TiersConfig(nvme_dirs=dirs, dram=args.dram),
            train=TrainConfig(
                steps=WARM_UP + 2 * args.cycle * args.rounds, rows_per_step=args.rows, device=args.device
            ),
            # Steps that never come: memory for copies is planned, and who asks is the callback.
            checkpoint=CheckpointConfig(
                every_steps=1 << 40, keep=1, at_end=False, copy_memory=args.copy_memory
            ),
        )
        cycles = Cycles(args.cycle)
        Trainer(config, [cycles]).run()
    saved, unsaved = medians(cycles.cycles(saved=True)), medians(cycles.cycles(saved=False))
    for name, values in (("with a checkpoint", saved), ("without", unsaved)):
        print(f"{name:18} {values[0]:8.3f} s a cycle; its steps {' '.join(f'{s:.3f}' for s in values[1:])} s")
    nbytes = 12 * cycles.parameters
    result = {
        "state_bytes": nbytes,
        "written_s": statistics.median(cycles.written_s),
        "with": saved,
        "without": unsaved,
        "added_s": round(saved[0] - unsaved[0], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
