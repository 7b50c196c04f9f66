"""A step's script is what the runtime carries out, and takes nothing but the meta model to make."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rig import Rig, Setup, batches, plan_of, rig, tiny_config

from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.step.script import StepScript
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Page


def settle(run: Rig) -> None:
    """Gradients are stored; updates during backward are finished."""
    run.runtime._gradients.wait_stored()
    if run.setup.optimizer.updates_in_backward:
        run.runtime.updates.queue.finish()


@pytest.mark.parametrize("early", [False, True])
def test_the_store_is_asked_for_what_the_script_says(tmp_path: Path, early: bool) -> None:
    """In a step of steady state, every page use of it, each as often as it is listed."""
    optimizer = OptimizerConfig(clip_norm=None, check_finite=False) if early else OptimizerConfig()
    with rig(Setup(config=tiny_config(layers=2), dram=1 << 20, nvme=tmp_path, optimizer=optimizer)) as run:
        run.train(batches(2))
        settle(run)
        seen: list[Page] = []
        acquire = run.store.acquire

        def noted(uses, **kwargs):  # type: ignore[no-untyped-def]
            seen.extend(page for page, _ in uses)
            return acquire(uses, **kwargs)

        run.store.acquire = noted  # type: ignore[method-assign]
        run.train(batches(1))
        settle(run)
        plan, layout = plan_of(run.setup, run.units)
        script = StepScript(run.units, layout, plan, optimizer, MoeConfig())
        assert sorted(seen) == sorted(page for page, _ in script.steady_uses())
        assert script.steady_uses() == run.runtime.script.steady_uses()
