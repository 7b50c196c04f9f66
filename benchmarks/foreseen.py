"""Steps that `tierstream bench train` measured, perhaps elsewhere, beside what the planner foresees for them.

    python benchmarks/foreseen.py PROFILE RESULT...

PROFILE is of the machine (`tierstream bench --profile`), or the name of one (h200); each RESULT is a file of
`bench train --json`; the first drives of the profile stand for those of a run. Prints a table in Markdown,
and how many cases are foreseen within 15 and 30 %.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.needs import device_peak
from tierstream.engine.planner.simulate import foresee
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tools.bench.train_options import TrainBenchOptions
from tierstream.tools.options import parse_options

#: Options of the command that say nothing of our own cases.
_OTHERS = {
    "--baseline", "--check", "--json", "--peer-nvme-dir", "--profile", "--report", "--trace-steps", "--turns",
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One case: seconds of a step, and bytes at the device's peak."""

    run: str
    measured_s: float
    foreseen_s: float
    measured_bytes: int
    foreseen_bytes: int

    @property
    def ratio(self) -> float:
        """Foreseen by measured."""
        return self.foreseen_s / self.measured_s

    @property
    def memory_ratio(self) -> float:
        return self.foreseen_bytes / self.measured_bytes


def compared(result: dict[str, Any], name: str, machine: Machine) -> Iterator[Compared]:
    """Every case of a result that trains from the tiers.

    Args:
        name: of the result, for the table.
    """
    options = parse_options(TrainBenchOptions, _own(result["command"]), prog="bench train", description="")
    speed, memory = ({(r["run"], r["layers"]): r for r in result["details"][k]} for k in ("speed", "memory"))
    ours = [entry for entry in result["measurements"] if entry["run"].split(", ")[0] == "tiered"]
    for entry, (layers, config) in zip(ours, _configs(options, machine), strict=True):
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(architecture(options.shape, layers)))
            here = replace(config, model=replace(config.model, config=folder))
            case = case_of(here, machine)
            forecast = foresee(case, machine)
        key = entry["run"], entry["layers"]
        yield Compared(
            run=f"{name}: {entry['run']}",
            measured_s=speed[key]["step_s"],
            foreseen_s=forecast.step_s,
            measured_bytes=memory[key]["gpu_peak_bytes"],
            foreseen_bytes=device_peak(case).nbytes,
        )


def _own(command: Sequence[str]) -> list[str]:
    """Options of the command that say what our cases are."""
    own, skipped = list[str](), False
    for word in command[3:]:  # after `tierstream bench train`
        if word.startswith("--"):
            skipped = word in _OTHERS
        own += [] if skipped else [word]
    return own


def _configs(options: TrainBenchOptions, machine: Machine) -> Iterator[tuple[int, RunConfig]]:
    """Layers and configuration of the cases, in the order in which `bench train` has them."""
    drives = [drive.directory for drive in machine.drives][: len(options.nvme_dirs or [])]
    for layers, stream, setting in product(options.depths, options.stream, options.settings()):
        config = options.run_config("run", drives or None)
        cache = config.moe.gpu_cache if stream == "experts" else None
        own = replace(
            config,
            optimizer=setting.optimizer(config.optimizer),
            tiers=replace(config.tiers, gpu=setting.gpu),
            moe=replace(config.moe, stream=stream, gpu_cache=cache),
        )
        yield layers, own


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps measured, beside steps foreseen.")
    parser.add_argument("profile")
    parser.add_argument("results", nargs="+", type=Path)
    args = parser.parse_args()
    gc.disable()  # as `tierstream plan` does
    machine = Machine.from_profile(machine_file(args.profile), OptimizerConfig().threads_of)
    print("| run | measured, s | foreseen, s | ratio | GPU peak, GiB | foreseen | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = list[Compared]()
    for path in args.results:
        for row in compared(json.loads(path.read_text()), path.stem, machine):
            found.append(row)
            sizes = (f"{size / 2**30:.2f}" for size in (row.measured_bytes, row.foreseen_bytes))
            steps = f"{row.measured_s:.3f} | {row.foreseen_s:.3f} | {row.ratio:.2f}"
            print(f"| {row.run} | {steps} | {' | '.join(sizes)} | {row.memory_ratio:.3f} |", flush=True)
    for part in (0.15, 0.30):
        count = sum(abs(row.ratio - 1) <= part for row in found)
        print(f"within {part:.0%}: {count} of {len(found)}")


if __name__ == "__main__":
    main()
