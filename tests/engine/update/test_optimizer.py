"""Learning-rate schedule and verdict: pure functions, compared with torch's schedulers and with hand-computed
cases.
"""

from __future__ import annotations

import math

import pytest
import torch

from tierstream.engine.update.optimizer import OptimizerConfig, check_schedule, judge, learning_rate
from tierstream.io.errors import ConfigError


def test_warm_up_rises_linearly_and_never_wastes_an_update() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(config, i, 10) for i in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_equals_torchs_schedulers(schedule: str) -> None:
    total, floor = 40, 0.1
    config = OptimizerConfig(lr=0.5, warmup_steps=0, schedule=schedule, min_lr_ratio=floor)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if schedule == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, floor, total)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=0.5 * floor)
    for update in range(total):
        assert learning_rate(config, update, total) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-9
        )
        optimizer.step()
        scheduler.step()


def test_wsd_warms_up_stays_and_decays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=3, schedule="wsd", min_lr_ratio=0.2, decay_steps=4)
    rates = [learning_rate(config, update, 12) for update in range(13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 6, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(("total", "decay"), [(100, 10), (95, 10), (3, 1)])
def test_wsd_decays_over_a_tenth_of_the_run_if_nothing_else_is_said(total: int, decay: int) -> None:
    config = OptimizerConfig(lr=1.0, schedule="wsd", min_lr_ratio=0.0)
    rates = [learning_rate(config, update, total) for update in range(total)]
    assert [rate == 1.0 for rate in rates].count(True) == total - decay + 1
    assert rates[-1] == pytest.approx(1 / decay)


def test_wsd_needs_room_for_warm_up_and_decay() -> None:
    config = OptimizerConfig(schedule="wsd", warmup_steps=8, decay_steps=3)
    check_schedule(config, 11)
    with pytest.raises(ConfigError, match=r"warmup_steps is 8 .* takes 3 updates, but the run has 10 steps"):
        check_schedule(config, 10)
    with pytest.raises(ConfigError, match=r"decay_steps is 3 and optimizer\.schedule is cosine"):
        OptimizerConfig(decay_steps=3)


def test_the_norm_is_global_and_the_factor_is_torchs() -> None:
    config = OptimizerConfig(clip_norm=0.5)
    parts = {
        name: torch.randn(50, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")
    }
    verdict = judge(config, [float(p.double().square().sum()) for p in parts.values()], 7, 100)
    leaves = [p.clone().requires_grad_() for p in parts.values()]
    for leaf, part in zip(leaves, parts.values(), strict=True):
        leaf.grad = part.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    assert verdict.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(parts["a"] * verdict.clip_factor, leaves[0].grad, rtol=1e-5, atol=0)
    assert verdict.update == 8
    assert not verdict.skipped


def test_a_small_norm_is_not_clipped() -> None:
    assert judge(OptimizerConfig(clip_norm=1e9), [4.0], 0, 1).clip_factor == 1.0
    assert judge(OptimizerConfig(clip_norm=None), [4e30], 0, 1).clip_factor == 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
def test_one_value_that_is_not_finite_skips_the_step(bad: float) -> None:
    verdict = judge(OptimizerConfig(), [1.0, bad, 2.0], 3, 10)
    assert verdict.skipped
    assert verdict.update == 4


def test_updates_start_in_backward_only_where_nothing_is_clipped_or_checked() -> None:
    assert not OptimizerConfig().updates_in_backward
    assert not OptimizerConfig(clip_norm=None).updates_in_backward
    assert OptimizerConfig(clip_norm=None, check_finite=False).updates_in_backward
    with pytest.raises(ConfigError, match=r"check_finite is false and optimizer\.clip_norm is 0\.5"):
        OptimizerConfig(clip_norm=0.5, check_finite=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", -1.0), ("beta1", 1.0), ("eps", 0.0), ("clip_norm", 0.0), ("max_skipped_in_a_row", 0)],
)
def test_bad_values_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.{key} is {value}"):
        OptimizerConfig(**{key: value})
