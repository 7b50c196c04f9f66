"""The section `moe` of a run: how experts are streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierstream.engine.byte_size import ByteSize


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts; nothing here matters to a model without."""

    stream: Literal["experts", "layers"] = "experts"
    """What moves as one: single experts, those with tokens alone, so that a layer need not fit on the device;
    or whole layers with all of their experts."""
    gpu_cache: ByteSize | None = None
    """Device memory for weights of experts, least recently used first to go; null: four experts."""

    @property
    def experts_apart(self) -> bool:
        """Each expert is a unit."""
        return self.stream == "experts"
