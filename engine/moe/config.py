"""The section `moe` of a run: how experts are streamed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError

#: What an update does to an expert without tokens; see `MoeConfig.idle`.
IdleMode = Literal["dense", "lazy", "frozen"]


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts; nothing here matters to a model without."""

    stream: Literal["experts", "layers"] = "experts"
    """What moves as one: single experts, those with tokens alone, so that a layer need not fit on the device;
    or whole layers with all of their experts."""
    gpu_cache: ByteSize | None = None
    """Device memory for weights of experts, least recently used first to go; null: sixteen experts."""
    idle: IdleMode = "dense"
    """What an update does to an expert without tokens in its step. dense: what torch.optim.AdamW does with a
    gradient of zero, decay and momentum go on; its state is read and written in every step. lazy: the same
    bits, put off until it has tokens again or the run is flushed (checkpoint, end): its state then moves
    once, and its upload waits while all that it missed is computed. frozen: nothing, neither weights nor
    moments move; costs nothing, but gives other results than torch."""
    aux_loss_coef: float | None = None
    """Weight of the load-balancing loss over all layers and tokens of a step; null: the model's
    router_aux_loss_coef if its configuration sets output_router_logits, else 0."""
    z_loss_coef: float = 0.0
    """Weight of the mean of logsumexp(router logits)^2, which keeps the logits small."""
    bias_update_rate: float = 0.0
    """After each step, correction biases of routers move by this much towards equal load (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        if self.idle != "dense" and not self.experts_apart:
            raise ConfigError(
                f"moe.idle is {self.idle} and moe.stream is {self.stream}: whole layers are updated as one; "
                "use moe.idle: dense, or moe.stream: experts"
            )
        if self.gpu_cache is not None and not self.experts_apart:
            raise ConfigError(
                f"moe.gpu_cache is {self.gpu_cache} and moe.stream is {self.stream}: whole layers have slots "
                "of their own; leave it out, or use moe.stream: experts"
            )
        for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"moe.{key} is {value}; it must be a finite number >= 0")

    @property
    def experts_apart(self) -> bool:
        """Each expert is a unit."""
        return self.stream == "experts"
