"""A small model, streamed and in plain transformers: what is the same, to the bit.

Both begin with one model directory, written by `save_pretrained`. transformers loads it, and so do we; the
loaded values are compared, then what we export of them, then loss and gradients of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from tierstream.engine import assemble
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.device.device import Device
from tierstream.engine.export.export import export_model
from tierstream.engine.model.carve import TORCH_DTYPES, units_of_run
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_of
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.parity.twin import randomise
from tierstream.engine.plan import TiersConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import Runtime
from tierstream.engine.weights.fill import FirstValues
from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.source import LoadPlan, plan_load
from tierstream.tiered.layout import Page, Unit
from tierstream.tiered.store import Store

Tensors = Mapping[str, torch.Tensor]
ROWS, SEQ_LEN = 3, 16
_SEED = 3


def reference_model(hf_config: Any, config: ModelConfig, folder: Path) -> Any:
    """Plain transformers: a model with random weights, as `from_pretrained` loads it from `folder`, where it
    is written first; then as it was loaded.
    """
    from transformers import AutoModelForCausalLM

    meta, _ = build_of(hf_config, config)  # says which attention it has
    options = {"dtype": TORCH_DTYPES[config.dtype], "attn_implementation": meta.config._attn_implementation}
    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code, **options)
    randomise(model)
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, **options).train()
    loaded.save_pretrained(folder)  # transformers 5.17 widens buffers of routers when it loads them
    _align(loaded)
    return loaded


def _align(model: Any) -> None:
    """Moves parameters and buffers to multiples of 64 bytes, where units have theirs; in the mapped file they
    lie anywhere. In what order a product adds up may depend on the address: with MKL on AMD's processors that
    of a matrix and a vector does, on it modulo 16.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def packed_batch(vocabulary: int, device: torch.device) -> Batch:
    """Rows of one, two and three documents; some labels are not trained on."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(3, vocabulary, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    positions = torch.arange(SEQ_LEN).repeat(ROWS, 1)
    for row, begins in ((1, (7,)), (2, (4, 11))):
        for begin in begins:
            positions[row, begin:] = torch.arange(SEQ_LEN - begin)
    tokens, trained = ids[:, :-1].contiguous(), int((labels != -100).sum())
    return Batch(tokens.to(device), labels.to(device), positions.to(device), trained)


def plain_step(model: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, in fp32, of transformers' own model; a parameter that has none: zero."""
    torch.manual_seed(_SEED)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (loss / batch.trained_tokens).backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).float().cpu()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return loss.double().item() / batch.trained_tokens, gradients


@torch.no_grad()
def seen_beyond_documents(model: Any, batch: Batch) -> float:
    """How far logits of documents that share a row are from those of each alone, relative to their size."""
    model.eval()
    together = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    worst = 0.0
    for row, positions in enumerate(batch.position_ids):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for begin, end in pairwise(begins):
            ids = batch.input_ids[row : row + 1, begin:end]
            at = torch.arange(end - begin, device=ids.device)[None]
            alone = model(input_ids=ids, position_ids=at, use_cache=False).logits
            worst = max(worst, distance(together[row : row + 1, begin:end], alone))
    model.train()
    return worst


@dataclass
class Streamed:
    """The same model directory in a store of its own, in training."""

    model: Any
    units: ModelUnits
    weights: LoadPlan
    store: Store
    runtime: Runtime

    def plane(self, unit: str, plane: str) -> np.ndarray:
        layout = self.store.layout
        if (unit, plane) not in layout.planes:  # what a family never trains has no gradient
            return np.zeros(layout.spec(unit, "weight").numel, np.float32)
        spec = layout.spec(unit, plane)
        out = np.zeros(spec.numel, {2: np.uint16, 4: np.float32}[spec.item_bytes])
        if self.store.has_content(Page(unit, plane, 0)):  # experts without tokens have no gradient
            self.store.read_range(unit, plane, 0, out)
        return out

    def tensors(self, plane: str) -> dict[str, torch.Tensor]:
        """One plane of every parameter."""
        return by_parameter(self.units.in_forward_order, lambda unit: self.plane(unit.name, plane))

    def step(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients."""
        torch.manual_seed(_SEED)
        outcome = self.runtime.step(batch)
        self.runtime._gradients.wait_stored()
        return outcome.loss, self.tensors("grad")

    def export(self, folder: Path) -> dict[str, torch.Tensor]:
        """What an export of it holds."""

        def read(unit: str, start: int, out: np.ndarray) -> None:
            self.store.read_range(unit, "weight", start, out)

        export_model(read, self.model, self.units.in_forward_order, folder, source=self.weights)
        return stored(folder)


@contextmanager
def streamed(
    hf_config: Any, config: ModelConfig, folder: Path, moe: MoeConfig, device_name: str
) -> Iterator[Streamed]:
    """Within, the model of `folder` is ready for a step, put together as a run does it."""
    run = RunConfig(
        run_dir=str(folder),
        model=config,
        data=DataConfig(files=["-"], seq_len=SEQ_LEN),
        moe=moe,
        tiers=TiersConfig(page=ByteSize(1 << 16)),
        train=TrainConfig(rows_per_step=ROWS, device=device_name),
    )
    with ExitStack() as parts:
        model, _ = build_of(hf_config, config)
        units = units_of_run(model, run.moe, run.optimizer)
        device = Device(device_name)
        plan, layout = assemble.plan_run(run, units, device)
        weights = plan_load(model, open_checkpoint(folder))
        store = assemble.build_store(run, layout, plan, None, device, debug=True)
        parts.callback(store.close)
        FirstValues(run, model, units, None, weights).fill(layout, store, device)
        runtime = assemble.build_runtime(run, model, units, layout, plan, store, device, total_updates=1)
        parts.callback(runtime.close)
        yield Streamed(model, units, weights, store, runtime)


def by_parameter(units: Iterable[Unit], plane: Callable[[Unit], np.ndarray]) -> dict[str, torch.Tensor]:
    """What flat planes hold (fp32, or bfloat16 as uint16), by parameter; experts are stacked again."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for unit in units:
        flat = torch.from_numpy(plane(unit))
        flat = flat.view(torch.bfloat16) if flat.dtype == torch.uint16 else flat
        for tensor in unit.tensors:
            value = flat[tensor.offset : tensor.end].view(tensor.shape)
            if tensor.part is None:
                found[tensor.name] = value
            else:
                stacks.setdefault(tensor.name, []).append(value)
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory."""
    files = sorted(folder.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of `expected`; NaN is infinitely far."""
    size = expected.float().norm().clamp(min=1e-12)
    apart = ((found.float() - expected.float()).norm() / size).item()
    return apart if apart == apart else float("inf")


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names of those that differ in a value, as fp32."""
    return [name for name, value in expected.items() if not torch.equal(found[name].float(), value.float())]


def unequal(found: Tensors, expected: Tensors) -> list[str]:
    """Names that are on one side only, or whose tensors differ in type, shape or a bit."""
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name].cpu(), expected[name].detach().cpu())
    ]
