"""The z-loss of the logits: autograd's numbers, and the same bits wherever the state is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rig import PlainTraining, Setup, batches, rig, same_bits, tiny_config

COEF = 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_are_those_of_autograd(tied: bool) -> None:
    setup = Setup(config=tiny_config("qwen3", tied=tied), z_loss_coef=COEF)
    plain = PlainTraining(setup)
    (batch,) = batches(1)
    logits = plain.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    trained = batch.labels != -100
    cross_entropy = torch.nn.functional.cross_entropy(logits[trained], batch.labels[trained])
    z_loss = torch.logsumexp(logits[trained], -1).square().mean()
    (cross_entropy + COEF * z_loss).backward()
    with rig(setup) as run:
        (outcome,) = run.train([batch])
        gradients = run.tensors("grad")
    assert outcome.loss == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert outcome.z_loss == pytest.approx(z_loss.item(), rel=1e-6)
    for name, parameter in plain.model.named_parameters():
        difference = (gradients[name] - parameter.grad).norm()
        assert difference <= 1e-6 * parameter.grad.norm(), name


def test_tiers_agree_to_the_bit(tmp_path: Path) -> None:
    setup = Setup(dtype="bfloat16", z_loss_coef=COEF, rows_per_chunk=2)
    found = []
    for made in (
        setup.but(gpu_all=True, activations="gpu"),
        setup.but(nvme=tmp_path / "drive", dram=24 * setup.page, faults_seed=1),
    ):
        with rig(made) as run:
            found.append((run.train(batches(3)), run.planes()))
    (outcomes, planes), (others, other_planes) = found
    assert outcomes == others
    assert same_bits(planes, other_planes) == []


def test_without_a_coefficient_none_is_told() -> None:
    with rig(Setup()) as run:
        assert run.train(batches(1))[0].z_loss is None
