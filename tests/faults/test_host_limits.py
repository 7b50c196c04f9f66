"""Runs where the host gives less than it seems to: limits of containers, memory that cannot be pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command import use_drive
from support.runs import final_planes, make_run, train

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.metrics import PlanReport
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io import memory

MIB = 1 << 20
#: 10 MB of state.
WIDE = 2000
GROUP = "sys/fs/cgroup/app.slice/run.scope"


class Plans(Callback):
    def __init__(self) -> None:
        self.dram_bytes = 0

    def on_plan(self, plan: PlanReport) -> None:
        self.dram_bytes = next(tier.used_bytes for tier in plan.tiers if tier.tier == "dram")


def container(root: Path, limits: dict[str, int]) -> None:
    """A root directory of a host of 24 GiB, on which cgroups of version 2 set these limits."""
    files = {
        "proc/meminfo": f"MemTotal: {24 * MIB} kB\nMemAvailable: {20 * MIB} kB\n",
        "proc/self/cgroup": "0::/app.slice/run.scope\n",
        "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }
    for group in (GROUP, str(Path(GROUP).parent)):
        files[f"{group}/memory.current"] = f"{3 * MIB}\n"
        files[f"{group}/memory.stat"] = f"inactive_file {MIB}\n"
        for name in ("max", "high"):
            limit = limits.get(f"{group}/memory.{name}", "max")
            files[f"{group}/memory.{name}"] = f"{limit}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def run(folder: Path) -> RunConfig:
    """With more state than memory where a test limits it."""
    config = make_run(folder, steps=2, intermediate_size=WIDE)
    use_drive(config, folder / "state")
    config.tiers.page, config.tiers.dram = ByteSize(65536), None
    return config


@pytest.fixture(scope="module")
def free_planes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Planes after the last step of the run that nothing limits."""
    config = run(tmp_path_factory.mktemp("free"))
    train(config)
    return final_planes(config)


def check_equal(config: RunConfig, expected: dict[tuple[str, str], Any]) -> None:
    ours = final_planes(config)
    assert ours.keys() == expected.keys()
    assert [key for key in ours if ours[key].tobytes() != expected[key].tobytes()] == []


@pytest.mark.parametrize(
    "file",
    [f"{GROUP}/memory.max", "sys/fs/cgroup/app.slice/memory.max", f"{GROUP}/memory.high"],
    ids=["own", "parent", "high"],
)
def test_the_automatic_budget_keeps_a_container_s_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_planes: dict[tuple[str, str], Any], file: str
) -> None:
    """C81: the least of host and all groups, minus use. The run passes, and its results are the same."""
    limit_bytes = 14 * MIB
    container(tmp_path / "root", {file: limit_bytes})
    limits = memory.memory_budget(tmp_path / "root")
    assert limits.available_bytes == 12 * MIB
    monkeypatch.setattr(memory, "memory_budget", lambda: limits)
    config, plans = run(tmp_path), Plans()
    Trainer(config, [plans]).run()
    assert 2 * MIB < plans.dram_bytes < 12 * MIB
    state_bytes = sum(plane.nbytes for plane in free_planes.values())
    assert plans.dram_bytes < state_bytes, "all of it has found room"
    check_equal(config, free_planes)


@pytest.mark.parametrize("most_bytes", [MIB, 0], ids=["chunks", "pageable"])
def test_memory_that_is_pinned_in_small_pieces_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_planes: dict[tuple[str, str], Any], most_bytes: int
) -> None:
    """C83: registration of more than so many bytes fails; a sixty-fourth of what a real limit was."""
    pinned: dict[int, int] = {}
    refused: list[int] = []

    def register(address: int, nbytes: int) -> None:
        if nbytes > most_bytes:
            refused.append(nbytes)
            raise OSError("invalid argument")
        pinned[address] = nbytes

    peak = 0

    def unregister(address: int) -> None:
        nonlocal peak
        peak = max(peak, len(pinned))
        del pinned[address]

    monkeypatch.setattr(Device, "pinning", lambda self: (register, unregister))
    config = run(tmp_path)
    train(config)
    assert refused
    assert (peak > 2) == (most_bytes > 0)
    assert not pinned, "what was registered is given back"
    check_equal(config, free_planes)
