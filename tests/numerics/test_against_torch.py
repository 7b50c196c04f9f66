"""The resident run against plain transformers + torch.optim.AdamW: one autograd graph, no streaming, fp32
masters.
"""

from __future__ import annotations

import pytest
import torch
from support.rig import PlainTraining, Setup, batches, rig, tiny_config

from tierstream.engine.update.optimizer import OptimizerConfig

STEPS = 20


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_twenty_steps_in_fp32_agree_to_rounding(family: str, tied: bool) -> None:
    """lr is small enough that AdamW's division by a tiny second moment does not blow rounding up."""
    setup = Setup(
        config=tiny_config(family, tied=tied), total_updates=STEPS,
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=0.5, warmup_steps=2, eps=1e-6),
    )  # fmt: skip
    plain = PlainTraining(setup)
    with rig(setup) as run:
        steps = batches(STEPS)
        outcomes = run.train(steps)
        for batch, outcome in zip(steps, outcomes, strict=True):
            loss, norm = plain.step(batch, outcome.verdict.lr)
            assert outcome.loss == pytest.approx(loss, rel=2e-6)
            assert outcome.verdict.grad_norm == pytest.approx(norm, rel=2e-5)
            assert outcome.verdict.clip_factor == pytest.approx(min(1.0, 0.5 / (norm + 1e-6)), rel=2e-5)
        run.runtime.flush()
        for name, tensor in run.tensors().items():
            torch.testing.assert_close(tensor, plain.masters[name].detach(), rtol=1e-5, atol=2e-6, msg=name)
        moments = run.tensors("exp_avg")
        for name, master in plain.masters.items():
            expected = plain.optimizer.state[master]["exp_avg"]
            torch.testing.assert_close(moments[name], expected, rtol=1e-3, atol=1e-7, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_one_chunk_equal_autograd(tied: bool) -> None:
    """With one row chunk and one loss chunk the layers do the very operations of the plain graph: equal to
    the bit.
    """
    setup = Setup(config=tiny_config("qwen3", tied=tied), loss_chunk_tokens=10_000)
    plain = PlainTraining(setup)
    (batch,) = batches(1)
    logits = plain.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (summed / batch.trained_tokens).backward()
    with rig(setup) as run:
        run.train([batch])
        gradients = run.tensors("grad")
    different = []
    for name, parameter in plain.model.named_parameters():
        if "embed_tokens" in name:  # rows of one token are added in another order
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
        elif not torch.equal(gradients[name], parameter.grad):
            different.append(name)
    assert different == []


def test_bf16_stays_near_plain_bf16() -> None:
    setup = Setup(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3, clip_norm=None), total_updates=STEPS)
    plain = PlainTraining(setup)
    with rig(setup) as run:
        steps = batches(STEPS)
        outcomes = run.train(steps)
        for batch, outcome in zip(steps, outcomes, strict=True):
            loss, norm = plain.step(batch, outcome.verdict.lr)
            assert outcome.loss == pytest.approx(loss, rel=2e-3)
            assert outcome.verdict.grad_norm == pytest.approx(norm, rel=3e-2)


def test_row_chunks_and_loss_chunks_change_only_the_order_of_sums() -> None:
    setup = Setup()
    (batch,) = batches(1)
    with rig(setup.but(loss_chunk_tokens=10_000)) as run:
        whole = run.train([batch])[0]
        expected = run.tensors("grad")
    for rows, tokens in [(1, 7), (2, 23), (5, 16)]:
        with rig(setup.but(rows_per_chunk=rows, loss_chunk_tokens=tokens)) as run:
            outcome = run.train([batch])[0]
            assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
            for name, gradient in run.tensors("grad").items():
                torch.testing.assert_close(gradient, expected[name], rtol=2e-5, atol=1e-8, msg=name)
