"""What may differ on resume, by settings alone; whole runs are in tests/faults/test_resume.py."""

from __future__ import annotations

from typing import Any

import pytest

from tierstream.engine.checkpoint import CheckpointConfig, check_same_run
from tierstream.engine.config import RunConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig
from tierstream.io.errors import CheckpointError, ConfigError


def settings(**moe: str) -> dict[str, Any]:
    optimizer = {"schedule": "cosine", "lr": 1e-4}
    return {"optimizer": optimizer, "moe": {"stream": "experts", "idle": "dense"} | moe}


@pytest.mark.parametrize("idle", ["dense", "lazy"])
def test_idle_experts_put_off_or_not_give_the_same_bits(idle: str) -> None:
    check_same_run(settings(), settings(idle=idle), None)
    check_same_run(settings(idle=idle), settings(), None)


def test_frozen_experts_are_another_run_unless_that_is_wanted() -> None:
    with pytest.raises(CheckpointError, match=r"moe\.idle: 'dense' in the checkpoint, 'frozen' now"):
        check_same_run(settings(), settings(idle="frozen"), None)
    check_same_run(settings(), settings(idle="frozen"), ["moe.idle"])


def test_groups_that_changed_are_listed_with_their_patterns() -> None:
    saved, now = settings(), settings()
    now["optimizer"] |= {"lr_scale_by_name": ["lm_head.*=0.1"]}
    said = r"optimizer\.lr_scale_by_name: None in the checkpoint, \['lm_head\.\*=0\.1'\] now"
    with pytest.raises(CheckpointError, match=said):
        check_same_run(saved, now, None)
    check_same_run(saved, now, ["optimizer.lr_scale_by_name"])


def test_no_setting_lets_whole_layers_go_on_from_single_experts() -> None:
    with pytest.raises(CheckpointError, match=r"is experts in the checkpoint and layers now.*export"):
        check_same_run(settings(), settings(stream="layers"), ["moe.stream"])


@pytest.mark.parametrize(("saved", "now"), [(0.05, 0.1), (0.05, None), (None, 0.05)])
def test_another_share_that_is_kept_from_training_is_named(saved: float | None, now: float | None) -> None:
    """Else it would be said that files changed. Other settings of evaluations are free."""
    before, after = (settings() | {"eval": {"share": share, "every_steps": 5}} for share in (saved, now))
    said = rf"eval\.share is {saved} in the checkpoint and {now} now.*set it back"
    with pytest.raises(CheckpointError, match=said):
        check_same_run(before, after, ["eval.share"])
    check_same_run(before, settings() | {"eval": {"share": saved, "every_steps": 7}}, None)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("nosuch.key", "name keys as a run file has them"),
        ("optimizer.lrr", r"did you mean optimizer\.lr\?"),
        ("lr", r"did you mean optimizer\.lr\?"),
    ],
)
def test_a_key_that_may_change_must_exist(key: str, hint: str) -> None:
    def run(*allowed: str) -> RunConfig:
        data = DataConfig(files=["text"])
        checkpoint = CheckpointConfig(allow_changed=list(allowed))
        return RunConfig(run_dir="run", model=ModelConfig(config="model"), data=data, checkpoint=checkpoint)

    with pytest.raises(ConfigError, match=rf"checkpoint\.allow_changed: there is no key {key}; {hint}"):
        run("optimizer.lr", key)
    assert run("optimizer.lr", "optimizer", "architecture.vocab_size").checkpoint.allow_changed
