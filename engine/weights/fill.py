"""First values of the whole state: from a checkpoint of a run, a model directory or an initialisation.

State on drives is filled in portions, each recorded there once it is durable (`tierstream.tiered.filled`):
a start that was cut off goes on after the last of them. Portions are whole layers, so no page belongs to two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from tierstream import _native
from tierstream.engine.config import RunConfig
from tierstream.engine.data.hashes import look
from tierstream.engine.data.progress import Sum
from tierstream.engine.device.device import Device
from tierstream.engine.model import initialise
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.router_bias import restore_biases
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.weights import source
from tierstream.engine.weights.state import PlaneWriter
from tierstream.tiered.filled import Identity
from tierstream.tiered.layout import Layout, Unit
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.store import Store
from tierstream.tiered.zarrdir import ZarrDirectory

#: fp32 values of a portion: what a start that is cut off loses. To record one takes milliseconds a file.
PORTION_BYTES = 4 << 30
#: What of a run file decides parts of a store's identity (`tierstream.tiered.filled`).
_DECIDED_BY = {
    "planes": "model.dtype, model.freeze, model.train_only, optimizer.master and moe.stream",
    "page size": "tiers.page or, where that is null, tiers.dram",
    "directories": "tiers.nvme_dirs",
}


@dataclass(frozen=True)
class FirstValues:
    """Where they come from: the first of snapshot and weights that is there, else random numbers."""

    config: RunConfig
    model: Any
    units: ModelUnits
    snapshot: Snapshot | None
    weights: source.LoadPlan | None

    @cached_property
    def identity(self) -> Identity | None:
        """What the values follow from; None where a start that was cut off begins anew."""
        if self.snapshot is not None:
            return None
        model = json.loads(self.model.config.to_json_string(use_diff=False))
        model.pop("_name_or_path", None)  # where it lies changes nothing
        seed = self.config.train.seed
        return {
            "weights": f"seed {seed}" if self.weights is None else _fingerprint_of_source(self.weights),
            "configuration of the model": _digest(json.dumps(model, sort_keys=True).encode()),
            "software": _fingerprint_of_software(),
        }

    def fill(
        self,
        layout: Layout,
        store: Store,
        device: Device,
        directory: ZarrDirectory | None = None,
        callbacks: Callback | None = None,
    ) -> str:
        """Set every durable plane and every buffer; says where from.

        Args:
            directory: of the store; what it has recorded as filled stays.

        Raises:
            ModelSourceError, CheckpointError, StorageError: what cannot be read, before anything is trained
                on.
        """
        config, snapshot, callbacks = self.config, self.snapshot, callbacks or Callback()
        if snapshot is not None:
            durable_bytes = sum(spec.nbytes for spec in snapshot.planes.values())
            snapshot.restore(store, Sum(callbacks.on_progress, f"loading {snapshot.path}", durable_bytes))
            origin = f"the checkpoint of step {snapshot.state['step']}, {snapshot.path}"
        elif self.weights is not None:
            self._fill_units(layout, store, directory, callbacks, f"loading {config.model.path}")
            origin = f"weights of {config.model.path}"
            if self.weights.resized:
                origin += f", with {config.model.vocab_size} rows for tokens"
        else:
            self._fill_units(layout, store, directory, callbacks, "drawing random weights")
            origin = f"random weights (seed {config.train.seed})"
        materialise_buffers(self.model, self.weights, device.torch_device)
        if snapshot is not None:
            restore_biases(self.model, snapshot.state["router_biases"])
        return origin

    def _fill_units(
        self, layout: Layout, store: Store, directory: ZarrDirectory | None, callbacks: Callback, what: str
    ) -> None:
        filled = set[str]() if directory is None else directory.filled.units
        units = self.units
        places = [units.begin, *map(units.of_layer, range(len(units.layers))), units.end]
        groups = [[unit for unit in place if unit.name not in filled] for place in places]
        portions, total = list(_portions(groups)), 4 * units.numel
        done = total - sum(map(_values_bytes, portions))
        if directory is not None and directory.doubt:
            changed = (part for part in directory.filled.other if part in _DECIDED_BY)
            hints = (f"; {part} follows from {_DECIDED_BY[part]}" for part in changed)
            callbacks.on_event(
                f"warning: the state is filled from the beginning: {directory.doubt}{''.join(hints)}"
            )
        if done:
            callbacks.on_event(f"state: {len(filled)} units are on the drives from a start that was cut off")
        told = Sum(callbacks.on_progress, what, total, done)
        # The drives are given one portion while the next is read.
        with ThreadPoolExecutor(1, "tierstream-filled") as recorder:
            recorded: Future[None] | None = None
            for portion in portions:
                self._load(portion, PlaneWriter(store, layout), told)
                if recorded is not None:
                    recorded.result()
                if directory is not None and len(portions) > 1:
                    recorded = recorder.submit(_record, store, directory, portion)
            if recorded is not None:
                recorded.result()

    def _load(self, units: list[Unit], write: PlaneWriter, told: Sum) -> None:
        if self.weights is not None:
            source.load_weights(self.weights, units, write, progress=told)
        else:
            initialise.init_weights(self.model, units, self.config.train.seed, write, progress=told)


def _portions(groups: Iterable[list[Unit]]) -> Iterator[list[Unit]]:
    """Groups joined until they are worth a record."""
    portion: list[Unit] = []
    for group in groups:
        portion += group
        if _values_bytes(portion) >= PORTION_BYTES:
            yield portion
            portion = []
    if portion:
        yield portion


def _values_bytes(units: Iterable[Unit]) -> int:
    return 4 * sum(unit.parameters for unit in units)


def _record(store: Store, directory: ZarrDirectory, units: Iterable[Unit]) -> None:
    store.flush()
    names, layout = {unit.name for unit in units}, store.layout
    planes = (key for key, spec in layout.planes.items() if spec.durable and spec.unit in names)
    pages = chain.from_iterable(layout.pages(*key) for key in planes)
    directory.record(page for page in pages if store.has_content(page))


def _fingerprint_of_source(plan: source.LoadPlan) -> str:
    """Changes with the files of weights, as far as size, time and inode tell, and with their headers."""
    tensors = plan.checkpoint.tensors.values()
    files = [[file.name, *look(file)] for file in sorted({tensor.file for tensor in tensors})]
    return _digest(repr((files, sorted(map(repr, tensors)))).encode())


def _fingerprint_of_software() -> str:
    """Changes with the code that decides bits of first values: ours, and versions of what it stands on."""
    versions = [version(name) for name in ("numpy", "torch", "transformers")]
    files = [
        *sorted(Path(source.__file__).parent.glob("*.py")),
        Path(str(initialise.__file__)),
        Path(_native.__file__),
    ]
    return _digest(*(file.read_bytes() for file in files), repr(versions).encode())


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
