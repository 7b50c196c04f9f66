"""The gate: a tiny twin of an architecture, compared with transformers in everything that a run relies on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_of, describe, read_hf_config
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.parity import cache
from tierstream.engine.parity.compare import (
    Streamed,
    Tensors,
    differing,
    distance,
    packed_batch,
    plain_step,
    reference_model,
    seen_beyond_documents,
    stored,
    streamed,
    unequal,
)
from tierstream.engine.parity.twin import tiny_config
from tierstream.engine.parity.verdict import NAMES, Check, Name, Verdict
from tierstream.engine.step.batch import Batch
from tierstream.engine.weights.safetensors_dir import some
from tierstream.io.errors import ModelSourceError, TierstreamError

#: Largest relative difference where sums have another order: rows of tables are added in fp32, and experts
#: are computed one by one. What is computed wrong is off by far more.
ROUNDING = {"float32": 1e-4, "bfloat16": 3e-2}
#: Documents that see each other are farther apart.
_SAME_DOCUMENT = 1e-4
_WHOLE_LAYERS = MoeConfig(stream="layers", aux_loss_coef=0.0)
_SINGLE_EXPERTS = MoeConfig(stream="experts", aux_loss_coef=0.0)


def pass_gate(config: ModelConfig, on_event: Callable[[str], None]) -> Verdict:
    """The verdict on a run's architecture, which it knows already, or finds out now: seconds, on the CPU.

    Raises:
        ModelSourceError, ConfigError: see `build_meta_model`.
        ModelSourceError: streamed, it would not be what transformers makes of it.
    """
    hf_config = read_hf_config(config)
    twin, _ = build_of(tiny_config(hf_config), config)
    key = cache.fingerprint(twin, "cpu")
    verdict = cache.find(key)
    if verdict is None:
        verdict = compare_twin(hf_config, config)
        if verdict.why_not is not None:
            raise ModelSourceError(
                f"{config.path or config.config}: {verdict.model} cannot be trained. A tiny twin of it is "
                f"not what transformers makes of it: {verdict.why_not}. `tierstream check-model` shows all "
                "that was compared"
            )
        cache.keep(key, verdict)
        on_event(f"model: a tiny twin of {verdict.model} trains as in transformers: {verdict.summary}")
    return verdict


def compare_twin(hf_config: Any, config: ModelConfig, device: str = "cpu") -> Verdict:
    """All checks of the twin of `hf_config`, in fp32 and in bf16. Random states are left as they are.

    Args:
        config: which attention, and whether code of its own may run.
        device: where both compute. On the CPU whole layers are equal to the bit; on a GPU within `ROUNDING`.
    """
    gate = _Gate(config, device)
    with torch.random.fork_rng(), _quiet(), tempfile.TemporaryDirectory(prefix="tierstream-") as folder:
        try:
            gate.run(hf_config, Path(folder))
        except TierstreamError as error:
            gate.note(gate.at, False, str(error).replace(f"{folder}/", "the twin in "))
        except Exception as error:  # the code of a family raises what it likes
            gate.note(gate.at, False, describe(error))
    return Verdict(gate.model, tuple(gate.checks[name] for name in NAMES if name in gate.checks))


@dataclass
class _Gate:
    """Attributes:
    at: what is being found out.
    off: why gradients may differ -> how far they do.
    """

    config: ModelConfig
    device: str
    model: str = ""
    at: Name = "binds"
    checks: dict[Name, Check] = field(default_factory=dict)
    off: dict[str, float] = field(default_factory=dict)

    def note(self, name: Name, holds: bool, found: str) -> None:
        """What fails once has failed."""
        if name not in self.checks or self.checks[name].holds:
            self.checks[name] = Check(name, holds, found)

    def run(self, hf_config: Any, folder: Path) -> None:
        """Raises whatever breaks; `at` says at what."""
        self.model = type(hf_config).__name__
        twin = tiny_config(hf_config)
        for dtype in ("float32", "bfloat16"):
            self.at = "binds"
            config = replace(self.config, dtype=dtype)
            model, text_config = build_of(twin, config)
            self.model = type(model).__name__
            units = find_units(model)
            count = len(list(model.parameters()))
            self.note("binds", True, f"each of {count} parameters has its place")
            batch = packed_batch(text_config.vocab_size, torch.device(self.device))
            self._compare(twin, config, units, batch, folder / dtype)

    def _compare(self, twin: Any, config: ModelConfig, units: ModelUnits, batch: Batch, folder: Path) -> None:
        self.at = "load"
        reference = reference_model(twin, config, folder).to(self.device)
        loaded = dict(reference.named_parameters())  # and buffers, before a forward changes them
        loaded |= {name: buffer.clone() for name, buffer in reference.named_buffers()}
        if config.dtype == "float32":
            self._packing(reference, batch)
        self.at = "loss"
        expected = plain_step(reference, batch)
        bound = ROUNDING[config.dtype]
        tables = {tensor.name for unit in (units.embed, *units.tables) for tensor in unit.tensors}
        for moe in (_WHOLE_LAYERS, _SINGLE_EXPERTS) if any(units.experts) else (_WHOLE_LAYERS,):
            exact = moe is _WHOLE_LAYERS and self.device == "cpu"
            self.at = "load"
            with streamed(twin, config, folder, moe, self.device) as ours:
                self._load(ours, loaded)
                self.at = "export"
                self._export(ours, folder, folder.with_name(f"{folder.name}-{moe.stream}"))
                self.at = "loss"
                found = ours.step(batch)
            self._loss(found[0], expected[0], 0.0 if exact else bound)
            reason = "rows of tables are added in another order" if exact else "experts one by one"
            self._gradients(found[1], expected[1], tables if exact else expected[1].keys(), bound, reason)

    def _packing(self, reference: Any, batch: Batch) -> None:
        try:
            apart = seen_beyond_documents(reference, batch)
        except Exception as error:  # some families do not take positions that begin anew
            self.note("packing", False, describe(error))
            return
        holds = apart <= _SAME_DOCUMENT
        found = f"documents of a row see each other (logits {apart:.0e} off)"
        self.note("packing", holds, "documents of a row do not see each other" if holds else found)

    def _load(self, ours: Streamed, loaded: Tensors) -> None:
        odd = unequal({**ours.tensors("weight"), **dict(ours.model.named_buffers())}, loaded)
        self._same("load", odd, "from_pretrained loads it")

    def _export(self, ours: Streamed, theirs: Path, out: Path) -> None:
        self._same("export", unequal(ours.export(out), stored(theirs)), "save_pretrained writes it")

    def _same(self, name: Name, odd: list[str], what: str) -> None:
        self.note(name, not odd, f"not as {what}: {some(odd)}" if odd else "equal to the bit")

    def _loss(self, found: float, wanted: float, bound: float) -> None:
        off = abs(found - wanted) / abs(wanted)
        self.note("loss", off <= bound, f"{off:.0e} off" if off else "equal to the bit")

    def _gradients(
        self, found: Tensors, wanted: Tensors, inexact: Collection[str], bound: float, reason: str
    ) -> None:
        """Those of parameters in `inexact` may be `bound` off, for this reason."""
        off = {name: distance(found[name], wanted[name]) for name in differing(found, wanted)}
        wrong = {name: far for name, far in off.items() if name not in inexact or not far <= bound}
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            what = f"{len(wrong)} of {len(wanted)} differ, {worst} by {wrong[worst]:.0e}"
            self.note("gradients", False, what)
            return
        if off:
            self.off[reason] = max(self.off.get(reason, 0.0), *off.values())
        notes = (f"; {why} ({far:.0e} off)" for why, far in self.off.items())
        self.note("gradients", True, "".join(["equal to the bit", *notes]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, transformers tells nothing of what is loaded and saved."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
