"""The section `moe` of a run: how experts are streamed."""

from __future__ import annotations

from dataclasses import dataclass

from tierstream.engine.byte_size import ByteSize


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts; nothing here matters to a model without."""

    gpu_cache: ByteSize | None = None
    """Device memory for weights of experts, least recently used first to go; null: four experts."""
