"""What may differ on resume, by settings alone; whole runs are in tests/faults/test_resume.py."""

from __future__ import annotations

from typing import Any

import pytest

from tierstream.engine.checkpoint import check_same_run
from tierstream.io.errors import CheckpointError


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
