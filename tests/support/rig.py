"""A small model in training, put together like the trainer does, with every budget in the test's hand; and
its plain oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.stores import drives_in

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.device.device import CopyFaults, Device
from tierstream.engine.model.carve import units_of_run
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.frozen import freeze
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.parity.compare import by_parameter
from tierstream.engine.parity.twin import randomise
from tierstream.engine.plan import Plan, TiersConfig, make_plan
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import Runtime, StepOutcome
from tierstream.engine.trace.trace import Trace, TracedDirectory
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.engine.weights.state import PlaneWriter
from tierstream.io.backend import open_backend
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.stats import Faults
from tierstream.tiered.store import Store
from tierstream.tiered.zarrdir import ZarrDirectory

VOCABULARY, HIDDEN, SEQ_LEN, ROWS = 259, 44, 16, 5
LAYERS = 3

_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
}


def tiny_config(family: str = "llama", *, tied: bool = False, layers: int = LAYERS, **other: Any) -> Any:
    """Odd sizes on purpose: no tensor is a multiple of 512 bytes."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 77, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 22, "max_position_embeddings": 64,
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
        "use_cache": False,
    }  # fmt: skip
    return _CONFIGS[family](**{**settings, **other})


def reference_model(config: Any, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """The plain transformers model with seeded weights; biases and norms are moved off 0 and 1, so that their
    gradients count.
    """
    build = partial(transformers.AutoModelForCausalLM.from_config, config, attn_implementation=attention)
    torch.manual_seed(11)
    if config.model_type not in _CONFIGS:
        model = build(dtype=dtype)
        randomise(model)
        return model.train()
    model, values = build(dtype=dtype), build(dtype=torch.float32)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values.parameters(), strict=True):
            parameter.copy_(value if value.dim() >= 2 else value + 0.1 * torch.randn_like(value))
    return model.train()


