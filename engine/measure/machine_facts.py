"""On what a run or a benchmark ran, for its report."""

from __future__ import annotations

import os
import platform

from tierstream.io import probes
from tierstream.io.memory import memory_budget
from tierstream.io.sizes import format_bytes


def describe_machine() -> dict[str, str]:
    """Name of a part -> what it is, in the order in which a report shows them."""
    import torch

    from tierstream import _native

    limits = memory_budget().limits
    machine = {
        "cpu": probes.cpu_model() or platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "isa": _native.cpu_isa(),
        "memory": format_bytes(min(limit.limit_bytes for limit in limits)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["cuda"] = f"{torch.version.cuda}, driver {probes.nvidia_driver_version() or 'unknown'}"
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        machine["gpu"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return machine
