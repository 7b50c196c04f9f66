"""What the planner foresees, beside results that were measured on an H200."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

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


@pytest.mark.parametrize("name", ["7b", "3b-12gib-dram"])
def test_steps_and_memory_are_those_that_were_measured(name: str) -> None:
    machine = Machine.from_profile(machine_file("h200"), OptimizerConfig().threads_of)
    result = json.loads((MEASURED / f"2026-11-30-h200-{name}.json").read_text())
    (row,) = foreseen.compared(result, name, machine)
    assert abs(row.ratio - 1) <= 0.15
    assert 1 <= row.memory_ratio <= 1.03
