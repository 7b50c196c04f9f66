"""A whole run, composed of the sections that live beside their owners. Nothing here imports torch: `--help`
must be quick.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.config_file import load
from tierstream.engine.config_tree import leaves, nearest_keys, sections
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.run.eval_config import EvalConfig
from tierstream.engine.run.sample_config import SampleConfig
from tierstream.engine.run.trackers import LogConfig
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError

#: fp32 logits of a chunk of the loss, and the edge of the tiles that matrix products are made of: a chunk is
#: whole tiles.
_LOGITS_BYTES, _TILE_TOKENS = 1 << 30, 128
_DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The loop: how many steps of how many rows, on what."""

    steps: int | None = None
    """Steps of the whole run, resumed parts included; null: as many as `epochs` take."""
    epochs: float | None = None
    """Passes over the data, in place of `steps`; null for both: one."""
    rows_per_step: int = 8
    """Rows of `data.seq_len` tokens in a step."""
    rows_per_chunk: int | None = None
    """Rows that run through a layer at once; null: all of the step's."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at once; null: as many as 1 GiB of fp32 logits hold."""
    z_loss_coef: float = 0.0
    """Factor of the z-loss, the mean of logsumexp(logits)^2 over trained tokens, which keeps logits from
    drifting; PaLM takes 1e-4. 0: none."""
    seed: int = 0
    """Seed of weights, shuffling and dropout."""
    device: str = "cpu"
    """Where layers are computed: cpu, cuda, cuda:1, ..."""
    kernels: Literal["plain", "liger"] = "plain"
    """Norms, MLPs, rotary embedding and loss: the model's own, or the fused ones of Liger, which needs a GPU
    and liger-kernel; for llama, mistral, qwen2 and qwen3."""
    compile: bool = False
    """Compile the layers with torch.compile, in the first step: takes a minute, and a C++ compiler on the
    CPU. What is compiled is the model's own code: with `kernels: liger`, Liger's loss alone remains."""
    deterministic: bool = True
    """Use only deterministic kernels, so that equal runs are equal to the bit."""
    debug: bool = False
    """Fill freed buffers, and with `deterministic` new tensors, with NaN, and check every state transition;
    slow."""
    log_samples: bool = False
    """Write to metrics.jsonl which samples (file:line) each step was trained on; of a skipped step it always
    says so."""
    trace_steps: int = 0
    """Steps to record, after two that warm up: run_dir/trace.json for ui.perfetto.dev, and trace.png."""

    def __post_init__(self) -> None:
        for key in ("steps", "rows_per_step", "loss_chunk_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"train.{key} is {value}; it must be >= 1")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"train.steps is {self.steps} and train.epochs is {self.epochs}; give one of them, and null "
                "for the other"
            )
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs is {self.epochs}; it must be a number above 0")
        if self.trace_steps < 0:
            raise ConfigError(f"train.trace_steps is {self.trace_steps}; it must be >= 0")
        if self.rows_per_chunk is not None and not 1 <= self.rows_per_chunk <= self.rows_per_step:
            raise ConfigError(
                f"train.rows_per_chunk is {self.rows_per_chunk}; it must be between 1 and "
                f"train.rows_per_step ({self.rows_per_step}), or null for all rows"
            )
        if not 0 <= self.z_loss_coef < math.inf:
            raise ConfigError(f"train.z_loss_coef is {self.z_loss_coef}; it must be a finite number >= 0")
        if not _DEVICE_NAME.fullmatch(self.device):
            raise ConfigError(
                f"train.device is {self.device!r}; it must be cpu, cuda, or cuda:N (GPU number N)"
            )
        if self.kernels == "liger" and self.device == "cpu":
            raise ConfigError(
                "train.kernels is liger and train.device is cpu, but Liger's kernels run on a GPU only; use "
                "train.kernels: plain, or train.device: cuda"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed is {self.seed}; it must be in [0, 2**63)")

    @property
    def chunks_rows(self) -> bool:
        """Whether the rows of a step run through the layers some at a time."""
        return self.rows_per_chunk is not None and self.rows_per_chunk < self.rows_per_step

    def seed_of_step(self, step: int) -> int:
        """Of what is drawn in a step or after it."""
        return (self.seed * 1_000_003 + step) % 2**63

    def loss_chunk(self, vocabulary: int) -> int:
        """Tokens whose logits exist at once. It decides the order of sums, and so bits: nothing but the run
        file and the model may change it.
        """
        if self.loss_chunk_tokens is not None:
            return self.loss_chunk_tokens
        fitting = _LOGITS_BYTES // (4 * vocabulary)
        return max(1, fitting // _TILE_TOKENS * _TILE_TOKENS or fitting)


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One training run: `tierstream train RUN.yaml`."""

    run_dir: str
    """Directory of this run's results: config.yaml, metrics.jsonl, result.json, checkpoints/."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> RunConfig:
        """The run file at `path`, changed as options of the command line change it.

        Args:
            changes: dotted key -> value, as `{"optimizer.lr": 1e-5}`.

        Raises:
            ConfigError: as for `tierstream train`.
        """
        return load(cls, Path(path), changes)

    def __post_init__(self) -> None:
        if not self.run_dir:  # as of a variable of the shell that is not set
            raise ConfigError("run_dir is empty; name a directory, or . for the current one")
        if self.optimizer.placement in ("gpu", "both") and self.train.device == "cpu":
            raise ConfigError(
                f"optimizer.placement is {self.optimizer.placement} and train.device is cpu, so there is no "
                "GPU to update on; use optimizer.placement: auto or cpu, or train.device: cuda"
            )
        if self.data.streaming and self.train.steps is None:
            raise ConfigError(
                "data.streaming is true, so how many steps an epoch has is known only at its end; "
                "set train.steps"
            )
        if self.data.streaming and self.eval.share is not None:
            raise ConfigError(
                f"eval.share is {self.eval.share} and data.streaming is true, so nobody knows how many "
                "samples there are; name eval.files"
            )
        if self.checkpoint.keep_best and not self.eval.wanted:
            raise ConfigError(
                "checkpoint.keep_best is true, but there is no evaluation to say what is best; name "
                "eval.files, or set eval.share"
            )
        for key in self.checkpoint.allow_changed or ():
            known = key in leaves(RunConfig) or key in sections(RunConfig)
            if not known and key.partition(".")[0] != "architecture":
                nearest = " or ".join(nearest_keys(RunConfig, key))
                hint = f"did you mean {nearest}?" if nearest else "name keys as a run file has them"
                raise ConfigError(f"checkpoint.allow_changed: there is no key {key}; {hint}")
