"""AdamW as the run sees it: settings, the learning-rate schedule, and the verdict over a step's gradients.

All of it is pure functions of the number of updates already applied, so a resumed run needs no scheduler
state. The arithmetic on planes is `tierstream._native.adamw_*` (source: Loshchilov & Hutter, Decoupled Weight
Decay Regularization, arXiv 1711.05101, in the order of operations of torch.optim.AdamW), driven page by page
in `tierstream.engine.update.update`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from tierstream.io.errors import ConfigError

#: So many threads of the update reach the memory's bandwidth on most machines; the planes that pass through a
#: GPU cross the same memory.
_THREADS_ENOUGH = 8


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, its schedule and its safety checks."""

    lr: float = 1e-4
    """Peak learning rate, reached after warm-up."""
    beta1: float = 0.9
    """Decay of the first moment, per update."""
    beta2: float = 0.95
    """Decay of the second moment, per update."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of tensors with two or more dimensions; norms and biases are never decayed."""
    weight_decay_by_name: list[str] | None = None
    """Other decays for some of these, each PATTERN=VALUE, such as model.embed_tokens.*=0 or *.router.*=0.01;
    the first pattern that fits a parameter's name counts. Norms and biases are never decayed."""
    lr_scale_by_name: list[str] | None = None
    """Learning rates of some parameters, each PATTERN=FACTOR of the run's, such as lm_head.*=0.1; the first
    pattern that fits a name counts."""
    clip_norm: float | None = 1.0
    """Global L2 norm that gradients are scaled down to; null: no clipping."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up, over the run's steps. wsd (warm-up, stable, decay): constant
    until `decay_steps` before the end, then linear."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the run, as a share of `lr` (linear, cosine, wsd)."""
    decay_steps: int | None = None
    """Updates of the decay of wsd; null: a tenth of the run."""
    master: Literal["split", "fp32"] = "split"
    """How the fp32 master of a bf16 weight is kept: its 16 low bits (12 B/param in all) or a full copy (14
    B/param).
    """
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which a step's summed gradient waits for the update: float32, or bfloat16 for weights in
    bfloat16. It is always summed in fp32."""
    check_finite: bool = True
    """Skip a step whose gradient is not finite. False, which takes clip_norm: null, lets updates start during
    backward; a gradient that is not finite then ends the run, and the weights are those of the last
    checkpoint."""
    placement: Literal["auto", "cpu", "gpu", "both"] = "auto"
    """What updates units whose state is streamed: the CPU, the GPU (the planes pass through it), or both,
    page by page, whichever is free; auto: both where the CPU has fewer than 8 threads for it, else the CPU,
    which then reaches the memory's bandwidth alone. All give the same bits. Units that stay on the GPU are
    updated there."""
    threads: int | None = None
    """CPU threads of the update; null: four fifths of those that torch uses."""
    max_skipped_in_a_row: int = 5
    """The run stops after this many consecutive steps with a non-finite gradient."""

    def __post_init__(self) -> None:
        checks = [
            ("lr", self.lr >= 0 and math.isfinite(self.lr), "a finite number >= 0"),
            ("beta1", 0 <= self.beta1 < 1, "in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
            ("eps", self.eps > 0, "> 0"),
            ("weight_decay", self.weight_decay >= 0, ">= 0"),
            ("clip_norm", self.clip_norm is None or self.clip_norm > 0, "> 0, or null for no clipping"),
            ("warmup_steps", self.warmup_steps >= 0, ">= 0"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]"),
            ("decay_steps", self.decay_steps is None or self.decay_steps >= 1, ">= 1, or null"),
            ("threads", self.threads is None or self.threads >= 1, ">= 1, or null"),
            ("max_skipped_in_a_row", self.max_skipped_in_a_row >= 1, ">= 1"),
        ]
        for key, good, limit in checks:
            if not good:
                raise ConfigError(f"optimizer.{key} is {getattr(self, key)}; it must be {limit}")
        for key in ("weight_decay_by_name", "lr_scale_by_name"):
            by_name(key, getattr(self, key))
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ConfigError(
                f"optimizer.decay_steps is {self.decay_steps} and optimizer.schedule is {self.schedule}; it "
                "belongs to the schedule wsd"
            )
        if self.clip_norm is not None and not self.check_finite:
            raise ConfigError(
                f"optimizer.check_finite is false and optimizer.clip_norm is {self.clip_norm}: clipping "
                "waits for the whole gradient, so the check costs nothing; set clip_norm to null, or "
                "check_finite to true"
            )

    def threads_of(self, cores: int) -> int:
        """CPU threads of the update: those asked for, or all but a few that move pages and launch layers."""
        return self.threads or cores - cores // 5

    def updates_on_device(self, *, device_in_host: bool, threads: int) -> bool:
        """Whether planes pass through the device, which may be the CPU itself.

        Args:
            threads: of the update on the CPU.
        """
        if self.placement == "auto":
            return not device_in_host and threads < _THREADS_ENOUGH
        return self.placement in ("gpu", "both")

    @property
    def updates_in_backward(self) -> bool:
        """Whether a unit may be updated as soon as its own gradient is complete."""
        return self.clip_norm is None and not self.check_finite


def by_name(key: str, texts: Iterable[str] | None) -> list[tuple[str, float]]:
    """(pattern, value) of each `PATTERN=VALUE`, the texts of `optimizer.<key>`.

    Raises:
        ConfigError: one is something else, or its value is not finite and at least 0.
    """
    found = []
    for text in texts or ():
        pattern, _, number = (part.strip() for part in text.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not pattern or not 0 <= value < math.inf:
            raise ConfigError(
                f"optimizer.{key} has {text!r}; it must be PATTERN=VALUE with a finite value >= 0, such as "
                "model.embed_tokens.*=0.1"
            )
        found.append((pattern, value))
    return found


def learning_rate(config: OptimizerConfig, applied_updates: int, total_updates: int) -> float:
    """Learning rate of the next update after `applied_updates` of `total_updates`.

    Warm-up: update `i` (from 0) uses `lr * (i + 1) / (warmup_steps + 1)`, so no update is spent at 0.
    wsd: MiniCPM, arXiv 2404.06395, section 4; with the linear decay of arXiv 2405.18392.
    """
    if applied_updates < config.warmup_steps:
        return config.lr * (applied_updates + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    begin = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, total_updates - decay_updates(config, total_updates))
    span = max(1, total_updates - begin)
    progress = min(1.0, max(0, applied_updates - begin) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def decay_updates(config: OptimizerConfig, total_updates: int) -> int:
    """Updates of the decay of wsd."""
    return config.decay_steps or -(-total_updates // 10)


def check_schedule(config: OptimizerConfig, total_updates: int) -> None:
    """Raises ConfigError: the run is too short for warm-up and decay of wsd."""
    decay = decay_updates(config, total_updates)
    if config.schedule == "wsd" and config.warmup_steps + decay > total_updates:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.warmup_steps} and the decay of wsd takes {decay} updates, "
            f"but the run has {total_updates} steps; lower optimizer.warmup_steps or optimizer.decay_steps"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step's gradients allow: fixed at the end of backward, carried out in the next forward.

    `update` is AdamW's step number `t` (from 1). `grad_norm` is the global L2 norm before clipping; not
    finite means the whole step is skipped: no weight, moment, counter or decay moves.
    """

    grad_norm: float
    clip_factor: float
    lr: float
    update: int

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class Group:
    """What AdamW does to some parameters (engine/update/groups.py).

    Attributes:
        lr_scale: their learning rate is the run's, times this.
    """

    lr_scale: float
    weight_decay: float


