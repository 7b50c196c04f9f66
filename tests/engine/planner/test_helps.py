"""What is said to help does so when it is done as it is said, and by as much."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import make_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.planner import outlook as outlook_module
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.outlook import Ahead, Help, Outlook, look_ahead
from tierstream.engine.planner.what_if import changed

WORKSTATION = Machine.from_profile(machine_file("workstation"))
GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """On a drive, with too little DRAM for all of its state."""
    return changed(
        make_run(tmp_path, steps=1),
        {"train.device": "cuda", "tiers.nvme_dirs": ["/mnt/nvme0"], "tiers.dram": ByteSize("512 KiB"),
         "checkpoint.copy_memory": ByteSize("64 KiB")},
    )  # fmt: skip


def gain(after: Outlook, before: Outlook) -> float:
    return after.tokens_per_s / before.tokens_per_s - 1


def told(outlook: Outlook, begin: str) -> Help:
    (found,) = (each for each in outlook.helps if each.change.startswith(begin))
    return found


def slow_drive() -> Machine:
    drives = (replace(WORKSTATION.drives[0], read=5e7, write=5e7, read_mixed=2.5e7, write_mixed=2.5e7),)
    return replace(WORKSTATION, drives=drives)


def test_a_gigabyte_that_all_of_the_state_fits_into_gives_all_that_there_is(config: RunConfig) -> None:
    """It is not the share of a GiB in what more of them give."""
    before, larger = (
        look_ahead(config, slow_drive()).outlook,
        changed(config, {"tiers.dram": ByteSize("2 GiB")}),
    )
    after = look_ahead(larger, slow_drive(), compare=False).outlook
    assert gain(after, before) > 0.1
    assert told(before, "+1 GiB of DRAM").gain == pytest.approx(gain(after, before))


def test_a_gigabyte_of_many_gives_what_that_one_gives(tmp_path: Path, config: RunConfig) -> None:
    """A later one, with which nothing moves any more, gives more or less."""
    model = tmp_path / "wide"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(architecture("qwen2.5-1.5b", 2)))
    page = ByteSize("6 MiB")  # so few pages that what is compared is the run itself
    wide = changed(config, {"model.config": str(model), "tiers.page": page, "tiers.dram": ByteSize("2 GiB")})
    before = look_ahead(wide, slow_drive()).outlook
    after = look_ahead(changed(wide, {"tiers.dram": ByteSize("3 GiB")}), slow_drive(), compare=False).outlook
    assert sum(before.planes["nvme"].values()) > 3 * GIB
    assert gain(after, before) > 0.1
    assert told(before, "+1 GiB of DRAM").gain == pytest.approx(gain(after, before))


def test_what_no_step_depends_on_is_not_simulated(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAM holds everything."""
    calls, foresee = list[int](), outlook_module.foresee
    monkeypatch.setattr(outlook_module, "foresee", lambda *args: calls.append(1) or foresee(*args))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    full = changed(config, {"tiers.dram": ByteSize("1 GiB")})
    found = look_ahead(full, slow_drive()).outlook
    assert told(found, "+1 GiB of DRAM").gain == 0.0
    assert told(found, "+1 GiB of DRAM").step_s == pytest.approx(found.step_s)
    assert len(found.helps) == 4
    assert len(calls) == 4


def test_memory_that_the_gpu_has_is_told_as_a_budget_that_may_grow(config: RunConfig) -> None:
    before = look_ahead(config, WORKSTATION).outlook
    found = told(before, "tiers.gpu: ")
    match = re.fullmatch(r"tiers\.gpu: (.+) \(\+8 GiB, which the GPU has\)", found.change)
    assert match
    raised = changed(config, {"tiers.gpu": ByteSize(match[1])})
    after = look_ahead(raised, WORKSTATION, compare=False).outlook
    assert found.gain == pytest.approx(gain(after, before))
    # Of 3 GiB and a bit, of which it needs some, three are left.
    small = replace(WORKSTATION, gpu_bytes=3 * GIB + GIB // 2)
    found = told(look_ahead(config, small).outlook, "tiers.gpu: ")
    assert found.change == "tiers.gpu: 3200 MiB (+3 GiB, which the GPU has)"
    assert look_ahead(changed(config, {"tiers.gpu": ByteSize("3200 MiB")}), small, compare=False)


def test_a_gpu_that_has_nothing_left_is_told_as_a_larger_one(config: RunConfig) -> None:
    before = look_ahead(config, replace(WORKSTATION, gpu_bytes=GIB)).outlook
    assert told(before, "a GPU").change == "a GPU with 9.00 GiB, tiers.gpu: 8320 MiB"


def test_what_a_step_comes_to_is_shown_before_it_is_known_what_would_help(config: RunConfig) -> None:
    shown = list[Ahead]()
    ahead = look_ahead(config, slow_drive(), show=shown.append)
    (first,) = shown
    assert ahead.outlook.helps
    assert not first.outlook.helps
    assert replace(first.outlook, helps=ahead.outlook.helps) == ahead.outlook
    assert first.forecast is ahead.forecast
    assert look_ahead(config, slow_drive(), compare=False).outlook == first.outlook
