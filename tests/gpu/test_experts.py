"""Experts in groups on a CUDA device: the same bits whatever the room for them, and those of transformers."""

from __future__ import annotations

import pytest
import torch
from support.families import moe_config
from support.rig import PlainTraining, Setup, batches, on_device, rig, same_bits

from tierstream.engine.update.optimizer import OptimizerConfig

pytestmark = pytest.mark.gpu

FAMILIES = ["olmoe", "qwen3_moe", "gpt_oss"]


def setup(family: str, dtype: str = "bfloat16") -> Setup:
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.5)
    return Setup(
        config=moe_config(family), dtype=dtype, optimizer=optimizer, device="cuda",
        attention="eager" if family == "gpt_oss" else "sdpa", page=65536, loss_chunk_tokens=10_000,
    )  # fmt: skip


def expert_nbytes(made: Setup) -> int:
    with rig(made) as run:
        units = [unit for own in run.units.experts for unit in own]
    return max(unit.numel for unit in units) * (2 if made.dtype == "bfloat16" else 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_room_for_experts_changes_no_bit(family: str, dtype: str) -> None:
    base = setup(family, dtype)
    size, steps, found = expert_nbytes(base), batches(3), []
    for count in (1, 4, 24):
        with rig(base.but(expert_nbytes=count * size, faults_seed=count)) as run:
            outcomes = run.train(steps)
            found.append(([(o.loss, o.verdict.grad_norm) for o in outcomes], run.planes()))
    for losses, planes in found[:-1]:
        assert losses == found[-1][0]
        assert same_bits(planes, found[-1][1]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str) -> None:
    made = setup(family)
    (batch,) = batches(1)
    plain = PlainTraining(made)
    moved = on_device(batch, torch.device("cuda"))
    model = plain.model.to("cuda")
    logits = model(input_ids=moved.input_ids, position_ids=moved.position_ids, use_cache=False).logits
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), moved.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (summed / batch.trained_tokens).backward()
    with rig(made) as run:
        outcome = run.train([batch])[0]
        found = run.tensors("grad")
    assert outcome.loss == pytest.approx(summed.item() / batch.trained_tokens, rel=1e-4)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.float().cpu()
        assert (found[name] - expected).norm() <= 2e-2 * expected.norm(), name
