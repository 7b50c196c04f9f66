"""First values of the whole state, wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import save_model
from support.runs import make_run

from tierstream.engine import assemble
from tierstream.engine.config import RunConfig
from tierstream.engine.data.progress import Progress
from tierstream.engine.device.device import Device
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.model.units import ModelUnits, build_layout, find_units
from tierstream.engine.weights.fill import FirstValues
from tierstream.tiered.layout import Layout
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run from a model directory of three layers."""
    save_model(tmp_path / "source")
    config = make_run(tmp_path)
    config.model = ModelConfig(path=str(tmp_path / "source"))
    return config


class Parts:
    """What a run has before its state is filled."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.model, _ = build_meta_model(config.model)
        self.units: ModelUnits = find_units(self.model)
        self.layout: Layout = build_layout(
            self.units, page_bytes=8192, master="split", grad_dtype="float32", boundary_nbytes=None
        )

    def values(self, snapshot: Snapshot | None = None) -> FirstValues:
        weights = assemble.plan_weights(self.config, self.model)
        return FirstValues(self.config, self.model, self.units, snapshot, weights)

    def store(self, **keys: Any) -> Store:
        keys = {"dram_bytes": 8 << 20, "directory": None} | keys
        return Store(self.layout, prefetch_bytes=0, writeback_bytes=1 << 20, **keys)

    def planes(self, store: Store) -> dict[tuple[str, str], bytes]:
        found = {}
        for (unit, plane), spec in self.layout.planes.items():
            if spec.durable:
                out = np.empty(spec.numel, {2: np.uint16, 4: np.float32}[spec.item_bytes])
                store.read_range(unit, plane, 0, out)
                found[unit, plane] = out.tobytes()
        return found


@pytest.mark.parametrize("origin", ["weights", "random", "snapshot"])
def test_it_is_told_to_its_end(config: RunConfig, tmp_path: Path, origin: str) -> None:
    if origin == "random":
        config.model = ModelConfig(config=str(tmp_path / "source"))
    parts, told, snapshot = Parts(config), list[Progress](), None
    nbytes, what = 4 * parts.units.numel, f"loading {config.model.path}"
    with parts.store() as store:
        if origin == "random":
            what = "drawing random weights"
        if origin == "snapshot":
            parts.values().fill(parts.layout, store, Device("cpu"))
            write_snapshot(store, tmp_path / "snapshot", {"step": 3, "router_biases": {}})
            snapshot = Snapshot.open(tmp_path / "snapshot")
            what, nbytes = f"loading {tmp_path / 'snapshot'}", sum(s.nbytes for s in snapshot.planes.values())
        parts.values(snapshot).fill(parts.layout, store, Device("cpu"), told.append)
    assert [progress.done for progress in told] == sorted({progress.done for progress in told})
    assert {(progress.what, progress.total) for progress in told} == {(what, nbytes)}
    assert told[-1] == Progress(what, nbytes, nbytes)
