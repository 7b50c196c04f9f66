"""Rows of a step on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierstream.engine.data.rows import Batch as PackedBatch


@dataclass(frozen=True)
class Batch:
    """int64 [rows, seq_len] each; labels are shifted already.

    Attributes:
        padding: bool [rows, seq_len], positions that hold no token; None: there are none.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    trained_tokens: int
    padding: torch.Tensor | None = None

    @classmethod
    def of(cls, packed: PackedBatch, device: torch.device) -> Batch:
        """The rows that the data gave."""
        ids, labels, positions = (
            torch.from_numpy(array).to(device)
            for array in (packed.input_ids, packed.labels, packed.position_ids)
        )
        padding = None if packed.padding is None else torch.from_numpy(packed.padding).to(device)
        return cls(ids, labels, positions, packed.trained_tokens, padding)
