"""What is said to make a run fit does so when it is done as it is said, and nothing larger is asked for than
that takes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import make_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.outlook import look_ahead
from tierstream.engine.planner.what_if import Setting, changed, what_if
from tierstream.io.errors import BudgetError
from tierstream.io.throttle import Limits

SERVER = Machine.from_profile(machine_file("server"))
MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return changed(
        make_run(tmp_path, steps=1), {"train.device": "cuda", "checkpoint.copy_memory": ByteSize("64 KiB")}
    )


def remedies(config: RunConfig, machine: Machine) -> list[str]:
    with pytest.raises(BudgetError) as caught:
        look_ahead(config, machine)
    return [line.strip() for line in str(caught.value).splitlines()[2:]]


def done(remedy: str, config: RunConfig, machine: Machine) -> tuple[RunConfig, Machine]:
    """What the user does who reads it: other hardware, other values in the run file, and nothing else."""
    if found := re.search(r"a GPU with ([\d.]+ \w+)", remedy):
        machine = replace(machine, gpu_bytes=int(ByteSize(found[1])))
    if found := re.search(r"([\d.]+ \w+) of host memory", remedy):
        machine = replace(machine, host_bytes=int(ByteSize(found[1])))
    if found := re.search(r"([\w.]+\.\w+): (.+)$", remedy):
        values: dict[str, Any] = {"null": None, "bfloat16": "bfloat16", "dram": "dram"}
        value = values[found[2]] if found[2] in values else ByteSize(found[2])
        config = changed(config, {found[1]: int(found[2]) if "rows" in found[1] else value})
    return config, machine


@pytest.mark.parametrize(
    ("budgets", "host", "gpu"),
    [
        ({"tiers.dram": ByteSize("64 KiB")}, 64 * MIB, 1 << 34),
        ({"tiers.gpu": ByteSize("64 KiB")}, 1 << 34, 2 << 30),
        ({"tiers.gpu": ByteSize("500 KiB"), "tiers.resident": 2}, 1 << 34, 2 << 30),
        ({"tiers.page": ByteSize("1 GiB")}, 1 << 34, 1 << 34),
    ],
)
def test_every_remedy_does_when_it_is_done(
    config: RunConfig, budgets: dict[str, Any], host: int, gpu: int
) -> None:
    config, machine = changed(config, budgets), replace(SERVER, host_bytes=host, gpu_bytes=gpu)
    found = remedies(config, machine)
    assert found
    for remedy in found:
        assert look_ahead(*done(remedy, config, machine), compare=False), remedy


def test_the_setting_that_is_wrong_is_the_first_remedy(config: RunConfig) -> None:
    small = replace(SERVER, gpu_bytes=1 << 30)
    assert remedies(changed(config, {"tiers.page": ByteSize("1 TiB")}), small)[0] == "tiers.page: null"


def test_drives_that_are_thought_of_bound_the_step_as_those_that_are_there(config: RunConfig) -> None:
    """Where the run's own drives were measured together, a second one halves what they take."""
    config = changed(config, {"tiers.nvme_dirs": ["/mnt/nvme0"], "tiers.dram": ByteSize("512 KiB")})
    rates = replace(
        SERVER.rates, nvme_read=1e6, nvme_write=1e6, nvme_read_mixed=5e5, nvme_write_mixed=5e5
    )
    slow = tuple(
        replace(drive, read=1e6, write=1e6, read_mixed=5e5, write_mixed=5e5) for drive in SERVER.drives[:1]
    )
    machine = replace(SERVER, drives=slow, rates=rates)
    one, two = (
        look_ahead(setting.config, setting.machine, compare=False).outlook
        for setting in (Setting(config, machine), what_if(Setting(config, machine), "drives=2"))
    )
    assert two.bound_s["nvme"] == pytest.approx(one.bound_s["nvme"] / 2)
    assert max(two.bound_s.values()) <= two.step_s


def test_the_drives_of_a_profile_are_throttled_too() -> None:
    (plain, *_), (slow, *_) = (
        Machine.from_profile(machine_file("server"), limits=limits).drives
        for limits in (None, Limits(read=2e8, total=3e8, latency_s=0.001))
    )
    assert (slow.read, slow.write, slow.latency_s) == (2e8, 3e8, 0.001)
    assert slow.read_mixed + slow.write_mixed == pytest.approx(3e8)
    fast = Machine.from_profile(machine_file("server"), limits=Limits(read=1e15)).drives[0]
    assert (fast.read, fast.write) == (plain.read, plain.write)
    assert fast.read_mixed + fast.write_mixed == pytest.approx(plain.read_mixed + plain.write_mixed)
