"""The section `moe` of a run: how experts are streamed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts; nothing here matters to a model without."""

    stream: Literal["experts", "layers"] = "experts"
    """What moves as one: single experts, those with tokens alone, so that a layer need not fit on the device;
    or whole layers with all of their experts."""
    gpu_cache: ByteSize | None = None
    """Device memory for weights of experts, least recently used first to go; null: four experts."""
    aux_loss_coef: float | None = None
    """Weight of the load-balancing loss over all layers and tokens of a step; null: the model's
    router_aux_loss_coef if its configuration sets output_router_logits, else 0."""
    z_loss_coef: float = 0.0
    """Weight of the mean of logsumexp(router logits)^2, which keeps the logits small."""
    bias_update_rate: float = 0.0
    """After each step, correction biases of routers move by this much towards equal load (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"moe.{key} is {value}; it must be a finite number >= 0")

    @property
    def experts_apart(self) -> bool:
        """Each expert is a unit."""
        return self.stream == "experts"
