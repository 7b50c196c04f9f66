"""`tierstream bench copy`"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError
from tierstream.io.measure import Measurement
from tierstream.io.memory import memory_budget
from tierstream.io.probes import last_level_cache_bytes
from tierstream.io.sizes import format_bytes
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import OutputOptions, check_output, present, run_cases
from tierstream.tools.bench.result import Result
from tierstream.tools.options import parse_options

_PROG = "tierstream bench copy"
_DESCRIPTION = """\
Measure the host's memory, and copies between it and the GPU.
- Host memory, by 1, 2, 4 and so on up to all cores: read, copied, and updated
  in place as AdamW does it (five streams read, four of them written).
- Copies up (H2D), down (D2H) and both at once, where "both" counts the bytes of
  both; host memory pinned as a run pins it (arena), by torch, and pageable.
- Every byte that was copied to or from the GPU is checked once per case.
- Without a GPU only the host's memory is measured.
"""
_MEMORY_PLOT = PlotSpec("memory", "Bandwidth of host memory", "threads", ("pattern",))
_COPY_PLOT = PlotSpec(
    "copies", "Copies between host memory and the GPU", "size_bytes", ("memory",), "direction", True
)
#: Less is not memory but a cache.
_MEMORY_BYTES_MIN = 4096
_MEMORY_NOTE = (
    "Host memory: bytes that the program reads and writes, over {size} in huge pages; the last-level cache "
    "has {cache}."
)
_COPY_NOTES = [
    '"both" is the sum of the two directions.',
    "Small copies are bound by what it takes to enqueue one; they are repeated over at least 256 MiB.",
]


@dataclass(kw_only=True)
class CopyOptions(OutputOptions):
    sizes: list[ByteSize] = dataclasses.field(
        default_factory=lambda: [ByteSize(f"{size}KiB") for size in (256, 1024, 4096, 16384, 65536, 262144)]
    )
    """Bytes per copy, 64 KiB to 1 GiB make sense."""
    device: str | None = None
    """The GPU, e.g. cuda:0; null: the first one, if there is one."""
    memory: ByteSize | None = None
    """Host memory to measure with: far more than the last-level cache holds. null: four times that, or what
    a quarter of the free memory is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("--sizes must be one size or more, each at least 1 byte")
        if self.memory is not None and self.memory < _MEMORY_BYTES_MIN:
            raise ConfigError(f"--memory is {self.memory}; it must be at least {_MEMORY_BYTES_MIN} bytes")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_options(CopyOptions, args, prog=_PROG, description=_DESCRIPTION)
    check_output(options)
    import torch

    if options.device is not None:
        _check_device(options.device)
    device = options.device or ("cuda:0" if torch.cuda.is_available() else None)
    from tierstream.engine.measure.adam_rates import thread_counts
    from tierstream.engine.measure.machine_facts import describe_machine
    from tierstream.engine.measure.memory_rates import buffer_bytes, memory_cases

    nbytes = options.memory or min(buffer_bytes(), memory_budget().available_bytes // 4)
    threads = thread_counts(len(os.sched_getaffinity(0)))
    measurements = run_cases(memory_cases(nbytes, threads), options.rounds, what="host memory")
    cache = last_level_cache_bytes()
    notes = [
        _MEMORY_NOTE.format(size=format_bytes(nbytes), cache=format_bytes(cache) if cache else "unknown size")
    ]
    plots, title = [_MEMORY_PLOT], "Host memory"
    if device is not None:
        measurements += _measure_copies(device, sorted(set(map(int, options.sizes))), options.rounds)
        plots, title = [*plots, _COPY_PLOT], f"Host memory, and copies between it and {device}"
        notes += _COPY_NOTES
    command = shlex.split(_PROG) + list(args)
    present(Result("copy", title, command, describe_machine(), measurements, notes), plots, options)
    return 0


def _measure_copies(name: str, sizes: Sequence[int], rounds: int) -> list[Measurement]:
    from tierstream.engine.device.device import Device
    from tierstream.engine.measure.copy_rates import CopyBench, arena_memory, buffer_bytes, other_memories

    device, nbytes = Device(name), buffer_bytes(sizes)
    try:
        bench = CopyBench(device, nbytes)
        with arena_memory(device, nbytes) as arena:
            memories = [arena, *other_memories(device, nbytes)]
            cases = [case for memory in memories for case in bench.cases(memory, sizes)]
            return run_cases(cases, rounds, what="copies")
    finally:
        device.close()


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
            f"--device is {name}, but torch {torch.__version__} sees no GPU; check that nvidia-smi lists it "
            "and that torch is a CUDA build, or leave --device out to measure the host's memory alone"
        )
    count = torch.cuda.device_count()
    if (torch.device(name).index or 0) >= count:
        raise ConfigError(f"--device is {name!r}, but the last of {count} CUDA devices is cuda:{count - 1}")
