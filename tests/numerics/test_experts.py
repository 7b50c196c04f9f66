"""Experts streamed one by one against transformers' own: loss and every gradient, routing, who is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.families import MOE_FAMILIES, moe_config
from support.rig import PlainTraining, Setup, batches, rig, same_bits

from tierstream.engine.device.device import PRODUCT_ROWS, Device
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig

Gradients = dict[str, torch.Tensor]


def setup(family: str, **changes: object) -> Setup:
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    made = Setup(config=moe_config(family), optimizer=optimizer, attention=attention, page=4096)
    return made.but(loss_chunk_tokens=10_000, **changes)


def plain_gradients(made: Setup, batch: Batch) -> tuple[float, Gradients]:
    """With an expert's tokens in order, as ours are: transformers sorts them, but not stably."""
    plain = PlainTraining(made)
    torch.manual_seed(3)
    with mock.patch.object(torch, "sort", partial(torch.sort, stable=True)):
        logits = plain.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (summed / batch.trained_tokens).backward()
    return summed.item() / batch.trained_tokens, {
        name: p.grad.float() for name, p in plain.model.named_parameters()
    }


def compare(made: Setup) -> tuple[Gradients, Gradients]:
    """Gradients of one step, streamed and plain; the losses are equal to rounding."""
    (batch,) = batches(1)
    loss, expected = plain_gradients(made, batch)
    with rig(made) as run:
        torch.manual_seed(3)
        outcome = run.train([batch])[0]
        found = run.tensors("grad")
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    return found, expected


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_loss_and_gradients_in_bf16(family: str) -> None:
    """The products and sums of grouped_mm in its order, and so to the bit, but for rows of the embedding, and
    biases of experts: transformers adds gradients of their rows up in bf16 (0.9 % off), we in fp32.
    """
    found, expected = compare(setup(family, dtype="bfloat16"))
    different = {
        name: distance(found[name], grad)
        for name, grad in expected.items()
        if "embed" not in name and not torch.equal(found[name], grad)
    }
    biases = {name for name in expected if name.endswith(("up_proj_bias", "down_proj_bias"))}
    assert different.keys() <= biases
    assert not {name: d for name, d in different.items() if not d <= 1e-2}


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_loss_and_gradients_in_fp32(family: str) -> None:
    found, expected = compare(setup(family))
    far = {name: distance(found[name], grad) for name, grad in expected.items()}
    assert not {name: d for name, d in far.items() if not d <= 1e-6}


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_kernel_for_groups_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """As on a GPU that has one; and rows of zeros below, as on another."""
    made = setup(family, dtype="bfloat16")
    alone, _ = compare(made)
    monkeypatch.setattr(Device, "multiplies_groups", True)
    together, _ = compare(made)
    assert [name for name, grad in alone.items() if not torch.equal(together[name], grad)] == []
    monkeypatch.setattr(Device, "multiplies_groups", False)
    monkeypatch.setitem(PRODUCT_ROWS, "cpu", 8)
    padded, _ = compare(made)
    assert [name for name, grad in alone.items() if not distance(padded[name], grad) <= 1e-2] == []


#: Room on the device for one expert, for half a layer's, for all; and whether drives hold the state.
PLACES = {"float32": [(1, True), (24, False)], "bfloat16": [(4, True)]}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(MOE_FAMILIES)),
        ("gpt_oss", "bfloat16"),
    ],
)
def test_every_place_gives_the_same_bits(tmp_path: Path, family: str, dtype: str) -> None:
    """Idle experts among them, skipped outputs poisoned, copies delayed."""
    base = setup(family, dtype=dtype)
    steps = batches(2)

    def result(made: Setup) -> tuple[list[tuple[float, float]], dict[tuple[str, str], object]]:
        torch.manual_seed(3)
        with rig(made) as run:
            outcomes = run.train(steps)
            return [(o.loss, o.verdict.grad_norm) for o in outcomes], run.planes()

    with rig(base) as run:
        expert_nbytes = max(
            unit.numel * (2 if dtype == "bfloat16" else 4) for own in run.units.experts for unit in own
        )
    expected = result(base.but(expert_nbytes=24 * expert_nbytes, activations="gpu", gpu_all=True))
    for count, on_drive in PLACES[dtype]:
        made = base.but(expert_nbytes=count * expert_nbytes, faults_seed=count)
        if on_drive:
            made = made.but(nvme=tmp_path / str(count), dram=40 * made.page)
        losses, planes = result(made)
        assert losses == expected[0]
        assert same_bits(planes, expected[1]) == []
