"""Layers under torch.compile: one graph for all layers and steps, near the plain layers, equal from every
tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rig import Setup, batches, reference_model, rig, same_bits, tiny_config
from torch._dynamo.utils import counters

from tierstream.engine.model import kernels
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError

#: The compiler uses parts of torch that warn of their own age, advises less precision on a GPU, and does not
#: like how Liger asks which GPU it has.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

COMPILED = partial(kernels.compile_layers, deterministic=True)
STEPS = 3


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


def setup(layers: int = 3, dtype: str = "float32", device: str = "cpu") -> Setup:
    return Setup(
        config=tiny_config("qwen3", layers=layers, attention_dropout=0.1),
        dtype=dtype,
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=0.5),
        prepare=COMPILED,
        device=device,
        attention="eager",
    )


def result(made: Setup) -> tuple[list[tuple[float, float]], dict[Any, Any]]:
    """((loss, grad norm) of every step, every durable plane at the end)."""
    torch.manual_seed(7)  # dropout
    with rig(made) as run:
        outcomes = run.train(batches(STEPS))
        return [(o.loss, o.verdict.grad_norm) for o in outcomes], run.planes()


def check_compiled(tmp_path: Path, device: str) -> None:
    """With dropout, whose numbers must be those of the plain layers, in recompute too."""
    made = setup(device=device)
    plain, _ = result(made.but(prepare=lambda model: None))
    everything, planes = result(made.but(gpu_all=True, activations="gpu"))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2  # without and with gradients
    for (loss, norm), (plain_loss, plain_norm) in zip(everything, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-5)
        assert norm == pytest.approx(plain_norm, rel=1e-4)
    losses, tiered = result(made.but(nvme=tmp_path / "drive", dram=24 * made.page))
    assert losses == everything
    assert same_bits(tiered, planes) == []
    result(setup(layers=6, device=device))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_train_as_plain_ones_do(tmp_path: Path) -> None:
    check_compiled(tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_layers_train_as_plain_ones_do_on_a_gpu(tmp_path: Path) -> None:
    check_compiled(tmp_path, "cuda")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", kernels.LIGER_FAMILIES)
def test_compiled_layers_train_beside_ligers_loss(family: str) -> None:
    pytest.importorskip("liger_kernel")
    config = tiny_config(family, hidden_size=64, head_dim=32, intermediate_size=160)
    made = setup(device="cuda").but(config=config)
    plain, _ = result(made.but(prepare=lambda model: None))
    entered: list[Any] = []

    def prepare(model: Any) -> None:
        entered.append(kernels.liger(model, layers=False))
        entered[0].__enter__()
        COMPILED(model)

    found, _ = result(made.but(prepare=prepare))
    entered[0].__exit__(None, None, None)
    for (loss, norm), (plain_loss, plain_norm) in zip(found, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-4)
        assert norm == pytest.approx(plain_norm, rel=1e-3)


def test_a_layer_that_is_not_one_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model(tiny_config("qwen2"), torch.float32)
    mlp = type(model.model.layers[0].mlp)
    plain = mlp.forward

    def breaking(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(self, x)

    monkeypatch.setattr(mlp, "forward", breaking)
    COMPILED(model)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"train.compile: torch cannot compile Qwen2DecoderLayer: .*false"):
        model(input_ids=ids, use_cache=False)
