"""A run whose profile says all of its machine chooses its placement, says so, and computes the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.command import use_drive
from support.runs import final_planes, make_run, records

from tierstream.engine import assemble
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.plan import Plan
from tierstream.engine.planner import choose as planner
from tierstream.engine.run import placing
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import BudgetError
from tierstream.io.profile import MachineProfile

HOST = {"bytes": 1 << 30, "cores": 2, "memory": 4e10, "copy": 5e9, "page_s": 1e-4, "wake_s": 1e-5}
DEVICE = {"bytes": 1 << 30, "memory": 1e10, "launch_s": 1e-6}


class Heard(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, text: str) -> None:
        self.lines += [text] if text.startswith("plan: ") else []


def run(config: RunConfig) -> list[str]:
    heard = Heard()
    Trainer(config, [heard]).run()
    return heard.lines


def test_the_run_is_the_plan_that_was_chosen(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    config = make_run(tmp_path, steps=2)
    use_drive(config, tmp_path / "drive")
    config.tiers.dram, config.tiers.gpu = ByteSize("512KiB"), ByteSize("1MiB")
    assert run(config) == []  # the profile knows nothing of the host
    plain = final_planes(config), [record["loss"] for record in records(config)]

    file = Path(str(config.tiers.profile))
    replace(MachineProfile.load(file), host=HOST, device=DEVICE).save(file)
    choices: list[planner.Choice] = []
    plans: list[Plan] = []

    def choosing(*args, **options):  # type: ignore[no-untyped-def]
        choices.append(planner.choose(*args, simulations=4, **options))
        return choices[-1]

    def planning(plan_run):  # type: ignore[no-untyped-def]
        def planned(*args):  # type: ignore[no-untyped-def]
            plans.append(plan_run(*args)[0])
            return plan_run(*args)

        return planned

    monkeypatch.setattr(placing, "choose", choosing)
    monkeypatch.setattr(assemble, "plan_run", planning(assemble.plan_run))
    config.run_dir = str(tmp_path / "again")
    (line,) = run(config)
    (choice,), (plan,) = choices, plans
    assert line.startswith(f"plan: {choice.describe()}; {choice.forecast.step_s:.3g} s per step expected, ")
    tiers = choice.config.tiers
    assert (plan.policy, plan.prefetch_bytes) == (tiers.policy, tiers.prefetch)
    assert len(plan.device.resident) == tiers.resident
    assert "resident: null" in Path(config.run_dir, "config.yaml").read_text()
    planes = final_planes(config)
    assert all((planes[key] == content).all() for key, content in plain[0].items())
    assert [record["loss"] for record in records(config)] == plain[1]


def test_what_cannot_fit_is_refused_with_what_would_do(tmp_path: Path) -> None:
    """By a machine of which nothing was measured."""
    config = make_run(tmp_path, steps=2)
    config.tiers.dram = ByteSize("256KiB")
    with pytest.raises(BudgetError) as caught:
        Trainer(config).run()
    first, said, *remedies = str(caught.value).splitlines()
    assert first.endswith(" bytes are missing)")
    assert said == "any of these would do:"
    key, value = remedies[0].strip().split(": ")
    others = [remedy.strip() for remedy in remedies[1:]]
    assert others == [f"{key}: null", "a drive, named in tiers.nvme_dirs"]
    config.tiers.dram = ByteSize(value)
    Trainer(config).run()
