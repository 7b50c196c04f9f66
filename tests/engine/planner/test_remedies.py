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

from tierstream.engine import page_size
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.outlook import look_ahead
from tierstream.engine.planner.remedies import _fewer_rows
from tierstream.engine.planner.what_if import Setting, changed, what_if
from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.sizes import format_bytes
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
    if remedy.startswith("a drive, named"):
        machine = replace(machine, drives=SERVER.drives[:1])
        config = changed(config, {"tiers.nvme_dirs": ["/mnt/nvme0"]})
    for key, text in re.findall(r"([\w.]+\.\w+): (.+?)(?:, and |$)", remedy):
        values: dict[str, Any] = {
            "null": None, "bfloat16": "bfloat16", "dram": "dram", "[/mnt/nvme0]": ["/mnt/nvme0"]
        }  # fmt: skip
        value = values[text] if text in values else ByteSize(text)
        config = changed(config, {key: int(text) if "rows" in key else value})
    return config, machine


def test_fewer_rows_are_told_with_those_of_a_chunk_where_these_were_more(config: RunConfig) -> None:
    config = changed(config, {"train.rows_per_step": 8, "train.rows_per_chunk": 4})
    least = _fewer_rows(Setting(config, SERVER))
    told = [(what, done(what, config, SERVER)[0]) for what, _ in least]
    assert [what for what, _ in told] == [
        "train.rows_per_step: 4",
        "train.rows_per_chunk: 2, and train.rows_per_step: 2",
        "train.rows_per_chunk: 1, and train.rows_per_step: 1",
    ]
    assert [after.train.rows_per_step for _, after in told] == [4, 2, 1]


@pytest.mark.parametrize(
    ("budgets", "host", "gpu"),
    [
        ({"tiers.dram": ByteSize("64 KiB")}, 64 * MIB, 1 << 34),
        ({"tiers.gpu": ByteSize("64 KiB")}, 1 << 34, 2 << 30),
        ({"tiers.gpu": ByteSize("500 KiB"), "tiers.resident": 2}, 1 << 34, 2 << 30),
        ({"tiers.gpu": ByteSize("64 KiB"), "tiers.resident": 2}, 1 << 34, 2 << 30),
        ({"tiers.page": ByteSize("1 GiB")}, 1 << 34, 1 << 34),
        ({"tiers.dram": ByteSize("1 TiB")}, 1 << 20, 1 << 34),
        ({"tiers.dram": ByteSize("1 TiB"), "tiers.nvme_dirs": ["/mnt/nvme0"]}, 1 << 20, 1 << 34),
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


def test_a_budget_of_the_gpu_that_is_too_small_is_answered_with_the_least(
    config: RunConfig,
) -> None:
    config = changed(config, {"tiers.gpu": ByteSize("64 KiB")})
    key, value = remedies(config, SERVER)[0].split(": ")
    assert key == "tiers.gpu"
    assert look_ahead(changed(config, {key: ByteSize(value)}), SERVER, compare=False)
    with pytest.raises(BudgetError):
        look_ahead(changed(config, {key: ByteSize(ByteSize(value) - MIB)}), SERVER)


def test_pages_that_are_too_small_are_answered_with_the_least_that_do(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_size, "PAGES_MAX", 100)
    config = changed(config, {"tiers.page": ByteSize(4096)})
    first, second = remedies(config, SERVER)
    assert (first, second) == ("tiers.page: 16 KiB", "tiers.page: null")
    for remedy in (first, second):
        assert look_ahead(*done(remedy, config, SERVER), compare=False)
    said = r"^tiers\.page is 8\.00 KiB: .* raise it to 16 KiB, or leave it out"
    with pytest.raises(BudgetError, match=said):
        look_ahead(changed(config, {"tiers.page": ByteSize("8 KiB")}), SERVER)


@pytest.mark.parametrize(
    ("drives", "said"),
    [
        (None, "only 1.00 MiB of host memory are free (least of machine and cgroup limits, minus use); put "
         "it on drives in tiers.nvme_dirs and lower tiers.dram"),
        (["/mnt/nvme0"], "tiers.dram is 1.00 TiB, of which the state takes {needs}, but only 1.00 MiB of "
         "host memory are free (least of machine and cgroup limits, minus use); lower tiers.dram"),
    ],
)  # fmt: skip
def test_a_budget_larger_than_the_machine_is_told_with_what_is_taken_of_it(
    config: RunConfig, drives: list[str] | None, said: str
) -> None:
    """What is missing is missing to that."""
    config = changed(config, {"tiers.dram": ByteSize("1 TiB"), "tiers.nvme_dirs": drives})
    config = changed(config, {"tiers.page": None})
    layout = case_of(config, SERVER).layout
    needs = layout.page_total * layout.page_bytes
    with pytest.raises(BudgetError) as caught:
        look_ahead(config, replace(SERVER, host_bytes=MIB))
    first, *_ = str(caught.value).splitlines()
    said = said.format(needs=format_bytes(needs))
    assert first.endswith(f"{said} ({needs - MIB:,} bytes are missing)")
    assert drives or first.startswith(f"the state needs {format_bytes(needs)} where no drive holds it, and ")


def test_without_its_drives_a_run_is_not_told_to_name_them(config: RunConfig) -> None:
    """Nor of settings for drives."""
    config = changed(
        config,
        {"tiers.nvme_dirs": ["/mnt/nvme0"], "tiers.dram": ByteSize("512 KiB"),
         "tiers.throttle.read": ByteSize("1 GB"), "tiers.require_path": "posix-direct"},
    )  # fmt: skip
    setting = what_if(Setting(config, SERVER), "drives=0")
    *_, drive = remedies(setting.config, setting.machine)
    assert drive == "a drive, named in tiers.nvme_dirs"
    for remedy in remedies(setting.config, setting.machine):
        assert look_ahead(*done(remedy, setting.config, setting.machine), compare=False)
    with pytest.raises(ConfigError, match="has 0; leave it out, or use the profile of a machine with drives"):
        look_ahead(config, setting.machine)


def test_the_setting_that_is_wrong_is_the_first_remedy(config: RunConfig) -> None:
    small = replace(SERVER, gpu_bytes=1 << 30)
    assert remedies(changed(config, {"tiers.page": ByteSize("1 TiB")}), small)[0] == "tiers.page: null"


def test_drives_that_are_thought_of_bound_the_step_as_those_that_are_there(config: RunConfig) -> None:
    """Where the run's own drives were measured together, a second one halves what they take."""
    config = changed(config, {"tiers.nvme_dirs": ["/mnt/nvme0"], "tiers.dram": ByteSize("512 KiB")})
    rates = replace(SERVER.rates, nvme_read=1e6, nvme_write=1e6, nvme_read_mixed=5e5, nvme_write_mixed=5e5)
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


def test_masks_that_host_memory_cannot_hold_are_refused_and_told(tmp_path: Path) -> None:
    """With documents that share rows; rows of one document need none."""
    config = changed(make_run(tmp_path, steps=1), {"data.seq_len": 8192, "train.rows_per_step": 64})
    config.train.rows_per_chunk = 1
    machine = replace(Machine.here(config), host_bytes=4 << 30)
    isolated, mixed = (changed(config, {"data.isolate_documents": value}) for value in (True, False))
    said = r"mask of data\.seq_len squared for each row 4\.00 GiB .*lower data\.seq_len"
    with pytest.raises(BudgetError, match=said):
        look_ahead(isolated, machine)
    look_ahead(mixed, machine, compare=False)
