"""One tensor of a checkpoint file, and the types that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

#: Bits per element of every type of the safetensors format.
ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6,
    "F6_E3M2": 6, "F4": 4, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "C64": 64,
}  # fmt: skip
#: Types that weights may have, and how numpy sees their bytes (a bfloat16 is the upper half of an fp32).
FLOAT_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
}  # fmt: skip
#: The types that are read as a whole, as torch has them.
STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64,
    "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
#: Values of the bytes of E8M0, bare exponents; 255 is NaN.
E8M0_VALUES = np.array([*(2.0 ** (exponent - 127) for exponent in range(255)), np.nan], np.float32)


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Where the scales of a quantised tensor of matrices lie, and the rows and columns that share one."""

    entry: TensorEntry
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `nbytes` bytes from byte `offset` of `file`; `scales` if it is in FP8."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    scales: BlockScales | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether weights can be read from it."""
        return self.dtype in FLOAT_DTYPES or self.scales is not None
