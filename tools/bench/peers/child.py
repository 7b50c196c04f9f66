"""What every peer does in its process: takes its job, builds its training, steps, answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, TextIO

import torch

from tierstream.engine.measure.resident import replace_parameters
from tierstream.engine.measure.train_bench import random_batch
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.initialise import init_weights
from tierstream.engine.model.meta_model import build_meta_model, materialise_buffers
from tierstream.engine.step.batch import Batch
from tierstream.io import memory
from tierstream.tools.bench.peers import Job, Turn


@dataclass(frozen=True)
class Training:
    """A model ready to be trained.

    Attributes:
        step: forward, backward and update over a batch; returns the loss, and the norm of the gradients
            before clipping or None.
        vocabulary: of the model.
        settings: all that was chosen for it.
        packages: whose versions matter.
    """

    step: Callable[[Batch], tuple[float, float | None]]
    vocabulary: int
    settings: dict[str, Any]
    packages: tuple[str, ...] = ()


def serve(build: Callable[[Job], Training]) -> None:
    """Answers until standard input ends; then the process ends at once, whatever it is doing."""
    commands, answers = _take_streams()
    received: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(commands, received), daemon=True).start()

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = Job(**received.get())
    training = build(job)
    batch = random_batch(training.vocabulary, job.rows, job.seq_len, job.device)
    versions = {name: version(name) for name in ("torch", "transformers", *training.packages)}
    answer({"settings": training.settings, "versions": versions})
    while True:
        answer(asdict(take_turn(training, batch, received.get()["steps"])))


def take_turn(training: Training, batch: Batch, steps: int) -> Turn:
    """Some steps with their times and memory."""
    device = batch.input_ids.device
    memory.reset_peak_rss()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    cpu, begin = time.process_time(), time.perf_counter()
    outcomes = [training.step(batch) for _ in range(steps)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Turn(
        seconds=time.perf_counter() - begin,
        cpu_s=time.process_time() - cpu,
        losses=[loss for loss, _ in outcomes],
        grad_norms=[norm for _, norm in outcomes],
        gpu_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        host_peak_bytes=memory.peak_rss_bytes(),
    )


def build_model(job: Job, dtype: str) -> Any:
    """The model in host memory with the weights that our own runs start from, recomputing its layers in
    backward.

    Args:
        dtype: of its parameters.
    """
    model, _ = build_meta_model(ModelConfig(config=job.config, dtype=dtype))  # type: ignore[arg-type]
    units = find_units(model)
    specs = {(unit.name, spec.offset): spec for unit in units.in_forward_order for spec in unit.tensors}
    parameters = {
        name: torch.nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype))
        for name, meta in model.named_parameters()
    }

    def keep(unit: str, offset: int, values: Any) -> None:
        spec = specs[unit, offset]
        parameter = parameters[spec.name].detach()
        place = parameter if spec.part is None else parameter[spec.part]
        place.copy_(torch.from_numpy(values).view(spec.shape))

    init_weights(model, units.in_forward_order, job.seed, keep)
    replace_parameters(model, parameters)
    materialise_buffers(model, None, "cpu")
    if job.kernels == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        # The loss with its matrix product: logits of all tokens never exist.
        apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=True, model=model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def parameter_groups(model: Any, decayed: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for AdamW: only those of these names decay."""
    names = set(decayed)
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[name in names].append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for decays, members in groups.items()
    ]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Mean loss, by the model's own code; labels are shifted already."""
    loss: torch.Tensor = model(
        input_ids=batch.input_ids, labels=batch.labels, shift_labels=batch.labels, use_cache=False
    ).loss
    return loss


def _take_streams() -> tuple[TextIO, TextIO]:
    """Standard input and output for us alone: what others print goes to standard error."""
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, answers


def _listen(commands: TextIO, received: SimpleQueue[dict[str, Any]]) -> None:
    for line in commands:
        received.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)  # a step may be under way, or compilers of ours