def batches(count: int, *, rows: int = ROWS, seq_len: int = SEQ_LEN, seed: int = 5) -> list[Batch]:
    """Random rows; some labels are not trained on. In every second step documents begin inside rows."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, seq_len + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        positions = torch.arange(seq_len).repeat(rows, 1)
        if step % 2:
            begins = torch.randint(seq_len + 1, (rows, 1), generator=generator)
            positions -= begins * (positions >= begins)
        made.append(Batch(ids[:, :-1].contiguous(), labels, positions, int((labels != -100).sum())))
    return made


def on_device(batch: Batch, device: torch.device) -> Batch:
    tensors = (batch.input_ids, batch.labels, batch.position_ids)
    padding = None if batch.padding is None else batch.padding.to(device)
    return Batch(*(tensor.to(device) for tensor in tensors), batch.trained_tokens, padding)


@dataclass(frozen=True)
class Setup:
    """Everything that may vary between runs that must be equal to the bit."""

    config: Any = field(default_factory=tiny_config)
    dtype: str = "float32"
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2)
    )
    dram: int | None = None
    gpu_all: bool = False
    gpu: int | None = None
    expert_nbytes: int | None = None
    nvme: Path | None = None
    policy: str = "lookahead"
    prefetch: int | None = None
    page: int = 8192
    activations: str = "dram"
    rows_per_chunk: int = ROWS
    loss_chunk_tokens: int = 23
    z_loss_coef: float = 0.0
    rows: int = ROWS
    seq_len: int = SEQ_LEN
    total_updates: int = 20
    applied_updates: int = 0
    faults_seed: int | None = None
    device: str = "cpu"
    attention: str = "sdpa"
    moe: MoeConfig = field(default_factory=MoeConfig)
    threads: int = 2
    trace: bool = False
    freeze: list[str] | None = None
    train_only: list[str] | None = None
    prepare: Callable[[Any], None] = lambda model: None
    """May put other kernels into the model on `meta`."""

    def but(self, **changes: Any) -> Setup:
        return replace(self, **changes)


class Rig:
    """A runtime over a fresh store that holds the reference model's weights."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        faults = setup.faults_seed
        self.device = Device(setup.device, CopyFaults(faults) if faults is not None else None)
        model = _meta(setup)
        setup.prepare(model)
        _freeze(model, setup)
        self.units = units_of_run(model, setup.moe, setup.optimizer)
        self.plan, self.layout = plan_of(setup, self.units)
        self.backend = open_backend("posix", threads=2) if setup.nvme is not None else None
        self.directory = None
        if self.backend is not None and setup.nvme is not None:
            self.directory = ZarrDirectory.create(drives_in([setup.nvme], self.backend), self.layout, {})
        self.trace = Trace()
        if setup.trace:
            self.trace.start(1)
        register, unregister = self.device.pinning()
        self.store = Store(
            self.layout, register=register, unregister=unregister, dram_bytes=self.plan.dram_bytes,
            directory=None if self.directory is None else TracedDirectory(self.directory, self.trace),
            policy=setup.policy,
            prefetch_bytes=self.plan.prefetch_bytes, writeback_bytes=self.plan.writeback_bytes,
            debug=faults is not None, faults=None if faults is None else Faults(faults, 0.002),
        )  # fmt: skip
        self.reference = reference_model(setup.config, getattr(torch, setup.dtype), setup.attention)
        write = PlaneWriter(self.store, self.layout)
        values = dict(self.reference.named_parameters())
        for unit in self.units.in_forward_order:
            for tensor in unit.tensors:
                value = values[tensor.name].detach().float().numpy()
                write(unit.name, tensor.offset, value if tensor.part is None else value[tensor.part])
        materialise_buffers(model, None, setup.device)
        stored = self.reference.state_dict()  # buffers of a checkpoint among them
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.copy_(stored[name])
        self.runtime = Runtime(
            model, self.units, self.layout, self.plan, self.store, self.device, setup.optimizer, setup.moe,
            rows_per_chunk=setup.rows_per_chunk, loss_chunk_tokens=setup.loss_chunk_tokens,
            z_loss_coef=setup.z_loss_coef,
            total_updates=setup.total_updates, applied_updates=setup.applied_updates,
            threads=setup.threads, trace=self.trace,
        )  # fmt: skip

    def train(self, steps: list[Batch]) -> list[StepOutcome]:
        moved = [on_device(batch, self.device.torch_device) for batch in steps]
        return [self.runtime.step(batch) for batch in moved]

    def overwrite(self, name: str, values: torch.Tensor) -> None:
        """A parameter, before the first step."""
        write = PlaneWriter(self.store, self.layout)
        for unit in self.units.in_forward_order:
            for tensor in unit.tensors:
                if tensor.name == name:
                    write(unit.name, tensor.offset, values.float().numpy())

    def planes(self) -> dict[tuple[str, str], np.ndarray]:
        """Content of every durable plane, pending update included."""
        self.runtime.flush()
        return {key: self.plane(*key) for key, spec in self.layout.planes.items() if spec.durable}

    def plane(self, unit: str, plane: str) -> np.ndarray:
        self.runtime._gradients.wait_stored()
        spec = self.layout.spec(unit, plane)
        out = np.zeros(spec.numel, {2: np.uint16, 4: np.float32}[spec.item_bytes])
        if spec.durable or self.store.has_content(Page(unit, plane, 0)):  # idle experts have no gradient
            self.store.read_range(unit, plane, 0, out)
        return out

    def tensors(self, plane: str = "weight") -> dict[str, torch.Tensor]:
        """fp32 copies of one plane of every tensor that has it, by parameter name."""
        having = (unit for unit in self.units.in_forward_order if (unit.name, plane) in self.layout.planes)
        found = by_parameter(having, lambda unit: self.plane(unit.name, plane))
        return {name: value.float() for name, value in found.items()}

    def close(self) -> None:
        self.runtime.close()
        self.store.close()
        if self.directory is not None:
            self.directory.close()
        if self.backend is not None:
            self.backend.close()


