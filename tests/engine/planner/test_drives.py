"""Drives of a machine that is planned for: each carries what it can, and is the one that the run names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import make_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.outlook import Outlook, look_ahead
from tierstream.engine.planner.what_if import changed


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The workstation with a second drive, a third as fast."""
    profile = json.loads(machine_file("workstation").read_text())
    (first,) = profile["drives"]
    slow = {rate: first[rate] / 3 for rate in ("read", "write", "mixed")}
    profile["drives"] = [first, {**first, **slow, "directory": "/mnt/nvme1", "device": "8:1"}]
    (tmp_path / "two.json").write_text(json.dumps(profile))
    return Machine.from_profile(tmp_path / "two.json")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return changed(
        make_run(tmp_path),
        {"train.device": "cuda", "tiers.dram": ByteSize("512 KiB"), "tiers.page": ByteSize(4096),
         "train.rows_per_chunk": None},
    )  # fmt: skip


def planned(config: RunConfig, machine: Machine, *directories: str) -> Outlook:
    named = changed(config, {"tiers.nvme_dirs": list(directories)})
    return look_ahead(named, machine, compare=False).outlook


def test_a_slow_drive_beside_a_fast_one_carries_what_it_can(config: RunConfig, machine: Machine) -> None:
    """As in a run: pages are spread by what drives give, so both are done at about the same time."""
    alone, both = planned(config, machine, "/mnt/nvme0"), planned(config, machine, "/mnt/nvme0", "/mnt/nvme1")
    assert both.bound_s["nvme"] == pytest.approx(0.75 * alone.bound_s["nvme"], rel=0.01)
    assert both.busy_s["/mnt/nvme1"] == pytest.approx(both.busy_s["/mnt/nvme0"], rel=0.2)


def test_a_run_is_planned_for_the_drives_that_it_names(config: RunConfig, machine: Machine) -> None:
    fast, slow = planned(config, machine, "/mnt/nvme0"), planned(config, machine, "/mnt/nvme1/runs")
    assert slow.bound_s["nvme"] == pytest.approx(3 * fast.bound_s["nvme"])
    assert "/mnt/nvme1" in slow.busy_s
    swapped = planned(config, machine, "/mnt/nvme1", "/mnt/nvme0")
    assert swapped.bound_s == pytest.approx(planned(config, machine, "/mnt/nvme0", "/mnt/nvme1").bound_s)
    # Names that it does not know stand for its first drives, and so do two on one of them.
    assert machine.drives_of(["/data"]) == machine.drives[:1]
    assert machine.drives_of(["/mnt/nvme1/a", "/mnt/nvme1/b"]) == machine.drives
