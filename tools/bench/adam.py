"""`tierstream bench adam`"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.measure import Measurement
from tierstream.io.memory import memory_budget
from tierstream.io.sizes import format_bytes
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import OutputOptions, check_output, present, run_cases
from tierstream.tools.bench.result import BYTES_PER_PARAMETER, Details, Result
from tierstream.tools.options import parse_options

_PROG = "tierstream bench adam"
_DESCRIPTION = """\
Measure the AdamW update on the CPU, in parameters and in bytes per second.
- Kernels: split master, fp32 master with a bf16 weight, each with a bf16 and an
  fp32 gradient, and fp32; beside them torch's fused AdamW with as many threads.
- Beside each: what memory gives to the same reads and writes of the same arrays
  without the arithmetic, in turn, and the kernel's share of it.
- The instruction set is the best of this CPU; TIERSTREAM_ISA=avx2 or scalar
  lowers it.
"""
_PLOTS = [PlotSpec("adam", "AdamW on the CPU", "threads", ("kernel",), only=("part", "AdamW"))]
_NOTES = [
    "GB/s counts every array once for each time it is read or written: 26 to 30 bytes per parameter.",
    "memory: the same arrays, read and written in the same order with one subtraction per element. Share: "
    "the kernel's speed over that.",
    "page by page: one call per 4,194,304 parameters, as in training, where each page is a call.",
]
#: Host memory that the arrays of all kernels take (22 bytes), and those of torch (16).
_STATE_BYTES_PER_PARAMETER = 38
#: In a run every page comes from memory: more than the last-level caches hold, of which some have 500 MB.
_PARAMETERS = 1 << 26
_THREADS_MAX = 1024


@dataclass(kw_only=True)
class AdamOptions(OutputOptions):
    parameters: int | None = None
    """Parameters that one run updates: more than the last-level cache holds, at 12 bytes each. null: 67
    million, or what a quarter of the free memory holds.
    """
    threads: list[int] = dataclasses.field(default_factory=list)
    """Numbers of threads. None given: 1, 2, 4 and so on up to all usable cores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameters is not None and self.parameters < 1:
            raise ConfigError(f"--parameters is {self.parameters}; it must be at least 1")
        wrong = [count for count in self.threads if not 1 <= count <= _THREADS_MAX]
        if wrong:
            raise ConfigError(f"--threads has {wrong[0]}; each must be between 1 and {_THREADS_MAX}")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_options(AdamOptions, args, prog=_PROG, description=_DESCRIPTION)
    check_output(options)
    parameters = _fitting_parameters(options.parameters)
    # As for `tierstream train`: read when OpenMP starts. A torch thread that spins on after its part would
    # take the core from the kernel that is measured next.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tierstream.engine.measure.adam_rates import adam_cases, thread_counts
    from tierstream.engine.measure.machine_facts import describe_machine

    threads = sorted(set(options.threads)) or thread_counts(len(os.sched_getaffinity(0)))
    measurements = run_cases(adam_cases(parameters, threads), options.rounds)
    title = f"AdamW on the CPU, {parameters:,} parameters"
    command = shlex.split(_PROG) + list(args)
    machine, shares = describe_machine(), [_shares(measurements)]
    result = Result("adam", title, command, machine, measurements, _NOTES, details=shares)
    present(result, _PLOTS, options)
    return 0


def _shares(measurements: Sequence[Measurement]) -> Details:
    """Of every kernel and number of threads: its share of what memory gives."""
    from tierstream.engine.measure.adam_rates import MEMORY, UPDATE, traffic_of

    by_part: dict[object, dict[tuple[object, object], Measurement]] = {UPDATE: {}, MEMORY: {}}
    for measurement in measurements:
        labels = measurement.labels
        by_part[labels["part"]][labels["kernel"], labels["threads"]] = measurement
    rows: list[dict[str, str | int | float | None]] = []
    for (kernel, threads), update in by_part[UPDATE].items():
        memory = by_part[MEMORY][traffic_of(str(kernel)), threads]
        gigabytes = int(update.labels[BYTES_PER_PARAMETER]) / 1e9
        rows.append(
            {
                "kernel": str(kernel),
                "threads": update.labels["threads"],
                "gb_per_s": update.median * gigabytes,
                "memory_gb_per_s": memory.median * gigabytes,
                "share_of_memory": update.median / memory.median,
            }
        )
    headings = {
        "kernel": "kernel",
        "threads": "threads",
        "gb_per_s": "GB/s",
        "memory_gb_per_s": "memory GB/s",
        "share_of_memory": "share",
    }
    return Details("shares", "share of what memory gives to the same traffic", headings, rows)


def _fitting_parameters(parameters: int | None) -> int:
    """The parameters asked for, or as many as are good to have."""
    available_bytes = memory_budget().available_bytes
    if parameters is None:
        return max(1, min(_PARAMETERS, available_bytes // 4 // _STATE_BYTES_PER_PARAMETER))
    need_bytes = parameters * _STATE_BYTES_PER_PARAMETER
    if need_bytes > available_bytes:
        raise BudgetError(
            f"--parameters {parameters} needs {format_bytes(need_bytes)} of host memory, and "
            f"{format_bytes(available_bytes)} are available; at most "
            f"{available_bytes // _STATE_BYTES_PER_PARAMETER} fit"
        )
    return parameters
