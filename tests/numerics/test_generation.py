"""Texts written while layers are streamed: the ids of transformers' `generate`, on every tier, and training
goes on as if there had been none.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.families import EAGER_ONLY, FAMILIES, family_config, moe_config
from support.rig import Rig, Setup, batches, rig, same_bits, tiny_config

from tierstream.engine.model import sink_attention
from tierstream.engine.step.generation import Draw, generate
from tierstream.engine.update.optimizer import OptimizerConfig

TOKENS = 8
PROMPTS = [[5, 9, 77, 30, 8, 200, 41], [17, 4], [250, 3, 60, 60, 61]]
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=1)


def of_transformers(run: Rig, prompts: list[list[int]], attention: str = "eager") -> list[list[int]]:
    """Each by itself, greedily, by the resident model with the weights of now."""
    config = copy.deepcopy(run.setup.config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, run.setup.dtype), attn_implementation=attention
    ).eval()
    weights, buffers = run.tensors(), dict(run.runtime.model.named_buffers())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, use_cache=True,
            eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        found.append(output[0, len(prompt) :].tolist())
    return found


def written(run: Rig, **keys: Any) -> list[list[int]]:
    return generate(run.runtime, PROMPTS, max_tokens=TOKENS, end_ids={2}, **keys)


CONFIGS = {
    "qwen3": tiny_config("qwen3", tied=True),
    "window": tiny_config("mistral", sliding_window=4),
    **{f"small {family}": family_config(family) for family in FAMILIES},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_ids_are_those_of_generate(family: str) -> None:
    """After a step, its update still to be carried out; prompts of three lengths at once."""
    attention = "eager" if family.removeprefix("small ") in EAGER_ONLY else "sdpa"
    setup = Setup(config=CONFIGS[family], optimizer=OPTIMIZER, attention=attention)
    with rig(setup) as run:
        run.train(batches(1))
        found = written(run)
        run.runtime.flush()
        assert found == of_transformers(run, PROMPTS, attention)
        assert all(len(row) == TOKENS or row[-1] == 2 for row in found)


def test_attention_with_sinks_has_a_cache_in_generation_only() -> None:
    sink_attention.register()
    setup = Setup(config=moe_config("gpt_oss"), optimizer=OPTIMIZER, attention=sink_attention.NAME)
    with rig(setup) as run:
        found = written(run)
        assert found == of_transformers(run, PROMPTS)
        assert run.runtime.model.config._attn_implementation == sink_attention.NAME
        run.train(batches(1))


@pytest.mark.parametrize("config", [tiny_config("qwen3"), moe_config("qwen3_moe")], ids=["dense", "mixture"])
def test_tiers_agree_and_training_goes_on_unmoved(tmp_path: Path, config: Any) -> None:
    setup = Setup(config=config, dtype="bfloat16", optimizer=OPTIMIZER)
    drive = setup.but(nvme=tmp_path / "drive", dram=48 * setup.page, faults_seed=4)
    found = []
    for made, write in ((setup.but(gpu_all=True), True), (drive, True), (setup, False)):
        texts, outcomes = [], []
        with rig(made) as run:
            for batch in batches(2):
                if write:
                    texts.append(written(run))
                    drawn = Draw(0.8, 0.9, torch.Generator().manual_seed(7))
                    texts.append(written(run, choose=drawn))
                outcomes += run.train([batch])
            found.append((texts, outcomes, run.planes()))
    assert found[0][0] == found[1][0]
    for _, outcomes, planes in found[1:]:
        assert outcomes == found[0][1]
        assert same_bits(planes, found[0][2]) == []


def test_weights_come_once_for_a_token_of_all_prompts() -> None:
    with rig(Setup(config=tiny_config("llama"), optimizer=OPTIMIZER)) as run:
        begin = run.runtime.traffic()
        written(run)
        moved = run.runtime.traffic().since(begin).bytes_written["gpu"]
        weights = sum(run.layout.spec(unit.name, "weight").nbytes for unit in run.units.in_forward_order)
        assert moved <= TOKENS * weights


def test_a_row_that_has_ended_stays_so() -> None:
    tokens = iter([[4, 4, 2], [2, 4, 9], [9, 2, 9]])
    with rig(Setup(config=tiny_config("llama"))) as run:
        found = written(run, choose=lambda logits: torch.tensor(next(tokens)))
    assert found == [[4, 2], [4, 4, 2], [2]]


def test_draws_are_from_the_likeliest_tokens() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])).repeat(200, 1)
    drawn = Draw(1.0, 0.7, torch.Generator().manual_seed(0))(logits)
    assert set(drawn[::2].tolist()) == {1, 2}
    assert set(drawn[1::2].tolist()) == {0, 2}
    share = (drawn[::2] == 1).double().mean().item()
    assert share == pytest.approx(2 / 3, abs=0.1)
    cold = Draw(0.05, 1.0, torch.Generator().manual_seed(0))(logits)
    assert set(cold[::2].tolist()) == {1}
