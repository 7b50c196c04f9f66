"""What `import tierstream` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import dump, make_run

import tierstream
from tierstream.engine.config import RunConfig
from tierstream.engine.run.callbacks import Callback
from tierstream.io.errors import ConfigError


def test_the_package_alone_is_light() -> None:
    code = (
        "import sys, tierstream; from tierstream import Callback, RunConfig\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_offered_is_there_and_nothing_else() -> None:
    assert tierstream.Callback is Callback
    assert {"Callback", "RunConfig", "Trainer"} <= set(dir(tierstream))
    with pytest.raises(AttributeError, match="module 'tierstream' has no attribute 'Trianer'"):
        _ = tierstream.Trianer


def test_a_run_file_with_changes(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    file = dump(config, tmp_path / "run.yaml")
    assert RunConfig.from_file(file) == config
    config.optimizer.lr, config.tiers.nvme_dirs = 0.5, ["a"]
    changes = {"optimizer.lr": 0.5, "tiers.nvme_dirs": ["a"]}
    assert RunConfig.from_file(str(file), changes) == config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimiser.lr", 1.0, "unknown key optimiser.lr; did you mean optimizer.lr?"),
        ("optimizer.lr", "much", 'optimizer.lr is "much"; it must be a finite number'),
        ("optimizer.lr", -1.0, "{file} with the changes given: optimizer.lr is -1.0; it must be a finite "
         "number >= 0"),
    ],
)  # fmt: skip
def test_a_wrong_change_gets_one_message(tmp_path: Path, key: str, value: object, message: str) -> None:
    file = dump(make_run(tmp_path), tmp_path / "run.yaml")
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_file(file, {key: value})
    assert str(caught.value) == message.format(file=file)
