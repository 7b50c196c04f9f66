"""A run with frozen parameters from end to end: its files, resumed, inspected and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command import Command
from support.models import tiny_model
from support.rig import same_bits
from support.runs import VOCABULARY, dump, final_planes, make_run, train, with_tokenizer

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.tiered.snapshot import Snapshot


def make(folder: Path, source: Path) -> RunConfig:
    config = make_run(folder, steps=4)
    config.model.path, config.model.config = str(source), None
    config.model.freeze = ["model.embed_tokens.*", "*.layers.0.*", "*.mlp.*"]
    config.data.tokenizer = None
    config.checkpoint.every_steps, config.checkpoint.keep = 2, 4
    return config


def test_a_run_with_frozen_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, source = Command(capsys, tmp_path), tmp_path / "source"
    config = make(tmp_path / "whole", source)
    tiny_model("qwen3", vocab_size=VOCABULARY).save_pretrained(with_tokenizer(config, source))
    status, out, err = command.train(config)
    assert status == 0, err
    assert "trained and" in out
    assert "frozen: " in out + err
    last = Path(config.run_dir) / "checkpoints" / "step-00000004"
    plan = json.loads((Path(config.run_dir) / "plan.json").read_text())
    planes = Snapshot.open(last).planes
    weights, moments = ({unit for unit, own in planes if own == plane} for plane in ("weight", "exp_avg"))
    assert weights - moments == {"embed", "layers.0", "layers.1", "layers.2"}
    assert weights & moments == {"head", "layers.1.trained", "layers.2.trained"}
    assert 0 < plan["frozen_parameters"] < plan["parameters"]

    resumed = make(tmp_path / "resumed", source)
    resumed.checkpoint.resume = str(last.with_name("step-00000002"))
    resumed.tiers.nvme_dirs, resumed.tiers.dram = [str(tmp_path)], ByteSize(48 * 8192)
    train(resumed)
    assert same_bits(final_planes(resumed), final_planes(config)) == []

    assert "trained)" in command.run("inspect", str(last))[1]
    assert command.run("verify", str(last))[0] == 0
    assert command.run("export", config.run_dir, str(tmp_path / "exported"))[0] == 0
    exported, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "source"))
    frozen = {n for n in stored if "embed_tokens" in n or ".layers.0." in n or ".mlp." in n}
    assert {name for name in stored if torch.equal(exported[name], stored[name])} == frozen
    assert "parameters that were not trained" in (tmp_path / "exported" / "README.md").read_text()

    assert command.run("export", config.run_dir, str(tmp_path / "masters"), "--master")[0] == 0
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    assert {name for name in stored if torch.equal(masters[name], stored[name].float())} == frozen

    resumed.model.freeze = ["model.embed_tokens.*"]
    command.refused(
        "train", str(dump(resumed, tmp_path / "other.yaml")),
        said=["model.freeze is ['model.embed_tokens.*', '*.layers.0.*'", "now", "start a new run"],
    )  # fmt: skip
    resumed.model.freeze = ["model.embed_token.*"]
    command.refused("train", str(dump(resumed, tmp_path / "other.yaml")), said=["'model.embed_token.*'"])
