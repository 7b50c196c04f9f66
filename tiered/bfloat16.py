"""The zarr data type "bfloat16": importing this module teaches it to zarr-python, which has none of its own.

Name and encoding are those of the registry of zarr extensions (data-types/bfloat16), which tensorstore
follows too, so each reads what the other wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

_NAME: Literal["bfloat16"] = "bfloat16"
_NATIVE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_ITEM_BYTES = 2


# HasItemSize lets zarr reckon with bytes; HasEndianness makes it write the byte order that tensorstore
# insists on.
@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """bfloat16 of ml_dtypes, the upper half of a float32; zarr format 3 only."""

    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = _NAME
    dtype_cls = type(_NATIVE)

    @property
    def item_size(self) -> int:
        return _ITEM_BYTES

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != _NATIVE:
            raise DataTypeValidationError(f"{dtype} is not {_NAME}")
        return cls()

    def to_native_dtype(self) -> Any:
        return _NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"zarr format 2 has no {_NAME}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != _NAME:
            raise DataTypeValidationError(f"{data!r} is not {_NAME!r}")
        return cls()

    def to_json(self, zarr_format: Any) -> Any:
        if zarr_format != 3:
            raise DataTypeValidationError(f"zarr format {zarr_format} has no {_NAME}")
        return _NAME

    def _check_scalar(self, data: object) -> TypeGuard[Any]:
        return isinstance(data, (bool, int, float, np.number, ml_dtypes.bfloat16))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} cannot be a {_NAME}")
        if isinstance(data, ml_dtypes.bfloat16):
            return data  # float() would lose the payload of a NaN
        return _NATIVE.type(float(data))

    def default_scalar(self) -> Any:
        return _NATIVE.type(0)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        """A JSON number, or zarr's names for what JSON cannot say; an unusual NaN as hex digits."""
        value = self.cast_scalar(data)
        if np.isnan(value):
            bits = int(np.asarray(value).view(np.uint16))
            return "NaN" if bits == 0x7FC0 else f"0x{bits:04x}"
        if np.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(value)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), dtype=np.uint16).view(_NATIVE)[()]
        return _NATIVE.type(float(data))  # float() reads "NaN", "Infinity" and "-Infinity"


data_type_registry.register(_NAME, BFloat16)
