"""`tierstream bench --profile FILE DIR...`: all that runs want to know of a machine, in one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from tierstream.io.errors import ConfigError
from tierstream.io.profile import MachineProfile, drive_identity
from tierstream.tools.bench.report import check_output, present
from tierstream.tools.bench.storage import measure_storage, start_profile, storage_plots
from tierstream.tools.options import parse_options
from tierstream.tools.quiet import without_warnings
from tierstream.tools.tables import count, open_console, table

_PROG = "tierstream bench --profile"
_DESCRIPTION = """\
Measure a machine for planning and training, and write its profile to FILE.
- DIR: a directory on each drive that is to hold state; none: the drives are left
  out. What the file knows of other drives is kept.
- Give the file to runs as tiers.profile: they start without measuring, and work
  on each drive with its best threads, block and queue depth.
"""


def main(args: Sequence[str]) -> int:
    """The arguments after `--profile`. Returns the exit status; raises TierstreamError."""
    from tierstream.tools.bench.drives import StorageOptions

    words = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    if not words and not {"-h", "--help"} & set(args):
        raise ConfigError(f"FILE is missing; usage: {_PROG} FILE DIR... [options]")
    file, directories, rest = next(iter(args[:words]), ""), list(args[1:words]), list(args[words:])
    options = parse_options(StorageOptions, rest, prog=f"{_PROG} FILE [DIR...]", description=_DESCRIPTION)
    if options.profile is not None:
        raise ConfigError(f"--profile is named twice: {file} and {options.profile}")
    options = replace(options, profile=file)
    check_output(options)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `tierstream train`
    directories = _one_per_drive(directories)
    if directories:
        command = ["tierstream", "bench", "--profile", *args]
        with without_warnings("tierstream.io.posix"):
            result, profile = measure_storage(directories, options, command)
        present(result, storage_plots(result.measurements), options)
    else:
        profile = start_profile(options)
    profile = _with_processors(profile)
    profile.save(file)
    if options.json != "-":
        _print(profile)
        print(f"machine profile: {file}")
    return 0


def _one_per_drive(directories: Sequence[str]) -> list[str]:
    """The first directory of each drive: a second one would measure the same again."""
    first: dict[str, str] = {}
    for directory in directories:
        drive = drive_identity(directory)[0] if os.path.exists(directory) else directory
        known = first.setdefault(drive, directory)
        if known != directory:
            print(f"{directory} lies on the drive of {known}: measured once", file=sys.stderr)
    return list(first.values())


def _with_processors(profile: MachineProfile) -> MachineProfile:
    """The profile with the rates of this processor and of the first GPU."""
    import torch

    from tierstream.engine.device.device import Device
    from tierstream.engine.measure import adam_rates, compute_rates, copy_rates, step_rates
    from tierstream.engine.measure.machine import compute_key, device_name

    threads = adam_rates.thread_counts(len(os.sched_getaffinity(0)))
    device = Device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return replace(
            profile,
            gpu=device_name(device),
            update={str(n): adam_rates.update_rate(n) for n in threads},
            compute={
                compute_key(device, dtype): compute_rates.matmul_rate(device, dtype)
                for dtype in (torch.bfloat16, torch.float32)
            },
            copy=copy_rates.quick_rates(device) if device.is_cuda else {},
            host=step_rates.host_figures(),
            device=step_rates.device_figures(device),
        )
    finally:
        device.close()


def _print(profile: MachineProfile) -> None:
    rows = [(f"AdamW, {n} threads", count(rate, " ") + "param/s") for n, rate in profile.update.items()]
    rows += [(f"matrix product, {what}", count(n, " ") + "FLOP/s") for what, n in profile.compute.items()]
    rows += [(f"copies, {what}", f"{rate / 1e9:.1f} GB/s") for what, rate in profile.copy.items()]
    rows += [
        ("Python for a page", f"{1e6 * profile.host['page_s']:.0f} us"),
        ("host memory, all cores", f"{profile.host['memory'] / 1e9:.0f} GB/s"),
        ("copies in host memory, 1 thread", f"{profile.host['copy'] / 1e9:.1f} GB/s"),
        ("memory of the device", f"{profile.device['memory'] / 1e9:.0f} GB/s"),
        ("launch of an operation", f"{1e6 * profile.device['launch_s']:.1f} us"),
    ]
    open_console(sys.stdout).print(table("Processors", ("what", "rate"), rows))
