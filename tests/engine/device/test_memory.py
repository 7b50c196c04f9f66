"""What the device holds: by budget, and to the byte what the run really takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.rig import Setup, rig, tiny_config

from tierstream.engine.device.device import Device
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import BudgetError


def plans(setup: Setup, budgets: list[int]) -> list[tuple[int, tuple[str, ...], int]]:
    """(bytes, units that stay, layer slots) for each budget."""
    found = []
    for budget in budgets:
        with rig(setup.but(gpu=budget)) as run:
            plan = run.plan
            found.append((plan.gpu_bytes, plan.device.resident, plan.device.layer_slots))
    return found


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extra", [0, 90_000, 1 << 40])
def test_the_plan_is_what_the_runtime_takes(
    monkeypatch: pytest.MonkeyPatch, placement: str, grad_dtype: str, extra: int
) -> None:
    optimizer = OptimizerConfig(placement=placement, grad_dtype=grad_dtype)  # type: ignore[arg-type]
    setup = Setup(config=tiny_config("qwen2"), dtype="bfloat16", optimizer=optimizer, page=4096)
    with rig(setup) as run:
        least = run.plan.gpu_bytes
    taken: list[int] = []
    plain = Device.buffer

    def counted(self: Device, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return plain(self, nbytes)

    monkeypatch.setattr(Device, "buffer", counted)
    with rig(setup.but(gpu=least + extra)) as run:
        everything = len(run.plan.device.resident) == len(run.units.in_forward_order)
        assert everything == (extra > least)
        assert sum(taken) == run.plan.gpu_bytes <= least + extra


def test_a_larger_budget_keeps_more_and_never_takes_more_than_it_is() -> None:
    setup = Setup(config=tiny_config("qwen2", tied=True, layers=6), dtype="bfloat16")
    with rig(setup) as run:
        least, order = run.plan.gpu_bytes, [unit.name for unit in run.units.in_forward_order]
    budgets = [least + step * 70_000 for step in range(12)]
    found = plans(setup, budgets)
    for budget, (nbytes, resident, slots) in zip(budgets, found, strict=True):
        assert nbytes <= budget
        assert list(resident) == order[: len(resident)]
        assert min(2, len(order) - len(resident)) <= slots <= 6
    kept = [len(resident) for _, resident, _ in found]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_unit_stays_where_only_pages_that_pass_through_are_too_much(tied: bool) -> None:
    """All units take less than all but one: then nothing passes through, and no slot is shared."""
    optimizer = OptimizerConfig(placement="gpu")
    setup = Setup(config=tiny_config("qwen2", tied=tied), dtype="bfloat16", optimizer=optimizer, page=1 << 16)
    with rig(setup.but(gpu_all=True)) as run:
        everything, order = run.plan.gpu_bytes, [unit.name for unit in run.units.in_forward_order]
    ((nbytes, resident, _),) = plans(setup, [everything])
    assert (nbytes, list(resident)) == (everything, order)


def test_gradients_of_units_that_stay_take_no_dram() -> None:
    setup = Setup(config=tiny_config("qwen2"), dtype="bfloat16")
    with rig(setup) as streamed, rig(setup.but(gpu_all=True)) as resident:
        grads = [key for key in streamed.layout.planes if key[1] == "grad"]
        assert len(grads) == 5
        assert set(streamed.layout.planes) - set(resident.layout.planes) == set(grads)
        assert resident.plan.step_local_bytes < streamed.plan.step_local_bytes


def test_too_little_is_refused_with_what_is_needed() -> None:
    setup = Setup(config=tiny_config("qwen2"), dtype="bfloat16")
    with rig(setup) as run:
        least = run.plan.gpu_bytes
    with (
        pytest.raises(BudgetError, match=r"tiers\.gpu is .* need .*; raise tiers\.gpu"),
        rig(replace(setup, gpu=least - 1)),
    ):
        pass