def plan_of(setup: Setup, units: ModelUnits) -> tuple[Plan, Layout]:
    tiers = TiersConfig(
        gpu=ByteSize(1 << 40) if setup.gpu_all else None if setup.gpu is None else ByteSize(setup.gpu),
        dram=None if setup.dram is None else ByteSize(setup.dram),
        nvme_dirs=None if setup.nvme is None else [str(setup.nvme)],
        policy=setup.policy,  # type: ignore[arg-type]
        prefetch=None if setup.prefetch is None else ByteSize(setup.prefetch),
        page=ByteSize(setup.page),
        activations=setup.activations,  # type: ignore[arg-type]
    )
    return make_plan(
        tiers, setup.optimizer, units, rows=setup.rows, seq_len=setup.seq_len,
        device_in_host=setup.device == "cpu", update_threads=setup.threads, available_bytes=4 << 30,
        expert_nbytes=setup.expert_nbytes,
    )  # fmt: skip


@contextlib.contextmanager
def rig(setup: Setup) -> Iterator[Rig]:
    made = Rig(setup)
    try:
        yield made
    finally:
        made.close()


def same_bits(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> list[Any]:
    """Keys whose arrays differ in any bit (or that only one side has)."""
    return [
        key
        for key in a.keys() | b.keys()
        if key not in a or key not in b or a[key].tobytes() != b[key].tobytes()
    ]


def _meta(setup: Setup) -> Any:
    from transformers import initialization

    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model = transformers.AutoModelForCausalLM.from_config(
            setup.config, dtype=getattr(torch, setup.dtype), attn_implementation=setup.attention
        )
    return model.train()


def _freeze(model: Any, setup: Setup) -> None:
    freeze(model, ModelConfig(config="of the test", freeze=setup.freeze, train_only=setup.train_only))


def keep_gradients(run: Rig) -> dict[str, np.ndarray]:
    """Unit -> its fp32 gradient, as it is sent away in the steps that follow."""
    kept, gradients = {}, run.runtime._gradients
    close = gradients.close

    def closing(unit: Any) -> None:
        kept[unit.name] = gradients._open[unit.name][0].flat.numpy().copy()
        close(unit)

    gradients.close = closing  # type: ignore[method-assign]
    return kept


class PlainTraining:
    """The same run in plain transformers and torch: full model, one autograd graph, torch.optim.AdamW on fp32
    masters.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = reference_model(setup.config, getattr(torch, setup.dtype), setup.attention)
        _freeze(self.model, setup)
        self.masters = {
            name: p.detach().float().clone().requires_grad_()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        decayed = [p for p in self.masters.values() if p.dim() >= 2]
        plain = [p for p in self.masters.values() if p.dim() < 2]
        o = setup.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": o.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, foreach=False,
        )  # fmt: skip

    def step(self, batch: Batch, lr: float) -> tuple[float, float]:
        """(loss, grad norm before clipping)."""
        self.model.zero_grad()
        logits = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100
        )
        loss.backward()
        parameters = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            master.grad = parameters[name].grad.float()
        clip = self.setup.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), clip if clip is not None else 1e30)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                parameters[name].copy_(master)
        return loss.item(), norm.item()


def zeros_cross(run: Rig) -> None:
    """The long way: a gradient of zeros is summed, sent away, stored and read. The update before it must be
    done by then; nobody has waited for it, as who reads weights does.
    """
    gradients, updates, idle = run.runtime._gradients, run.runtime.updates, run.runtime._idle

    def absent(unit: Any) -> None:
        updates.queue.finish([unit.name])
        gradients.open(unit)
        gradients.close(unit)
        idle.names.discard(unit.name)  # it has a gradient

    gradients.absent = absent  # type: ignore[method-assign]
