"""A whole run, composed of the sections that live beside their owners. Nothing here imports torch: `--help`
must be quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.data import DataConfig
from tierstream.engine.model_config import ModelConfig
from tierstream.engine.optimizer import OptimizerConfig
from tierstream.engine.plan import TiersConfig
from tierstream.io.errors import ConfigError

_DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The loop: how many steps of how many rows, on what."""

    steps: int = 100
    """Steps of the whole run, resumed parts included."""
    rows_per_step: int = 8
    """Rows of `data.seq_len` tokens in a step."""
    rows_per_chunk: int | None = None
    """Rows that run through a layer at once; null: all of the step's."""
    loss_chunk_tokens: int = 4096
    """Tokens whose logits exist at once."""
    seed: int = 0
    """Seed of weights, shuffling and dropout."""
    device: str = "cpu"
    """Where layers are computed: cpu, cuda, cuda:1, ..."""
    deterministic: bool = True
    """Use only deterministic kernels, so that equal runs are equal to the bit."""
    debug: bool = False
    """Fill freed buffers with NaN and check every state transition; slow."""
    trace_steps: int = 0
    """Steps to record in run_dir/trace.json for ui.perfetto.dev, after two that warm up."""

    def __post_init__(self) -> None:
        for key in ("steps", "rows_per_step", "loss_chunk_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"train.{key} is {getattr(self, key)}; it must be >= 1")
        if self.trace_steps < 0:
            raise ConfigError(f"train.trace_steps is {self.trace_steps}; it must be >= 0")
        if self.rows_per_chunk is not None and not 1 <= self.rows_per_chunk <= self.rows_per_step:
            raise ConfigError(
                f"train.rows_per_chunk is {self.rows_per_chunk}; it must be between 1 and "
                f"train.rows_per_step ({self.rows_per_step}), or null for all rows"
            )
        if not _DEVICE_NAME.fullmatch(self.device):
            raise ConfigError(
                f"train.device is {self.device!r}; it must be cpu, cuda, or cuda:N (GPU number N)"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed is {self.seed}; it must be in [0, 2**63)")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One training run: `tierstream train RUN.yaml`."""

    run_dir: str
    """Directory of this run's results: config.yaml, metrics.jsonl, result.json, checkpoints/."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