class AdamW(TypedDict):
    """Settings of one call of the kernel; see `tierstream._native.adamw_split`."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float


def adamw_settings(config: OptimizerConfig, verdict: Verdict, group: Group) -> AdamW:
    """Of a verdict, for the elements of a group."""
    return {
        "step": verdict.update, "lr": verdict.lr * group.lr_scale, "beta1": config.beta1,
        "beta2": config.beta2, "eps": config.eps, "weight_decay": group.weight_decay,
        "grad_scale": verdict.clip_factor,
    }  # fmt: skip


def judge(
    config: OptimizerConfig, sums_of_squares: Iterable[float], applied_updates: int, total_updates: int
) -> Verdict:
    """Verdict from the sum of squares of each unit's gradient.

    The sum over units is in fp64 and independent of their order: a single inf or NaN anywhere makes the norm
    inf or NaN, so the finite check needs no pass of its own. The clip factor is `clip_norm / (norm + 1e-6)`,
    at most 1: that of torch.nn.utils.clip_grad_norm_.
    """
    total = math.fsum(sums_of_squares)
    norm = math.sqrt(total) if total >= 0 else math.nan
    factor = 1.0
    if config.clip_norm is not None and math.isfinite(norm):
        factor = min(1.0, config.clip_norm / (norm + 1e-6))
    return replace(unconditional(config, applied_updates, total_updates), grad_norm=norm, clip_factor=factor)


def unconditional(config: OptimizerConfig, applied_updates: int, total_updates: int) -> Verdict:
    """The verdict that needs no gradient: nothing is clipped or checked. Its norm is not known yet."""
    return Verdict(0.0, 1.0, learning_rate(config, applied_updates, total_updates), applied_updates + 1)
