"""`tierstream bench copy`"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import OutputOptions, check_output, present, run_cases
from tierstream.tools.bench.result import Result
from tierstream.tools.options import parse_options

_PROG = "tierstream bench copy"
_DESCRIPTION = """\
Measure copies between host memory and the GPU.
- Up (H2D), down (D2H) and both at once, where "both" counts the bytes of both.
- Host memory pinned as a run pins it (arena), by torch, and pageable.
- Every byte is checked once per case.
"""
_PLOTS = [
    PlotSpec("copies", "Copies between host memory and the GPU", "size_bytes", ("memory",), "direction", True)
]
_NOTES = [
    '"both" is the sum of the two directions.',
    "Small copies are bound by what it takes to enqueue one; they are repeated over at least 256 MiB.",
]


@dataclass(kw_only=True)
class CopyOptions(OutputOptions):
    sizes: list[ByteSize] = dataclasses.field(
        default_factory=lambda: [ByteSize(f"{size}KiB") for size in (256, 1024, 4096, 16384, 65536, 262144)]
    )
    """Bytes per copy, 64 KiB to 1 GiB make sense."""
    device: str = "cuda:0"
    """The GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("--sizes must be one size or more, each at least 1 byte")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_options(CopyOptions, args, prog=_PROG, description=_DESCRIPTION)
    check_output(options)
    _check_device(options.device)
    from tierstream.engine.copy_rates import CopyBench, arena_memory, buffer_bytes, other_memories
    from tierstream.engine.device import Device
    from tierstream.tools.bench.machine import describe_machine

    device, sizes = Device(options.device), sorted(set(map(int, options.sizes)))
    nbytes = buffer_bytes(sizes)
    bench = CopyBench(device, nbytes)
    with arena_memory(device, nbytes) as arena:
        memories = [arena, *other_memories(device, nbytes)]
        measurements = run_cases(
            [case for memory in memories for case in bench.cases(memory, sizes)], options.rounds
        )
    device.close()
    command = shlex.split(_PROG) + list(args)
    title = f"Copies between host memory and {options.device}"
    present(Result("copy", title, command, describe_machine(), measurements, _NOTES), _PLOTS, options)
    return 0


def _check_device(name: str) -> None:
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; write cuda or cuda:0") from error
    if kind != "cuda":
        raise ConfigError(f"--device is {name!r}, but copies are measured to a GPU: write cuda:0")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench copy measures copies between host memory and a GPU, and torch {torch.__version__} "
            "sees none; run it on the machine that trains, and check there that nvidia-smi lists the GPU and "
            "that torch is a CUDA build"
        )
    count = torch.cuda.device_count()
    if (torch.device(name).index or 0) >= count:
        raise ConfigError(f"--device is {name!r}, but the last of {count} CUDA devices is cuda:{count - 1}")
