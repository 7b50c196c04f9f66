"""Products of the rows of several experts, which lie one below the other, each with a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from tierstream.engine.device.device import Device

#: Bytes at whose multiples torch's grouped kernel wants the rows of its matrices to begin.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of several experts.

    Attributes:
        counts: of each expert.
        ends: int32 [experts] on the device, the row after the last one of each; None: one expert after the
            other, which is also what happens to matrices that torch's grouped kernel does not take.
        multiple: rows of one expert are multiplied as so many or a multiple of it.
    """

    counts: Sequence[int]
    ends: torch.Tensor | None
    multiple: int

    def product(self, x: torch.Tensor, matrices: Sequence[torch.Tensor], *, transposed: bool) -> torch.Tensor:
        """Args: x: [rows, n]. matrices: of each expert [n, m], or the other way round. Returns: [rows, m]."""
        if self.ends is not None and _for_grouped_kernel(matrices[0]):
            stack = torch.stack(list(matrices))
            return functional.grouped_mm(x, stack.transpose(1, 2) if transposed else stack, offs=self.ends)
        parts = zip(x.split(list(self.counts)), matrices, strict=True)
        return torch.cat([self._alone(rows, own.t() if transposed else own) for rows, own in parts])

    def plus(self, x: torch.Tensor, biases: Sequence[torch.Tensor]) -> torch.Tensor:
        """Args: x: [rows, m]. biases: of each expert [m]. Returns: [rows, m]."""
        parts = zip(x.split(list(self.counts)), biases, strict=True)
        return torch.cat([rows + bias for rows, bias in parts])

    def _alone(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Rows of zeros go below them, which add zeros to gradients."""
        missing = -len(rows) % self.multiple
        if not missing:
            return rows @ matrix
        return (functional.pad(rows, (0, 0, 0, missing)) @ matrix)[: len(rows)]


def together(counts: Sequence[int], experts: int, rows: int) -> list[slice]:
    """Which experts are computed together: neighbours, so many of them at most, with so many rows at most
    unless one alone has more.

    Args:
        counts: rows of each expert.
    """
    parts, first, total = list[slice](), 0, 0
    for index, count in enumerate(counts):
        if index > first and (index - first == experts or total + count > rows):
            parts.append(slice(first, index))
            first, total = index, 0
        total += count
    return [*parts, slice(first, len(counts))] if counts else []


def groups(device: Device, parts: Sequence[Sequence[int]]) -> list[Groups]:
    """Args: parts: of each group the rows of its experts."""
    ends: list[torch.Tensor] | list[None] = [None] * len(parts)
    if device.multiplies_groups:
        flat = device.int32([end for counts in parts for end in accumulate(counts)])
        ends = list(flat.split([len(counts) for counts in parts]))
    return [Groups(counts, end, device.product_rows) for counts, end in zip(parts, ends, strict=True)]


def _for_grouped_kernel(matrix: torch.Tensor) -> bool:
    aligned = all(size * matrix.itemsize % _ALIGNMENT == 0 for size in matrix.shape)
    return matrix.dtype == torch.bfloat16 and aligned
