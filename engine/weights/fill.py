"""First values of the whole state: from a checkpoint of a run, a model directory or an initialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.data.progress import OnProgress, Sum, not_told
from tierstream.engine.device.device import Device
from tierstream.engine.model import initialise
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.router_bias import restore_biases
from tierstream.engine.weights import source
from tierstream.engine.weights.state import PlaneWriter
from tierstream.tiered.layout import Layout
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.store import Store


@dataclass(frozen=True)
class FirstValues:
    """Where they come from: the first of snapshot and weights that is there, else random numbers."""

    config: RunConfig
    model: Any
    units: ModelUnits
    snapshot: Snapshot | None
    weights: source.LoadPlan | None

    def fill(self, layout: Layout, store: Store, device: Device, on_progress: OnProgress = not_told) -> str:
        """Set every durable plane and every buffer; says where from.

        Raises:
            ModelSourceError, CheckpointError, StorageError: what cannot be read, before anything is trained
                on.
        """
        config, snapshot = self.config, self.snapshot
        in_order, nbytes = self.units.in_forward_order, 4 * self.units.numel  # of fp32 values
        write = PlaneWriter(store, layout)
        if snapshot is not None:
            durable_bytes = sum(spec.nbytes for spec in snapshot.planes.values())
            snapshot.restore(store, Sum(on_progress, f"loading {snapshot.path}", durable_bytes))
            origin = f"the checkpoint of step {snapshot.state['step']}, {snapshot.path}"
        elif self.weights is not None:
            told = Sum(on_progress, f"loading {config.model.path}", nbytes)
            source.load_weights(self.weights, in_order, write, progress=told)
            origin = f"weights of {config.model.path}"
            if self.weights.resized:
                origin += f", with {config.model.vocab_size} rows for tokens"
        else:
            told = Sum(on_progress, "drawing random weights", nbytes)
            initialise.init_weights(self.model, in_order, config.train.seed, write, progress=told)
            origin = f"random weights (seed {config.train.seed})"
        materialise_buffers(self.model, self.weights, device.torch_device)
        if snapshot is not None:
            restore_biases(self.model, snapshot.state["router_biases"])
        return origin
