"""AdamW and the sum of squares where the planes are: by `_native` on the CPU, by the same sequence of
operations compiled for the GPU (kernels.cu), with the same bits.

torch compiles the source when it is first used, with NVRTC, which comes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream import _native
from tierstream.engine.update.optimizer import AdamW

_THREADS = 256
#: Fixed, so that the order of the additions is.
_SUM_BLOCKS = 1024
_ADAMW_BLOCKS = 4096
#: Kernels count in 32 bits.
_ELEMENTS_PER_CALL = 1 << 30
#: What a thread takes at a time (csrc/operations.cpp): half a megabyte of planes, which its cache holds.
_BLOCK_ELEMENTS_PER_THREAD = 32768
SOURCE = Path(__file__).with_name("kernels.cu")


class Kernels(Protocol):
    """What the optimizer computes on a device."""

    def adamw(self, planes: Mapping[str, torch.Tensor], settings: AdamW) -> None:
        """One AdamW step in place.

        Args:
            planes: flat, of one length: `weight` with `master_low` (uint16 patterns both) or with `master`,
                or an fp32 `weight` alone; `exp_avg`, `exp_avg_sq`; `grad` in fp32, or bf16 as uint16.
        """

    def sum_squares(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """The sum of squares of flat fp32 `values` to `out`, fp64 [1]; the same bits each time on one device.

        fp64 cannot overflow here, so the result is finite exactly if every element is.
        """

    def round_bf16(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """fp32 `values` to bf16 `out` of the same length, round to nearest even."""


def cpu_adamw(planes: Mapping[str, NDArray[Any]], settings: AdamW, threads: int) -> None:
    """As `Kernels.adamw`, on arrays in host memory, by at most `threads` threads."""
    moments = planes["exp_avg"], planes["exp_avg_sq"], planes["grad"]
    if "master_low" in planes:
        _native.adamw_split(planes["weight"], planes["master_low"], *moments, **settings, threads=threads)
    elif "master" in planes:
        _native.adamw_fp32(planes["master"], planes["weight"], *moments, **settings, threads=threads)
    else:
        _native.adamw_fp32(planes["weight"], None, *moments, **settings, threads=threads)


def cpu_adamw_idle(planes: Mapping[str, NDArray[Any]], updates: Sequence[AdamW], threads: int) -> None:
    """Updates whose gradient is zero, one after another: block by block, so that the planes cross memory once
    however many they are.

    Args:
        planes: as for `cpu_adamw`, without `grad`. updates: settings of each.
    """
    zeros = np.zeros(_BLOCK_ELEMENTS_PER_THREAD * threads, np.float32)
    for start in range(0, planes["exp_avg"].size, zeros.size):
        block = {plane: values[start : start + zeros.size] for plane, values in planes.items()}
        block["grad"] = zeros[: block["exp_avg"].size]
        for settings in updates:
            cpu_adamw(block, settings, threads)


class HostKernels:
    """`Kernels` of the CPU."""

    def adamw(self, planes: Mapping[str, torch.Tensor], settings: AdamW) -> None:
        cpu_adamw({plane: values.numpy() for plane, values in planes.items()}, settings, threads=1)

    def sum_squares(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out[0] = _native.sum_squares(values.numpy(), threads=1)

    def round_bf16(self, values: torch.Tensor, out: torch.Tensor) -> None:
        _native.round_bf16(values.numpy(), out.view(torch.uint16).numpy())


class CudaKernels:
    """`Kernels` of a CUDA GPU, enqueued on the current stream. Nothing is allocated after the first call."""

    def __init__(self, device: torch.device) -> None:
        self._partials = torch.empty(_SUM_BLOCKS, dtype=torch.float64, device=device)

    def adamw(self, planes: Mapping[str, torch.Tensor], settings: AdamW) -> None:
        if "master_low" in planes:
            kind, names = "split", ["weight", "master_low"]
        elif "master" in planes:
            kind, names = "master", ["master", "weight"]
        else:
            kind, names = "fp32", ["weight"]
        grad = "grad_fp32" if planes["grad"].dtype == torch.float32 else "grad_bf16"
        kernel = _compiled(f"adamw_{kind}_{grad}")
        scalars = _native.adamw_scalars(**settings)
        arrays = [planes[name] for name in (*names, "exp_avg", "exp_avg_sq", "grad")]
        count = arrays[0].numel()
        for start in range(0, count, _ELEMENTS_PER_CALL):
            parts = [array[start : start + _ELEMENTS_PER_CALL] for array in arrays]
            size = parts[0].numel()
            blocks = min(_ADAMW_BLOCKS, -(-size // _THREADS))
            kernel((blocks, 1, 1), (_THREADS, 1, 1), [*parts, size, *scalars])

    def sum_squares(self, values: torch.Tensor, out: torch.Tensor) -> None:
        kernel = _compiled("sum_squares")
        parts = values.split(_ELEMENTS_PER_CALL)
        for index, part in enumerate(parts):
            kernel((_SUM_BLOCKS, 1, 1), (_THREADS, 1, 1), [part, part.numel(), self._partials])
            if index == 0:
                torch.sum(self._partials, dim=0, keepdim=True, out=out)
            else:
                out.add_(self._partials.sum())

    def round_bf16(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)


@cache
def _compiled(name: str) -> Any:
    """A kernel of the source for the current GPU."""
    source = SOURCE.read_text().replace("SUM_THREADS", str(_THREADS))
    return torch.cuda._compile_kernel(source, name)


#: What the elements of a plane are to the kernels, by its dtype.
NUMPY_DTYPES: Mapping[str, Any] = {"bfloat16": np.uint16, "uint16": np.uint16, "float32": np.float32}
TORCH_DTYPES = {"bfloat16": torch.uint16, "uint16": torch.uint16, "float32": torch.float32}
