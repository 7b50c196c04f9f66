"""Weights in MXFP4, as checkpoints of gpt-oss store their experts, back to full precision.

Format (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): 32 elements of
4 bits, a sign and one of eight magnitudes, share a scale of one byte, a power of two. A bfloat16 holds every
value exactly. A stack of E matrices is stored as `NAME_blocks`, uint8 [E, rows, columns / 32, 16], the first
of two elements in the lower half of a byte, and `NAME_scales`, uint8 [E, rows, columns / 32]; the parameter
NAME is [E, columns, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream.engine.weights.safetensors_dir import CheckpointDir
from tierstream.engine.weights.tensor_entry import E8M0_VALUES, TensorEntry
from tierstream.io.errors import ModelSourceError

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_ELEMENTS = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
#: Both elements of every byte, looked up as one item of 8 bytes.
_PAIRS = _ELEMENTS[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)].view(np.uint64)[:, 0]
_BLOCK_BYTES = 16


@dataclass(frozen=True)
class Mxfp4Stack:
    """A parameter that is a stack of matrices, and the two stored tensors that it comes from."""

    name: str
    blocks: TensorEntry
    scales: TensorEntry

    @property
    def keys(self) -> tuple[str, ...]:
        return self.blocks.name, self.scales.name

    @property
    def targets(self) -> Mapping[str, tuple[int, ...]]:
        """The parameter -> its shape."""
        count, rows, groups = self.scales.shape
        return {self.name: (count, groups * 2 * _BLOCK_BYTES, rows)}

    def stream(
        self, read: Callable[[str, int], torch.Tensor]
    ) -> Iterator[tuple[str, int, NDArray[np.float32]]]:
        """Yield `(parameter, first element, fp32 values)`; `read(key, row)` gives a row of a stored tensor.

        Twice the bytes of one matrix in fp32 are in memory.
        """
        ((_, shape),) = self.targets.items()
        for row in range(shape[0]):
            blocks, scales = (read(key, row).numpy() for key in self.keys)
            yield self.name, row * prod(shape[1:]), dequantise(blocks, scales).reshape(-1)


def dequantise(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """One matrix: blocks [rows, columns / 32, 16], scales [rows, columns / 32] -> values [columns, rows]."""
    values = _PAIRS[blocks].view(np.float32)
    with np.errstate(over="ignore"):  # the largest scale makes infinities, which loading refuses
        values *= E8M0_VALUES[scales][..., None]
    transposed = torch.from_numpy(values.reshape(len(scales), -1)).T
    return transposed.contiguous().numpy()  # by torch's threads


def find_stacks(checkpoint: CheckpointDir) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """NAME -> its blocks and scales; a NAME that is stored itself is none.

    Raises:
        ModelSourceError: the shapes of the two do not belong together.
    """
    tensors, found = checkpoint.tensors, {}
    for key, blocks in tensors.items():
        name = key.removesuffix("_blocks")
        scales = tensors.get(f"{name}_scales")
        if name in tensors or scales is None or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            continue
        if len(scales.shape) != 3 or blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise ModelSourceError(
                f"{checkpoint.path}: {key} is {list(blocks.shape)} and {scales.name} is "
                f"{list(scales.shape)}; MXFP4 wants [experts, rows, blocks, {_BLOCK_BYTES}] and a scale for "
                "each block; download them again"
            )
        found[name] = blocks, scales
    return found
