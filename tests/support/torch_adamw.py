"""What torch.optim.AdamW needs to be an oracle to the bit on a CPU: tensors padded by `padded`, these marks,
and its step within `CorrectlyRoundedSqrt`.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Without AVX2 torch's kernels on x86 have no fused multiply-add, and round otherwise.
needs_torch_fma = pytest.mark.skipif(
    platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch runs without vector instructions on this CPU",
)


class CorrectlyRoundedSqrt(TorchDispatchMode):
    """Replaces torch's sqrt, which MKL rounds wrongly in about one of six numbers, by IEEE 754's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_torch_thread():
    """Torch cuts a tensor for its threads anywhere, and so has elements without fma inside it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded(values: np.ndarray) -> torch.Tensor:
    """Torch computes the last few elements of a tensor without fma: zeros are appended to be those."""
    size = (values.size // 4096 + 1) * 4096
    return torch.from_numpy(np.concatenate([values, np.zeros(size - values.size, np.float32)]))
