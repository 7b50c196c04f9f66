"""Groups by pattern are those of torch.optim.AdamW, to the bit, whoever carries the update out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import moe_config
from support.rig import Rig, Setup, batches, keep_gradients, rig, same_bits, tiny_config, zeros_cross
from support.torch_adamw import CorrectlyRoundedSqrt, needs_torch_fma, one_torch_thread, padded  # noqa: F401

from tierstream import _native
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.update.optimizer import OptimizerConfig

STEPS = 4
#: What the patterns say, said again tensor by tensor in `expected_group`.
OPTIMIZER = OptimizerConfig(
    lr=1e-2, clip_norm=None, warmup_steps=2, weight_decay=0.5,
    lr_scale_by_name=["*.layers.1.mlp.*=0", "*.mlp.*=0.3", "*layernorm*=2.5"],
    weight_decay_by_name=["*embed_tokens*=0", "*.down_proj*=0.07"],
)  # fmt: skip


def expected_group(name: str, vector: bool) -> tuple[float, float]:
    scale = (
        0.0 if ".layers.1.mlp." in name else 0.3 if ".mlp." in name else 2.5 if "layernorm" in name else 1.0
    )
    decay = 0.0 if vector or "embed_tokens" in name else 0.07 if ".down_proj" in name else 0.5
    return scale, decay


class Torch:
    """torch.optim.AdamW over fp32 masters of a run, given the run's own gradients."""

    def __init__(self, run: Rig) -> None:
        self._sizes = {name: master.size for name, master in masters(run).items()}
        self._masters = {name: torch.nn.Parameter(padded(value)) for name, value in masters(run).items()}
        self._scales, groups = [], []
        shapes = {tensor.name: tensor.shape for unit in run.units.in_forward_order for tensor in unit.tensors}
        for name, master in self._masters.items():
            scale, decay = expected_group(name, len(shapes[name]) < 2)
            self._scales.append(scale)
            groups.append({"params": [master], "weight_decay": decay})
        c = run.setup.optimizer
        self._optimizer = torch.optim.AdamW(
            groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, foreach=False, fused=False
        )

    def step(self, lr: float, gradients: dict[str, np.ndarray]) -> None:
        for group, scale in zip(self._optimizer.param_groups, self._scales, strict=True):
            group["lr"] = lr * scale
        for name, master in self._masters.items():
            master.grad = padded(gradients[name])
        with CorrectlyRoundedSqrt():
            self._optimizer.step()

    @property
    def masters(self) -> dict[str, np.ndarray]:
        return {name: m.detach().numpy()[: self._sizes[name]] for name, m in self._masters.items()}


def masters(run: Rig) -> dict[str, np.ndarray]:
    """Tensor -> its fp32 values, flat; a pending update is not in them."""
    found = {}
    for unit in run.units.in_forward_order:
        planes = {plane: run.plane(name, plane) for name, plane in run.layout.planes if name == unit.name}
        flat = planes.get("master", planes["weight"])
        if "master_low" in planes:
            flat = np.empty(unit.numel, np.float32)
            _native.join_master(planes["weight"], planes["master_low"], flat)
        found |= {tensor.name: flat[tensor.offset : tensor.end] for tensor in unit.tensors}
    return found


def by_tensor(run: Rig, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    units = run.units.in_forward_order
    return {t.name: gradients[unit.name][t.offset : t.end] for unit in units for t in unit.tensors}


@needs_torch_fma
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("where", ["cpu", "device", "resident"])
@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", "split"), ("bfloat16", "fp32"), ("float32", "split")]
)
def test_groups_are_those_of_torch(where: str, dtype: str, master: str) -> None:
    optimizer = replace(OPTIMIZER, master=master, placement="gpu" if where == "device" else "cpu")
    setup = Setup(config=tiny_config("qwen2"), dtype=dtype, optimizer=optimizer, gpu_all=where == "resident")
    with rig(setup) as run:
        plain, gradients, begin = Torch(run), keep_gradients(run), masters(run)
        for batch in batches(STEPS):
            (outcome,) = run.train([batch])
            plain.step(outcome.verdict.lr, by_tensor(run, gradients))
        run.planes()
        found = masters(run)
    assert same_bits(found, plain.masters) == []
    moved = set(same_bits(found, begin))
    assert found.keys() - moved == {name for name in found if ".layers.1.mlp." in name}


@pytest.mark.parametrize("clip", [None, 0.05])
def test_groups_give_the_same_bits_in_every_tier(tmp_path: Path, clip: float | None) -> None:
    setup = Setup(
        dtype="bfloat16", config=tiny_config(tied=True), optimizer=replace(OPTIMIZER, clip_norm=clip)
    )
    found = []
    for made in (
        setup.but(gpu_all=True, activations="gpu"),
        setup,
        setup.but(nvme=tmp_path, dram=24 * setup.page),
        setup.but(optimizer=replace(setup.optimizer, placement="gpu")),
    ):
        with rig(made) as run:
            run.train(batches(STEPS))
            found.append(run.planes())
    assert [same_bits(found[0], other) for other in found[1:]] == [[], [], []]


@pytest.mark.parametrize("idle", ["dense", "lazy"])
def test_idle_experts_have_their_own_group(idle: str) -> None:
    """An expert that is put off catches up with its own rates: whole planes equal those of zero gradients."""
    optimizer = OptimizerConfig(
        lr=1e-2, clip_norm=0.5, warmup_steps=10, weight_decay=0.5,
        lr_scale_by_name=["*.layers.0.*.experts.*=0.2", "*.experts.down_proj=3"],
        weight_decay_by_name=["*.experts.down_proj=0.9"],
    )  # fmt: skip
    made = Setup(
        config=moe_config("olmoe", num_hidden_layers=2), dtype="bfloat16", rows=1, rows_per_chunk=1,
        seq_len=4, total_updates=40, optimizer=optimizer, moe=MoeConfig(idle=idle),  # type: ignore[arg-type]
    )  # fmt: skip
    steps = [batch for batch in batches(30, rows=1, seq_len=4) if batch.trained_tokens]
    with rig(made) as run:
        run.train(steps)
        found = run.planes()
    with rig(made.but(moe=MoeConfig(idle="dense"))) as run:
        zeros_cross(run)
        run.train(steps)
        expected = run.planes()
        groups = {tensor.group for own in run.units.experts for unit in own for tensor in unit.tensors}
    assert len(groups) == 4
    assert same_bits(found, expected) == []
