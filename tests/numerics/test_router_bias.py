"""Correction biases move towards equal load, once per applied step, and survive checkpoint and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.families import moe_config
from support.rig import Setup, batches, rig
from support.runs import VOCABULARY, final_planes, make_run, train

from tierstream.engine.config import RunConfig
from tierstream.engine.model.carve import experts_of
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.moe.router_bias import biases_of
from tierstream.engine.step.batch import Batch
from tierstream.io.errors import ConfigError
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools.export import ExportOptions, export

RATE = 0.01


def setup(family: str, stream: Any = "experts") -> Setup:
    moe = MoeConfig(bias_update_rate=RATE, stream=stream)
    return Setup(config=moe_config(family), moe=moe, page=4096)


@pytest.mark.parametrize("stream", ["experts", "layers"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_bias_moves_towards_equal_load(family: str, stream: Any) -> None:
    made = setup(family, stream).but(rows_per_chunk=2 if stream == "layers" else 5)
    with rig(made) as run:
        biases = list(biases_of(run.runtime.model).values())
        chosen: list[list[torch.Tensor]] = [[] for _ in biases]
        modules = [experts_of(layer) for layer in run.runtime.model.get_decoder().layers]
        for module, indices in zip(filter(None, modules), chosen, strict=True):
            module.register_forward_pre_hook(
                lambda _, args, indices=indices: None if torch.is_grad_enabled() else indices.append(args[1])
            )
        for batch in batches(3):
            padding = torch.zeros_like(batch.labels, dtype=torch.bool)
            padding[:, 11:] = True
            labels = batch.labels.masked_fill(padding, -100)
            trained_tokens = int((labels != -100).sum())
            before = [bias.clone() for bias in biases]
            run.train([Batch(batch.input_ids, labels, batch.position_ids, trained_tokens, padding)])
            for bias, old, indices in zip(biases, before, chosen, strict=True):
                kept = torch.cat(indices)[~padding.flatten()]
                loads = torch.bincount(kept.flatten(), minlength=len(bias)).double()
                assert torch.equal(bias, old + RATE * torch.sign(loads.mean() - loads).float())
                assert not torch.equal(bias, old)
                indices.clear()


def test_a_skipped_step_moves_no_bias() -> None:
    with rig(setup("deepseek_v3")) as run:
        run.overwrite("model.norm.weight", torch.full((run.setup.config.hidden_size,), torch.nan))
        before = [bias.clone() for bias in biases_of(run.runtime.model).values()]
        (outcome,) = run.train(batches(1))
        assert outcome.verdict.skipped
        assert all(map(torch.equal, before, biases_of(run.runtime.model).values()))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_family_without_such_a_bias_is_refused(family: str) -> None:
    made = setup(family).but(attention="eager")
    with (
        pytest.raises(ConfigError, match=r"moe\.bias_update_rate is 0\.01, but .* no fp32 buffer"),
        rig(made),
    ):
        pass


def moe_run(folder: Path, family: str, moe: MoeConfig) -> RunConfig:
    config = make_run(folder, steps=4)
    moe_config(family, vocab_size=VOCABULARY).save_pretrained(folder / "model")
    config.train.rows_per_chunk, config.moe = None, moe
    config.checkpoint.every_steps, config.checkpoint.keep = 2, 4
    return config


def test_biases_are_saved_restored_and_exported(tmp_path: Path) -> None:
    moe = MoeConfig(bias_update_rate=RATE)
    config = moe_run(tmp_path / "whole", "deepseek_v3", moe)
    train(config)
    last = Path(config.run_dir) / "checkpoints" / "step-00000004"
    resumed = moe_run(tmp_path / "resumed", "deepseek_v3", moe)
    resumed.checkpoint.resume = str(last.with_name("step-00000002"))
    train(resumed)
    biases = Snapshot.open(last).state["router_biases"]
    again = Path(resumed.run_dir) / "checkpoints" / "step-00000004"
    assert Snapshot.open(again).state["router_biases"] == biases
    planes, expected = final_planes(resumed), final_planes(config)
    assert all(planes[key].tobytes() == plane.tobytes() for key, plane in expected.items())
    assert any(value for values in biases.values() for value in values)
    export(last, tmp_path / "exported", ExportOptions())
    stored = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name for name in stored if name.endswith("_bias")} == biases.keys()
    assert all(torch.equal(stored[name], torch.tensor(values)) for name, values in biases.items())
    gate = expected.get(("layers.1.float32", "weight"))  # a unit of its own where the family has it in fp32
    if gate is not None:
        exported = stored["model.layers.1.mlp.gate.weight"]
        assert exported.dtype == torch.float32
        assert torch.equal(exported.flatten(), torch.from_numpy(gate[: exported.numel()]))


def test_records_hold_the_router_loss_beside_the_cross_entropy(tmp_path: Path) -> None:
    config = moe_run(tmp_path, "mixtral", MoeConfig(aux_loss_coef=0.01))
    train(config)
    lines = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert all(1.0 < line["router_aux_loss"] < 8.0 and line["router_z_loss"] is None for line in lines)
