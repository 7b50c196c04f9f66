"""Weights in FP8 with a scale for every block of a matrix, back to full precision.

Checkpoints made like that of DeepSeek-V3 store a matrix X as float8_e4m3fn and beside it `X_scale_inv`, one
number for each block of `quantization_config.weight_block_size` rows and columns, the last ones cut off by
the edge. The weight is the product of both, taken in fp32. A single number is the scale of a whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream.engine.weights.tensor_entry import FLOAT_DTYPES, BlockScales, TensorEntry
from tierstream.io.errors import ModelSourceError

_SUFFIX = "_scale_inv"


def pair_scales(root: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of a directory, where those in FP8 know their scales. Scales are no tensors of their own
    any more, nor are the scales of activations beside them, which training has no use for.

    Raises:
        ModelSourceError: scales do not fit their weights.
    """
    paired = {
        key: tensors[key + _SUFFIX]
        for key, entry in tensors.items()
        if entry.dtype == "F8_E4M3" and len(entry.shape) >= 2 and key + _SUFFIX in tensors
    }
    configured = _configured_block(root) if paired else None
    gone = {scales.name for scales in paired.values()}
    gone |= {f"{key.rpartition('.')[0]}.activation_scale" for key in paired}
    found = {key: entry for key, entry in tensors.items() if key not in gone}
    for key, scales in paired.items():
        block = _block(root, tensors[key], scales, configured)
        found[key] = replace(tensors[key], scales=BlockScales(scales, block))
    return found


def _block(
    root: Path, weight: TensorEntry, scales: TensorEntry, configured: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns that share a scale: as configured, else equal parts, as transformers takes them."""
    *outer, rows, columns = weight.shape
    if scales.dtype in {*FLOAT_DTYPES, "F8_E8M0", "U8"}:
        if prod(scales.shape) == 1:
            return rows, columns
        parts = [max(1, count) for count in scales.shape[-2:]]
        even = (max(1, rows // parts[0]), max(1, columns // parts[-1]))
        for block in (configured or even, even):
            if scales.shape == (*outer, -(-rows // block[0]), -(-columns // block[1])):
                return block
    blocks = f" of {configured[0]} x {configured[1]}" if configured else ""
    raise ModelSourceError(
        f"{root}: {weight.name} is {list(weight.shape)} in FP8, and {scales.name}, {scales.dtype} "
        f"{list(scales.shape)}, is not a scale for each block{blocks}; download them again"
    )


def _configured_block(root: Path) -> tuple[int, int] | None:
    """`quantization_config.weight_block_size` of config.json, if there is one."""
    try:
        content: Any = json.loads((root / "config.json").read_bytes())
        rows, columns = content["quantization_config"]["weight_block_size"]
        return (rows, columns) if min(rows, columns) > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def dequantise(
    stored: NDArray[np.uint8],
    first_row: int,
    rows: int,
    grid: NDArray[np.float32],
    block: tuple[int, int],
    out: NDArray[np.float32],
) -> None:
    """Some rows of a stack of matrices.

    Args:
        stored: bytes [n, columns], the rows from `first_row` on, counted over all matrices.
        rows: of each matrix.
        grid: scales [matrices, row blocks, column blocks].
        block: rows and columns of a block.
        out: fp32 [n, columns].
    """
    torch.from_numpy(out).copy_(torch.from_numpy(stored).view(torch.float8_e4m3fn))
    start = 0
    with np.errstate(over="ignore"):  # loading refuses infinities
        while start < len(out):
            matrix, row = divmod(first_row + start, rows)
            count = min(block[0] - row % block[0], rows - row, len(out) - start)
            scales = np.repeat(grid[matrix, row // block[0]], block[1])[: out.shape[1]]
            out[start : start + count] *= scales
            start += count
