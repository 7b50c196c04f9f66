"""What the store is told of a step, beside what it is then asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import rig as rigs
from support.families import moe_config
from support.rig import Setup, batches, rig

from tierstream.engine.moe.config import MoeConfig
from tierstream.tiered.layout import Page
from tierstream.tiered.replay import Acquire, Begin, RecordingStore


@pytest.mark.parametrize("idle", ["dense", "lazy"])
def test_the_store_is_told_which_experts_are_expected_and_which_have_tokens(
    idle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is announced twice: with a guess, and once all layers have routed their tokens. The guess is
    all of them where the updates of all come in forward, else those of the step before.
    """
    monkeypatch.setattr(rigs, "Store", RecordingStore)
    setup = Setup(
        config=moe_config("qwen3_moe", num_hidden_layers=2), rows=1, rows_per_chunk=1, seq_len=4,
        nvme=tmp_path, dram=60 * 8192, moe=MoeConfig(idle=idle),  # type: ignore[arg-type]
    )  # fmt: skip
    with rig(setup) as run:
        store = run.store
        assert isinstance(store, RecordingStore)
        experts = {unit.name for own in run.units.experts for unit in own}
        latest: set[str] = set()
        for batch in batches(3, rows=1, seq_len=4):
            store.events.clear()
            run.train([batch])
            run.runtime._gradients.wait_stored()
            layers = [parts.experts for parts in run.runtime._sweep._parts if parts.experts is not None]
            busy = {name for layer in layers for name in layer.hit}
            _, second = (at for at, event in enumerate(store.events) if isinstance(event, Begin))
            guess, announced = (event for event in store.events if isinstance(event, Begin))
            written = {page.unit for page in guess.schedule if page.plane == "grad"} & experts
            assert written == (experts if idle == "dense" else latest)
            latest = busy
            used = [event.uses for event in store.events[second:] if isinstance(event, Acquire)]
            assert units_of(announced.schedule) & experts == busy < experts
            assert units_of([page for uses in used for page, _ in uses if page.plane == "grad"]) >= busy


def units_of(pages: list[Page]) -> set[str]:
    return {page.unit for page in pages}
