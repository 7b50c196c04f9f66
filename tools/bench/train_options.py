"""Options of `tierstream bench train`, and the keys of a run file that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Literal, TypeAlias

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.config_tree import option
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import ShapeName, architecture, has_experts
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError, TierstreamError
from tierstream.tools.bench import peers
from tierstream.tools.bench.peers import PEER_NAMES, PeerName
from tierstream.tools.bench.report import OutputOptions

if TYPE_CHECKING:
    from tierstream.engine.measure.train_bench import Setting

BaselineName: TypeAlias = Literal["resident"] | PeerName
#: Key of a run file -> the option that sets it here.
FIELD_OF_KEY = {
    "model.dtype": "dtype",
    "data.seq_len": "seq_len",
    "optimizer.clip_norm": "clip_norm",
    "optimizer.check_finite": "check_finite",
    "optimizer.placement": "placement",
    "optimizer.grad_dtype": "grad_dtype",
    "tiers.gpu": "gpu",
    "tiers.dram": "dram",
    "tiers.nvme_dirs": "nvme_dirs",
    "tiers.activations": "activations",
    "tiers.profile": "profile",
    "moe.stream": "stream",
    "moe.gpu_cache": "expert_cache",
    "train.rows_per_step": "rows",
    "train.rows_per_chunk": "rows_per_chunk",
    "train.loss_chunk_tokens": "loss_chunk_tokens",
    "train.device": "device",
    "train.kernels": "kernels",
    "train.compile": "compile",
    "train.deterministic": "deterministic",
}
#: A key, no part of a path or of a longer name; after it the colon of `key: value`, if the value ends there.
_KEY = re.compile(
    rf"(?<![\w/.-])({'|'.join(map(re.escape, FIELD_OF_KEY))})(?![\w/-]|\.\w)(:(?= [\w-]+(?:[,;]| or |$)))?"
)


@dataclass(kw_only=True)
class TrainBenchOptions(OutputOptions):
    """What `bench train` does."""

    shape: ShapeName = "tiny"
    """Architecture, with the published dimensions."""
    layers: list[int] | None = None
    """Depths that are measured, one after the other; null: the shape's own."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that weights are computed with."""
    rows: int = 8
    """Rows of a step."""
    seq_len: int = 1024
    """Tokens of a row."""
    rows_per_chunk: int | None = None
    """Rows that run through a layer at once; null: all. The baseline always takes all."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at once, as train.loss_chunk_tokens."""
    gpu: list[ByteSize | None] | None = None
    """Budgets of device memory, as tiers.gpu, each a case; null: two layers."""
    dram: ByteSize | None = None
    """Budget of host memory, as tiers.dram; null: all of the state, or 70 % of what is free."""
    nvme_dirs: list[str] | None = None
    """Directories, one per drive, for the state; null: it lives in DRAM. Nothing stays there."""
    activations: Literal["dram", "gpu"] = "dram"
    """Where the inputs of layers wait for backward."""
    stream: list[Literal["experts", "layers"]] = field(
        default_factory=lambda: list[Literal["experts", "layers"]](["experts"])
    )
    """For shapes with experts: what moves as one, as moe.stream; one after the other, baselines beside the
    first."""
    expert_cache: ByteSize | None = None
    """Device memory for weights of experts, as moe.gpu_cache."""
    clip_norm: list[float | None] | None = field(default_factory=lambda: list[float | None]([1.0]))
    """Norms that gradients are clipped to; null: no clipping. Peers take the first."""
    check_finite: bool = True
    """For cases without clipping; false: updates start during backward, as with optimizer.check_finite."""
    placement: list[Literal["auto", "cpu", "gpu", "both"]] = field(
        default_factory=lambda: list[Literal["auto", "cpu", "gpu", "both"]](["auto"])
    )
    """What computes the update, as optimizer.placement."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which summed gradients wait for the update."""
    profile: str | None = None
    """Machine profile with the rates for the bound; null: they are measured first."""
    steps: int = 3
    """Steps of a case in one round."""
    device: str = "cuda"
    """Where layers are computed: cuda, cuda:1, cpu."""
    deterministic: bool = True
    """Only deterministic kernels, as in training; for the resident baseline too. Peers are free to choose."""
    kernels: Literal["plain", "liger"] = "plain"
    """As train.kernels, for the baselines too: the model's own, or the fused ones of Liger."""
    compile: bool = False
    """As train.compile, for the resident baseline too; peers are not compiled."""
    baseline: list[BaselineName] | None = None
    """What is run beside; null: nothing."""
    turns: Literal["rounds", "blocks"] = "rounds"
    """Peers take turns with our cases, round by round; or each runs alone when these are done and their
    memory and drives are free."""
    peer_nvme_dir: str | None = None
    """Directory for the state of deepspeed-nvme; null: the first of nvme_dirs. Nothing stays there."""
    trace_steps: int = 0
    """Steps of each of our cases that are traced, after those that are measured, for --report; 0: none."""
    check: bool = False
    """Compare every loss with a run that has all that fits on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clip_norm = [None] if self.clip_norm is None else self.clip_norm
        for key in ("layers", "gpu", "clip_norm", "placement", "stream", "baseline"):
            values = getattr(self, key)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ConfigError(
                    f"--{key.replace('_', '-')} must have at least one value, each of them once"
                )
        for key, value in (("steps", self.steps), *(("layers", depth) for depth in self.layers or [])):
            if value < 1:
                raise ConfigError(f"--{key} is {value}; it must be at least 1")
        if self.trace_steps < 0 or (self.trace_steps and self.report is None):
            raise ConfigError(f"--trace-steps is {self.trace_steps}; it must be 0, or more with a --report")
        for clip in self.clip_norm:
            OptimizerConfig(clip_norm=clip)  # refuses what no run may have
        self._refuse_what_has_no_effect()
        if self.peer_nvme_dir is None and self.nvme_dirs:
            self.peer_nvme_dir = self.nvme_dirs[0]
        for name in self.peers:
            if peers.uses_nvme(name) and self.peer_nvme_dir is None:
                raise ConfigError(f"--baseline {name} needs a directory: name it as --peer-nvme-dir")

    def _refuse_what_has_no_effect(self) -> None:
        if not self.check_finite and None not in (self.clip_norm or []):
            raise ConfigError(
                "--check-finite is false, which is for cases without clipping, and all cases clip; add null "
                "to --clip-norm, or leave --check-finite out"
            )
        if self.grad_dtype == "bfloat16" and self.dtype == "float32":
            raise ConfigError(
                "--grad-dtype is bfloat16, but gradients of weights in float32 always wait in float32; leave "
                "it out, or use --dtype bfloat16"
            )
        if "layers" in self.stream and not has_experts(self.shape):
            raise ConfigError(
                f"--stream names layers, and {self.shape} has no experts, so its layers are always streamed "
                "whole: leave it out, or use a shape with experts"
            )
        if self.expert_cache is not None and not has_experts(self.shape):
            raise ConfigError(
                f"--expert-cache is {self.expert_cache}, and {self.shape} has no experts: leave it out, or "
                "use a shape with experts"
            )
        if self.expert_cache is not None and "experts" not in self.stream:
            raise ConfigError(
                f"--expert-cache is {self.expert_cache}, and --stream has layers alone, which have slots of "
                "their own; add experts, or leave it out"
            )
        if self.turns == "blocks" and not self.peers:
            raise ConfigError(
                "--turns is blocks, which is for peers, and --baseline names none of them "
                f"({', '.join(PEER_NAMES)}); add one, or leave it out"
            )
        if self.peer_nvme_dir is not None and not any(map(peers.uses_nvme, self.peers)):
            users = ", ".join(name for name in PEER_NAMES if peers.uses_nvme(name))
            raise ConfigError(
                f"--peer-nvme-dir is {self.peer_nvme_dir}, but no baseline keeps state on a drive; add "
                f"--baseline {users}, or leave it out"
            )

    @property
    def depths(self) -> list[int]:
        """Numbers of layers that are measured."""
        return self.layers or [architecture(self.shape)["num_hidden_layers"]]

    def settings(self) -> list[Setting]:
        """Of our cases at each depth, in order."""
        from tierstream.engine.measure.train_bench import Setting

        budgets: list[ByteSize | None] = [None] if self.gpu is None else [*self.gpu]
        return [
            Setting(
                gpu=gpu,
                clip_norm=clip,
                check_finite=self.check_finite or clip is not None,
                placement=placement,
            )
            for gpu, clip, placement in product(budgets, self.clip_norm or [None], self.placement)
        ]

    @property
    def peers(self) -> list[PeerName]:
        """Those of the baselines that are programs of others."""
        return [name for name in self.baseline or [] if name != "resident"]

    def run_config(self, folder: str, nvme_dirs: list[str] | None) -> RunConfig:
        """As of a run whose model is described in `folder`.

        Raises:
            ConfigError: a value that no run may have; it names keys (see `errors_name_options`).
        """
        return RunConfig(
            run_dir=folder,
            model=ModelConfig(config=folder, dtype=self.dtype),
            # A row is one document.
            data=DataConfig(files=["random tokens"], seq_len=self.seq_len, isolate_documents=False),
            optimizer=OptimizerConfig(schedule="constant", grad_dtype=self.grad_dtype),
            tiers=TiersConfig(
                dram=self.dram, nvme_dirs=nvme_dirs, activations=self.activations, profile=self.profile
            ),
            moe=MoeConfig(gpu_cache=self.expert_cache),
            train=TrainConfig(
                rows_per_step=self.rows,
                rows_per_chunk=self.rows_per_chunk,
                loss_chunk_tokens=self.loss_chunk_tokens,
                device=self.device,
                kernels=self.kernels,
                compile=self.compile,
                deterministic=self.deterministic,
            ),
            checkpoint=CheckpointConfig(at_end=False),
        )


def in_options(message: str) -> str:
    """The message with the options of `bench train` in place of keys: --gpu for tiers.gpu, and
    `--kernels plain` for `train.kernels: plain`.
    """
    return _KEY.sub(lambda found: option(FIELD_OF_KEY[found[1]]), message)


@contextmanager
def errors_name_options() -> Iterator[None]:
    """Within, what the engine says of keys is said of the options that were given."""
    try:
        yield
    except TierstreamError as error:
        error.args = (in_options(str(error)),)
        raise
