"""What a run asks torch for, so that equal runs are equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tierstream.engine import assemble
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # and it is taken back
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("debug", [True, False])
def test_new_tensors_are_filled_in_debug_runs_alone(deterministic: bool, debug: bool) -> None:
    assemble.set_determinism(
        RunConfig(
            run_dir="run",
            model=ModelConfig(config="model"),
            data=DataConfig(files=["text"]),
            train=TrainConfig(deterministic=deterministic, debug=debug),
        )
    )
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.utils.deterministic.fill_uninitialized_memory == debug
    if deterministic and debug:  # else it holds what the heap has there, perhaps the same
        assert torch.empty(1000).isnan().all()
