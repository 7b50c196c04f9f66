"""C15: which tensors the decay moves, seen in their values: with gradients of zero nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.families import moe_config
from support.rig import Rig, Setup, batches, rig, tiny_config
from support.runs import make_run, train

from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tools.export import ExportOptions, export

LR, DECAY = 0.1, 0.1


def with_zero_gradients(run: Rig) -> None:
    gradients = run.runtime._gradients
    close = gradients.close

    def closing(unit: Any) -> None:
        gradients._open[unit.name][0].flat.zero_()
        close(unit)

    gradients.close = closing  # type: ignore[method-assign]


@pytest.mark.parametrize("by_name", [None, ["*embed_tokens*=0", "*.mlp.*=0"]], ids=["rule", "patterns"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_exactly_the_matrices_shrink(family: str, by_name: list[str] | None) -> None:
    """Norms of any class, q_norm and k_norm, biases of routers and experts and sinks stay as they are."""
    dense = family in ("llama", "qwen2", "qwen3")
    config = tiny_config(family) if dense else moe_config(family)
    optimizer = OptimizerConfig(lr=LR, weight_decay=DECAY, schedule="constant", weight_decay_by_name=by_name)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    with rig(Setup(config=config, optimizer=optimizer, attention=attention)) as run:
        before = run.tensors()
        with_zero_gradients(run)
        run.train(batches(1))
        run.runtime.flush()
        after, decayed = run.tensors(), run.units.decayed()
    shrunk = [name for name in after if not torch.equal(after[name], before[name])]
    assert sorted(shrunk) == sorted(decayed)
    for name in shrunk:
        torch.testing.assert_close(after[name], before[name] * (1 - LR * DECAY), rtol=2e-7, atol=0)
        assert "norm" not in name
        assert not name.endswith(("bias", "sinks"))
        assert by_name is None or not ("embed_tokens" in name or ".mlp." in name)


class Log(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, text: str) -> None:
        self.events.append(text)


def test_what_is_decayed_is_said_before_the_first_step(tmp_path: Path) -> None:
    """3 layers of 7 matrices and one for both ends; the norms are named."""
    config, log = make_run(tmp_path, steps=1), Log()
    Trainer(config, [log]).run()
    norms = ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
    names = ", ".join(f"model.layers.{{0-2}}.{name}.weight" for name in norms)
    decayed, left = (event for event in log.events if event.startswith("optimizer: "))
    assert decayed.startswith("optimizer: 22 tensors, lr x 1, weight decay 0.1: ")
    assert left == f"optimizer: 13 tensors, lr x 1, weight decay 0: {names}, model.norm.weight"


def test_patterns_change_where_tensors_lie_and_not_what_an_export_holds(tmp_path: Path) -> None:
    """With factors of 1 both runs have the same weights, in units packed in another order."""
    found = []
    for name, scales in (
        ("rule", None),
        ("patterns", ["*.q_proj.*=1", "*.down_proj.*=1", "*embed_tokens*=1"]),
    ):
        config = make_run(tmp_path / name, steps=2)
        config.optimizer.lr_scale_by_name = scales
        train(config)
        export(
            Path(config.run_dir) / "checkpoints" / "step-00000002", tmp_path / f"out-{name}", ExportOptions()
        )
        found.append(load_file(tmp_path / f"out-{name}" / "model.safetensors"))
    rule, patterns = found
    assert rule.keys() == patterns.keys()
    assert [name for name in rule if not torch.equal(rule[name], patterns[name])] == []
