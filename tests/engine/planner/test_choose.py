"""The plan that is chosen is the fastest of all that could be, found with fewer simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.planner.case import case_of, units_of
from tierstream.engine.planner.choose import choose
from tierstream.engine.planner.drive import DriveRates
from tierstream.engine.planner.floor import floor_s
from tierstream.engine.planner.grid import Refused, divisions, store_settings, with_values
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.simulate import simulate
from tierstream.engine.planner.times import modelled_times
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import BudgetError

EARLY = OptimizerConfig(clip_norm=None, check_finite=False)


def a_machine(*, gpu: bool, flop_per_s: float = 1e11) -> Machine:
    """Slow enough that a small model is bound by its drive, its link or its CPU."""
    link = 4e8 if gpu else None
    return Machine(
        name="made up",
        host_bytes=1 << 30,
        gpu_bytes=1 << 30 if gpu else None,
        cores=4,
        drives=(
            DriveRates(directory="/drive", read=1e8, write=8e7, read_mixed=6e7, write_mixed=5e7),
        ),
        rates=Rates(
            flop_per_s=flop_per_s, upload=link, download=link, update_parameters_per_s=2e7,
            device_memory=1e10, launch_s=1e-6, host_copy=2e9, page_s=1e-5,
        ),
    )  # fmt: skip


def a_run(folder: Path, *, gpu: bool, experts: bool = False, **sections: Any) -> RunConfig:
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    if experts:
        more = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
        transformers.Qwen3MoeConfig(**shape, **more).save_pretrained(folder)
    else:
        transformers.LlamaConfig(**shape).save_pretrained(folder)
    tiers = {"dram": ByteSize("128KiB"), "nvme_dirs": ["/drive"], "page": ByteSize(4096)}
    return RunConfig(
        run_dir=str(folder),
        model=ModelConfig(config=str(folder)),
        data=DataConfig(files=["none"], seq_len=8),
        tiers=TiersConfig(**{**tiers, **sections.pop("tiers", {})}),
        train=TrainConfig(rows_per_step=4, device="cuda" if gpu else "cpu"),
        **sections,
    )


#: Some keys are set, to try less.
CASES = {
    "GPU, drive": {
        "gpu": True, "optimizer": OptimizerConfig(placement="both"),
        "tiers": {"gpu": ByteSize("250KiB"), "policy": "lookahead", "writeback": ByteSize("16KiB")},
    },
    "GPU, DRAM": {"gpu": True, "tiers": {"gpu": ByteSize("250KiB"), "dram": ByteSize("8MiB")}},
    "CPU, early updates": {
        "gpu": False, "optimizer": EARLY,
        "tiers": {"prefetch": ByteSize("32KiB"), "writeback": ByteSize("16KiB")},
    },
    "experts": {
        "gpu": True, "experts": True, "moe": MoeConfig(idle="lazy"),
        "tiers": {"policy": "lookahead", "prefetch": ByteSize("32KiB"), "activations": "dram"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_that_of_trying_everything(tmp_path: Path, name: str) -> None:
    """And no simulated step is faster than its floor."""
    config = a_run(tmp_path, **CASES[name])
    machine = a_machine(gpu=CASES[name]["gpu"])
    units, _ = units_of(config)
    everything = {}
    for values in divisions(config, machine, units):
        if isinstance(values, Refused):
            continue
        division = with_values(config, values)
        for own in store_settings(division, case_of(division, machine).plan):
            case = case_of(with_values(division, own), machine)
            step_s = simulate(case, machine).step_s
            assert floor_s(case, machine, modelled_times(case, machine)) <= step_s * (1 + 1e-9)
            everything[repr({**values, **own})] = step_s
    choice = choose(config, machine, simulations=len(everything), tolerance=0)
    assert choice.forecast.step_s == min(everything.values())
    assert everything[repr(dict(choice.values))] == choice.forecast.step_s
    assert choice.floor_s == choice.forecast.step_s
    again = simulate(case_of(choice.config, machine), machine)
    assert again.step_s == choice.forecast.step_s  # the configuration is that very plan


def test_what_is_slow_is_not_tried_in_every_combination(tmp_path: Path) -> None:
    """`lru` once in each branch, so few simulations find what all of them find."""
    config = a_run(tmp_path, gpu=False, tiers={"gpu": ByteSize("250KiB")}, optimizer=OptimizerConfig())
    few, all_ = (choose(config, a_machine(gpu=False), simulations=count, tolerance=0) for count in (24, 1000))
    tried = [each.values for each in few.alternatives if each.step_s is not None] + [few.values]
    branches = {(each["tiers.activations"], each["tiers.resident"]) for each in tried}
    assert len(tried) == 24 < sum(each.step_s is not None for each in all_.alternatives)
    assert sum(each["tiers.policy"] == "lru" for each in tried) <= len(branches)
    assert few.forecast.step_s == all_.forecast.step_s


def test_few_simulations_tell_how_much_faster_another_could_be(tmp_path: Path) -> None:
    config = a_run(tmp_path, **CASES["GPU, drive"])
    few, many = (choose(config, a_machine(gpu=True), simulations=count) for count in (2, 8))
    assert sum(each.step_s is not None for each in few.alternatives) == 1
    assert few.floor_s <= many.floor_s <= many.forecast.step_s <= few.forecast.step_s
    assert any("not looked at" in each.why for each in few.alternatives)
    assert "no other is faster by more than" in few.describe()


def test_branches_that_cannot_be_faster_are_cut(tmp_path: Path) -> None:
    """Where the device is slow, a plan that keeps it busy is as good as any."""
    config = a_run(tmp_path, **CASES["GPU, DRAM"])
    choice = choose(config, a_machine(gpu=True, flop_per_s=1e8), tolerance=0.05)
    cut = [each for each in choice.alternatives if each.why.endswith("s at least")]
    assert len(cut) == len(choice.alternatives)
    assert choice.forecast.step_s / 1.05 <= choice.floor_s <= choice.forecast.step_s


def test_what_the_run_file_sets_stays(tmp_path: Path) -> None:
    tiers = {
        "gpu": ByteSize("250KiB"), "resident": 1, "policy": "lru", "activations": "dram",
        "prefetch": ByteSize("16KiB"), "writeback": ByteSize("16KiB"),
    }  # fmt: skip
    config = a_run(tmp_path, gpu=True, tiers=tiers, optimizer=OptimizerConfig(placement="cpu"))
    choice = choose(config, a_machine(gpu=True))
    assert choice.config == config
    assert not choice.alternatives
    assert not choice.suggested
    assert case_of(config, a_machine(gpu=True)).plan.device.resident == ("embed",)


def test_what_changes_bits_is_only_suggested(tmp_path: Path) -> None:
    config = a_run(tmp_path, **CASES["GPU, DRAM"])
    config = replace(config, train=replace(config.train, rows_per_chunk=1))
    machine = a_machine(gpu=True)
    machine = replace(machine, rates=replace(machine.rates, launch_s=1e-3))
    choice = choose(config, machine, simulations=1)
    (suggested,) = choice.suggested
    assert choice.config.train.rows_per_chunk == 1
    assert suggested.values == {"train.rows_per_chunk": None}
    assert suggested.step_s is not None
    assert suggested.step_s < choice.forecast.step_s
    assert "changes bits" in suggested.why


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ({"gpu": ByteSize("8KiB")}, r"tiers\.gpu is 8\.00 KiB, but two layers"),
        ({"gpu": ByteSize("200KiB"), "resident": 3}, r"tiers\.resident is 3, .* tiers\.gpu is 200\.00 KiB"),
    ],
)
def test_what_cannot_fit_is_refused(tmp_path: Path, tiers: dict[str, Any], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        choose(a_run(tmp_path, gpu=True, tiers=tiers), a_machine(gpu=True))
