"""Evaluation: the plain loss of transformers, the same bits wherever the state is, and training unmoved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.families import moe_config
from support.rig import Rig, Setup, batches, rig, same_bits, tiny_config

from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig

SET = batches(2, seed=17)
DENSE = Setup(
    config=tiny_config("qwen3", tied=True), dtype="bfloat16", rows_per_chunk=2,
    optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.05, warmup_steps=1),
)  # fmt: skip
MIXTURE = DENSE.but(config=moe_config("qwen3_moe"), rows_per_chunk=5)


def plain_loss(run: Rig, steps: Sequence[Batch]) -> float:
    """The whole model with the weights of now, one graph, no dropout."""
    dtype = getattr(torch, run.setup.dtype)
    model = transformers.AutoModelForCausalLM.from_config(run.setup.config, dtype=dtype).eval()
    weights = run.tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        total = 0.0
        for batch in steps:
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
            total += torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
            ).double().item()  # fmt: skip
    return total / sum(batch.trained_tokens for batch in steps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_plain_model_to_the_bit(tied: bool, dtype: str) -> None:
    """After two steps, the update of the second still to be carried out."""
    config = tiny_config("qwen3", tied=tied, attention_dropout=0.5)
    with rig(DENSE.but(config=config, dtype=dtype, rows_per_chunk=5, loss_chunk_tokens=10_000)) as run:
        run.train(batches(2))
        loss, trained_tokens = run.runtime.evaluate(SET)
        run.runtime.flush()
        assert loss == plain_loss(run, SET)
        assert trained_tokens == sum(batch.trained_tokens for batch in SET)


def test_the_loss_is_summed_over_all_tokens_and_divided_once() -> None:
    few = Batch(SET[0].input_ids, SET[0].labels.clone(), SET[0].position_ids, 3)
    few.labels.flatten()[:].masked_fill_(torch.arange(few.labels.numel()) >= 3, -100)
    few = replace(few, trained_tokens=int((few.labels != -100).sum()))
    none = replace(few, labels=torch.full_like(few.labels, -100), trained_tokens=0)
    with rig(DENSE) as run:
        parts = [run.runtime.evaluate([batch]) for batch in (SET[1], few)]
        loss, tokens = run.runtime.evaluate([SET[1], none, few])
        assert tokens == sum(count for _, count in parts)
        assert loss == pytest.approx(sum(loss * count for loss, count in parts) / tokens, rel=1e-12)
        assert math.isnan(run.runtime.evaluate([none])[0])


def evaluations(setup: Setup) -> list[float]:
    """Before, between and after two steps, and once more."""
    steps = batches(2)
    with rig(setup) as run:
        found = [run.runtime.evaluate(SET)[0]]
        for step in steps:
            run.train([step])
            found.append(run.runtime.evaluate(SET)[0])
        return [*found, run.runtime.evaluate(SET)[0]]


@pytest.mark.parametrize("base", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_every_tier_gives_the_same_bits(tmp_path: Path, base: Setup) -> None:
    frames = 24 if base is DENSE else 40
    resident = evaluations(base.but(gpu_all=True, activations="gpu"))
    assert resident[2] == resident[3] != resident[1]
    assert evaluations(base) == resident
    for policy in ("lookahead", "lru"):
        drive = base.but(nvme=tmp_path / policy, dram=frames * base.page, policy=policy, faults_seed=3)
        assert evaluations(drive) == resident


EARLY = replace(DENSE.optimizer, clip_norm=None, check_finite=False)
SETUPS = {
    "deferred": DENSE,
    "in backward": DENSE.but(optimizer=EARLY),
    "resident": DENSE.but(gpu_all=True),
    "dropout": DENSE.but(config=tiny_config("qwen3", attention_dropout=0.2)),
    "idle dense": MIXTURE.but(moe=MoeConfig(idle="dense")),
    "idle lazy": MIXTURE.but(moe=MoeConfig(idle="lazy", aux_loss_coef=0.01, z_loss_coef=0.01)),
    "lazy in backward": MIXTURE.but(moe=MoeConfig(idle="lazy"), optimizer=EARLY),
    "biases": MIXTURE.but(config=moe_config("deepseek_v3"), moe=MoeConfig(bias_update_rate=0.01)),
    "jitter": MIXTURE.but(config=moe_config("phimoe")),
}  # fmt: skip


ON_DRIVE = ("deferred", "in backward", "idle lazy", "lazy in backward")


@pytest.mark.parametrize(
    ("name", "on_drive"), [*((name, False) for name in SETUPS), *((name, True) for name in ON_DRIVE)]
)
def test_training_is_the_same_with_and_without_evaluation(tmp_path: Path, name: str, on_drive: bool) -> None:
    setup = SETUPS[name]
    if on_drive:
        setup = setup.but(nvme=tmp_path / "drive", dram=48 * setup.page, faults_seed=5)
    found = []
    for evaluate in (False, True):
        with rig(setup) as run:
            outcomes = []
            for step, batch in enumerate(batches(3)):
                torch.manual_seed(step)
                outcomes += run.train([batch])
                if evaluate and step % 2 == 0:
                    run.runtime.evaluate(SET)
            biases = {key: value.clone() for key, value in run.runtime.model.named_buffers()}
            found.append((outcomes, run.planes(), biases))
    (outcomes, planes, buffers), (others, other_planes, other_buffers) = found
    assert others == outcomes
    assert same_bits(planes, other_planes) == []
    assert all(torch.equal(buffers[key], other_buffers[key]) for key in buffers)
