"""How fast the device multiplies matrices."""

from __future__ import annotations

import torch

from tierstream.engine.device.device import Device
from tierstream.io.measure import Case, Sample, measure, timed

#: Edge of the square matrices: large enough that the multiplication, not its launch, is what is timed.
CUDA_EDGE, CPU_EDGE = 8192, 1536
#: A bound asks what the machine can give, and others only ever slow it down: the best of so many rounds.
QUICK_ROUNDS = 5


def matmul_rate(device: Device, dtype: torch.dtype) -> float:
    """FLOP per second of a square matrix product in `dtype`, the best of several rounds."""
    edge = CUDA_EDGE if device.is_cuda else CPU_EDGE
    a, b = (torch.randn(edge, edge, device=device.torch_device).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(a, b)
        device.compute.record().synchronize()

    def run() -> Sample:
        return timed(2.0 * edge**3, multiply)

    (measurement,) = measure([Case({"dtype": str(dtype)}, "FLOP", run)], rounds=QUICK_ROUNDS)
    return max(measurement.rates)
