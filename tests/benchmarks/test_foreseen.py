"""What the planner foresees, beside results that were measured on an H200."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.update.optimizer import OptimizerConfig

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measurements"
_spec = importlib.util.spec_from_file_location("foreseen", ROOT / "benchmarks" / "foreseen.py")
assert _spec is not None
assert _spec.loader is not None
foreseen = importlib.util.module_from_spec(_spec)
sys.modules["foreseen"] = foreseen  # its dataclasses look for their module
_spec.loader.exec_module(foreseen)


#: Beside each other, with a profile of their machine.
TOGETHER = ("1.5b-nvme", "1.5b-plain", "3b-12-layers", "3b-long", "gpt-oss-20b-4-layers", "olmoe-4-layers")


def test_steps_and_memory_are_those_that_were_measured() -> None:
    profile = MEASURED / "2026-12-01-h200-cold-profile.json"
    machine = Machine.from_profile(profile, OptimizerConfig().threads_of)
    rows = list[Any]()
    for name in TOGETHER:
        result = json.loads((MEASURED / f"2026-12-01-h200-cold-{name}.json").read_text())
        rows += foreseen.compared(result, name, machine)
    apart = {row.run: abs(row.ratio - 1) for row in rows}
    assert len(apart) == 11
    assert sum(ratio <= 0.15 for ratio in apart.values()) >= 10
    assert not {run: ratio for run, ratio in apart.items() if ratio > 0.3}
    assert not {row.run: row.memory_ratio for row in rows if not 1 <= row.memory_ratio <= 1.03}


#: The positions of one step of these runs, cosines and sines of 32 x 1024 tokens and 128 elements in bf16.
POSITIONS_BYTES = 2 * 32 * 1024 * 128 * 2


@pytest.mark.parametrize(("name", "steps"), [("7b", 6), ("3b-12gib-dram", 3)])
def test_steps_and_memory_of_older_runs(name: str, steps: int) -> None:
    """Their peaks have the positions of the steps before in them, at least of those that were measured
    (docs/log.md, "masks and positions").
    """
    machine = Machine.from_profile(machine_file("h200"), OptimizerConfig().threads_of)
    result = json.loads((MEASURED / f"2026-11-30-h200-{name}.json").read_text())
    (row,) = foreseen.compared(result, name, machine)
    assert abs(row.ratio - 1) <= 0.15
    assert 1 <= row.foreseen_bytes / (row.measured_bytes - steps * POSITIONS_BYTES) <= 1.03
