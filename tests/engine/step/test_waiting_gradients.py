"""Gradients that wait for their update take little of a DRAM that keeps planes of drives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.rig import Rig, Setup, batches, rig, tiny_config

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Intent

EARLY = OptimizerConfig(clip_norm=None, check_finite=False)
DEFERRED = OptimizerConfig(clip_norm=0.5)


def waiting_at_most(run: Rig, steps: int) -> int:
    """Train while updates are slower than backward. Most pages of gradients that had a frame at once before
    their update was finished.
    """
    waiting, most = set[Page](), 0
    acquire, worker_finished = run.store.acquire, run.runtime.updates.queue.finished

    def noted(uses, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal most
        lease = acquire(uses, **kwargs)
        waiting.update(page for page, intent in uses if (page.plane, intent) == ("grad", Intent.OVERWRITE))
        most = max(most, len(waiting))
        return lease

    def finished(granule: Granule) -> None:
        time.sleep(0.002)
        waiting.difference_update(granule.gradient)
        worker_finished(granule)

    run.store.acquire = noted  # type: ignore[method-assign]
    run.runtime.updates.queue.finished = finished  # type: ignore[method-assign]
    run.train(batches(steps))
    run.runtime.flush()
    assert not waiting
    return most


def gradient_pages(run: Rig) -> int:
    return sum(run.layout.page_count(*key) for key in run.layout.planes if key[1] == "grad")


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_updates_during_backward_hold_gradients_back(tmp_path: Path, placement: str) -> None:
    optimizer = OptimizerConfig(clip_norm=None, check_finite=False, placement=placement)  # type: ignore[arg-type]
    setup = Setup(config=tiny_config(layers=4), dram=40 * 8192, nvme=tmp_path, optimizer=optimizer)
    with rig(setup) as run:
        allowed = run.runtime.script.gradient_pages(on_drives=True)
        assert allowed is not None
        assert 2 * allowed < gradient_pages(run)
        assert waiting_at_most(run, 3) == allowed


@pytest.mark.parametrize(("optimizer", "drives"), [(EARLY, False), (DEFERRED, True), (DEFERRED, False)])
def test_elsewhere_all_of_them_wait(tmp_path: Path, optimizer: OptimizerConfig, drives: bool) -> None:
    """Where DRAM holds everything there is room; where updates wait for the whole gradient they must."""
    setup = Setup(config=tiny_config(layers=4), optimizer=optimizer)
    with rig(setup.but(dram=40 * 8192, nvme=tmp_path) if drives else setup) as run:
        assert run.runtime.script.gradient_pages(on_drives=drives) is None
        if optimizer is DEFERRED:
            assert waiting_at_most(run, 2) > gradient_pages(run) // 2


def test_an_update_that_fails_is_told_by_the_step(tmp_path: Path) -> None:
    """A gradient that waits for room is not left waiting."""
    with rig(Setup(config=tiny_config(layers=4), dram=40 * 8192, nvme=tmp_path, optimizer=EARLY)) as run:
        run.train(batches(1))
        error = RuntimeError("no update is possible")

        def fail(granule: Granule) -> None:
            raise error

        run.runtime.updates.queue.finished = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError) as caught:
            run.train(batches(2))
        assert caught.value is error
