"""A run before it is begun: its numbers are the run's own, and what is changed is what was said."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.families import moe_config
from support.png import size_of
from support.runs import make_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import PlanReport
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file, names
from tierstream.engine.planner.needs import planes
from tierstream.engine.planner.outlook import look_ahead
from tierstream.engine.planner.picture import draw_outlook
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.what_if import Setting, changed, what_if
from tierstream.engine.trace.trace import Track
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.sizes import format_bytes
from tierstream.tools.figures import to_png

WORKSTATION = Machine.from_profile(machine_file("workstation"))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """On a drive, with too little DRAM for all of its state."""
    config = make_run(tmp_path, steps=1)
    (tmp_path / "drive").mkdir()
    return changed(
        config,
        {
            "tiers.nvme_dirs": [str(tmp_path / "drive")],
            "tiers.dram": ByteSize("512 KiB"),
            "checkpoint.copy_memory": ByteSize("64 KiB"),
        },
    )


def on_gpu(config: RunConfig) -> RunConfig:
    return changed(config, {"train.device": "cuda"})


@pytest.mark.parametrize("whole", [True, False])
def test_two_processes_foresee_what_one_does(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, two_cores: None, whole: bool
) -> None:
    if not whole:
        pages = case_of(on_gpu(config), WORKSTATION).layout.page_total
        monkeypatch.setattr("tierstream.engine.planner.coarse.PAGES_FORESEEN", pages // 2)
        monkeypatch.setattr("tierstream.engine.planner.outlook.PAGES_COMPARED", pages // 4)
    forked, fork = list[int](), os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(1) or fork())
    outlooks = []
    for cores in ({0, 1}, {0}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        outlooks.append(look_ahead(on_gpu(config), WORKSTATION).outlook)
    assert len(forked) == 1
    assert outlooks[0] == outlooks[1]
    assert (outlooks[0].grain == 1) is whole
    assert len(outlooks[0].helps) == 4
    look_ahead(on_gpu(config), WORKSTATION, compare=False)
    assert len(forked) == 1


def test_the_numbers_are_those_of_the_run(config: RunConfig) -> None:
    machine = Machine.here(config)
    outlook = look_ahead(config, machine, compare=False).outlook
    Trainer(config).run()
    report = PlanReport.from_json((Path(config.run_dir) / "plan.json").read_text())
    for key in ("parameters", "tokens_per_step", "dtypes", "tiers"):
        assert getattr(outlook, key) == getattr(report, key), key
    assert outlook.device.logits_bytes == report.logits_bytes
    assert outlook.device.extras_bytes == report.extras_bytes
    assert outlook.bound_s == pytest.approx(dict(report.bound_s))
    assert sum(outlook.planes["gpu"].values()) == outlook.device.buffers_bytes
    durable = [nbytes for plane, nbytes in outlook.planes["nvme"].items() if "spills" not in plane]
    assert sum(durable) == outlook.tiers[-1].used_bytes
    json.dumps(asdict(outlook))


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize("nbytes", ["256 KiB", "512 KiB", "1 MiB", "1 GiB"])
def test_dram_is_told_to_hold_no_more_than_it_has(config: RunConfig, nbytes: str, policy: str) -> None:
    """What there is no room for is where it spills to, as the step was foreseen."""
    config = changed(on_gpu(config), {"tiers.dram": ByteSize(nbytes), "tiers.policy": policy})
    ahead = look_ahead(config, WORKSTATION, compare=False)
    dram, nvme = (ahead.outlook.planes[tier] for tier in ("dram", "nvme"))
    case = case_of(config, WORKSTATION)
    assert 0 < sum(dram.values()) <= case.plan.dram_bytes
    spilled = Counter[str]()
    for span in ahead.forecast.spans:
        if span.track is Track.WRITES and span.page is not None:
            spilled[f"{span.page.plane} that spills"] += span.nbytes
    assert {key: nvme[key] for key in nvme if "spills" in key} == {
        key: spilled[key] for key in spilled if key.partition(" ")[0] in ahead.outlook.step_local
    }
    if nbytes == "1 GiB":
        durable = sum(nvme.values())
        rest = case.plan.dram_bytes - sum(ahead.outlook.step_local.values()) - durable
        assert 0 < rest < case.layout.page_total * case.layout.page_bytes - durable
        expected = {"copies of nvme": durable, "frames that are not full": rest}
        assert dram == {**ahead.outlook.step_local, **expected}
    else:
        assert dram.keys() <= {"grad or activation", "copies of nvme"}


def test_inputs_that_stay_on_the_gpu_are_told_beside_the_largest_layer(config: RunConfig) -> None:
    config = changed(on_gpu(config), {"train.rows_per_chunk": None})
    stored, stay = (
        look_ahead(changed(config, {"tiers.activations": where}), WORKSTATION, compare=False).outlook.device
        for where in ("dram", "gpu")
    )
    units = case_of(config, WORKSTATION).units
    nbytes = len(units.layers) * 2 * config.train.rows_per_step * config.data.seq_len
    nbytes *= units.anatomy.boundary_width
    assert (stored.inputs_bytes, stay.inputs_bytes) == (0, nbytes)
    lowest = {"model.freeze": ["model.embed_tokens.*", "model.layers.0.*"], "tiers.activations": "gpu"}
    frozen = look_ahead(changed(config, lowest), WORKSTATION, compare=False).outlook.device
    assert frozen.inputs_bytes == nbytes - nbytes // len(units.layers), "without a backward none is kept"
    assert stored.layer_bytes == stay.layer_bytes
    assert f"inputs of all layers {format_bytes(nbytes)}" in stay.describe()
    small = replace(WORKSTATION, gpu_bytes=stay.nbytes - 1)
    with pytest.raises(BudgetError, match=r"inputs of all layers .* or leave out tiers\.activations"):
        look_ahead(changed(config, {"tiers.activations": "gpu"}), small, compare=False)


def test_what_if_changes_what_it_says_and_nothing_else(config: RunConfig) -> None:
    config = changed(on_gpu(config), {"tiers.gpu": ByteSize("1 GiB")})
    gib = 1 << 30
    setting = Setting(config, WORKSTATION)
    more = what_if(setting, "dram=64GiB,gpu=32GiB,drives=3,cores=32")
    assert (more.machine.host_bytes, more.machine.gpu_bytes, more.machine.cores) == (64 * gib, 32 * gib, 32)
    assert len(more.machine.drives) == len(more.config.tiers.nvme_dirs or []) == 3
    assert more.config.tiers.dram == (512 << 10) + 2 * gib
    assert more.config.tiers.gpu == gib + 32 * gib - (WORKSTATION.gpu_bytes or 0)
    rates = WORKSTATION.rates
    assert more.machine.rates == replace(rates, update_parameters_per_s=2 * rates.update_parameters_per_s)
    names = {"dram": config.tiers.dram, "gpu": config.tiers.gpu, "nvme_dirs": config.tiers.nvme_dirs}
    assert changed(more.config, {f"tiers.{name}": value for name, value in names.items()}) == config
    assert what_if(setting, "") == setting
    grown = f"tiers.dram grown to {more.config.tiers.dram}, tiers.gpu grown to {more.config.tiers.gpu}"
    said = f"{WORKSTATION.name}, with dram=64GiB,gpu=32GiB,drives=3,cores=32"
    assert more.machine.name == f"{said}, {grown}"
    assert what_if(setting, "cores=32").machine.name == f"{WORKSTATION.name}, with cores=32"
    blanks = what_if(setting, " dram = 64GiB , drives = 3 ")
    assert (blanks.machine.host_bytes, len(blanks.machine.drives)) == (64 * gib, 3)
    # With less, budgets stay as they are set: else a remedy would be of another run than the one refused.
    less = what_if(setting, "dram=1GiB,gpu=2GiB")
    assert (less.machine.host_bytes, less.machine.gpu_bytes) == (gib, 2 * gib)
    assert less.config == config
    for wrong in ("ram=1GiB", "dram=x", "drives=-1", "cores=0", "drives", "drives=2,drives=3"):
        with pytest.raises(ConfigError, match="--what-if"):
            what_if(setting, wrong)


def test_what_cannot_fit_is_refused_with_what_is_missing_and_what_would_do(config: RunConfig) -> None:
    config = changed(on_gpu(config), {"tiers.nvme_dirs": None})
    with pytest.raises(BudgetError) as caught:
        look_ahead(config, WORKSTATION)
    first, said, *remedies = str(caught.value).splitlines()
    assert first.startswith("the state needs ")
    assert first.endswith(" bytes are missing)")
    assert said == "any of these would do:"
    assert len(remedies) == 3
    key, value = remedies[0].strip().split(": ")
    assert (key, remedies[1].strip()) == ("tiers.dram", "tiers.dram: null")
    assert look_ahead(changed(config, {key: ByteSize(value)}), WORKSTATION, compare=False)


def test_a_cache_for_less_than_an_expert_is_refused_with_one_that_does(
    tmp_path: Path, config: RunConfig
) -> None:
    model = tmp_path / "experts"
    moe_config("qwen3_moe", num_hidden_layers=2, num_experts=16).save_pretrained(model)
    changes = {
        "model.config": str(model), "tiers.nvme_dirs": ["/mnt/nvme0"], "train.rows_per_chunk": None,
        "moe.gpu_cache": ByteSize(1),
    }  # fmt: skip
    config = changed(on_gpu(config), changes)
    with pytest.raises(BudgetError, match=r"^moe\.gpu_cache is 1 B, and an expert takes") as caught:
        look_ahead(config, WORKSTATION)
    lines = [line.strip().partition(": ") for line in str(caught.value).splitlines()[1:]]
    values = [value for key, _, value in lines if key == "moe.gpu_cache"]
    assert [value for value in values if value != "null"]
    for value in values:
        cache = None if value == "null" else ByteSize(value)
        assert look_ahead(changed(config, {"moe.gpu_cache": cache}), WORKSTATION, compare=False)


def test_a_gpu_that_is_too_small_is_told_before_the_run(config: RunConfig) -> None:
    config = changed(config, {"tiers.gpu": None})
    small = replace(WORKSTATION, gpu_bytes=case_of(on_gpu(config), WORKSTATION).plan.gpu_bytes)
    with pytest.raises(BudgetError, match=r"the GPU needs about .* bytes are missing\)"):
        look_ahead(on_gpu(config), small)
    with pytest.raises(ConfigError, match="computes on its GPU"):
        look_ahead(config, WORKSTATION)
    with pytest.raises(ConfigError, match="names 2 drives"):
        look_ahead(changed(on_gpu(config), {"tiers.nvme_dirs": ["a", "b"]}), WORKSTATION)


def test_planes_of_what_stays_on_the_device_are_counted_there(config: RunConfig) -> None:
    case = case_of(changed(on_gpu(config), {"tiers.gpu": ByteSize("2 MiB")}), WORKSTATION)
    assert case.plan.device.resident
    found = planes(case, simulate(case, WORKSTATION, steps=2))["gpu"]
    assert found["exp_avg of units that stay"] > 0
    assert sum(found.values()) == case.plan.gpu_bytes


def test_a_picture_shows_tiers_and_a_step(config: RunConfig) -> None:
    figure = draw_outlook(look_ahead(on_gpu(config), WORKSTATION, compare=False))
    tiers, steps = sorted(figure.axes, key=lambda axes: -axes.get_position().y0)
    assert [label.get_text()[:4] for label in tiers.get_yticklabels()] == ["gpu:", "dram", "nvme"]
    assert "compute" in [label.get_text() for label in steps.get_yticklabels()]
    width, height = size_of(to_png(figure))
    assert width > height > 400


def test_machines_that_come_with_it() -> None:
    assert names() == ["h200", "server", "superchip", "workstation"]
    for name in names():
        machine = Machine.from_profile(machine_file(name))
        assert machine.gpu_bytes
        assert machine.drives
        assert ("datasheet" in machine.name) == (name != "h200")
    with pytest.raises(ConfigError, match="did you mean workstation"):
        machine_file("workstaton")
