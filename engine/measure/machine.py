"""What this machine gives to a run: from its profile where that holds (`tierstream bench --profile`),
measured now where it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

import torch

from tierstream.engine.bound import Rates, side_by_side
from tierstream.engine.device.device import Device
from tierstream.engine.measure import adam_rates, compute_rates, copy_rates, step_rates
from tierstream.engine.plan import TiersConfig
from tierstream.io import probes
from tierstream.io.backend import DEFAULT_QUEUE_DEPTH, DEFAULT_TASK_BYTES, DEFAULT_THREADS, resolve_backend
from tierstream.io.drive_rates import Tuning
from tierstream.io.profile import (
    DriveProfile,
    MachineProfile,
    Throughput,
    drive_identity,
    measure_drive,
    measure_long,
)
from tierstream.io.throttle import Limits

DEFAULT_TUNING = Tuning(
    threads=DEFAULT_THREADS, task_bytes=DEFAULT_TASK_BYTES, queue_depth=DEFAULT_QUEUE_DEPTH
)
#: How long `drives_now` reads, writes, and does both.
_LONG_S = 2.0


@dataclass(frozen=True, slots=True)
class KnownDrive:
    """One of `tiers.nvme_dirs`: how it is worked on, and what it gives.

    Attributes:
        measured: its drive; None where that could not be.
        rates: what of it this directory gets, within the limits of the run; None likewise.
        weight: share of the traffic that it should carry, relative to the others.
    """

    directory: str
    tuning: Tuning
    measured: DriveProfile | None
    rates: Throughput | None
    weight: float


def load_profile(tiers: TiersConfig) -> MachineProfile:
    """The profile that the run names; an empty one if it names none.

    Raises:
        StorageError, ConfigError: it is missing or damaged.
    """
    return MachineProfile() if tiers.profile is None else MachineProfile.load(tiers.profile)


def explain_profile(tiers: TiersConfig, profile: MachineProfile) -> list[str]:
    """What of the profile is used here and what is not, for people."""
    if tiers.profile is None:
        return []
    if profile.cpu != probes.cpu_model():
        there, here = profile.cpu, probes.cpu_model()
        return [f"{tiers.profile} is of another machine ({there}; this is {here}): measured now"]
    backend, lines = resolve_backend(tiers.backend), []
    for directory in tiers.nvme_dirs or []:
        known = profile.drive_for(directory, backend)
        state = f"as of {profile.measured}" if known else f"not in it by way of {backend}: measured now"
        lines.append(f"{tiers.profile}: {directory} {state}")
    return lines


def known_drives(tiers: TiersConfig, profile: MachineProfile) -> list[KnownDrive]:
    """Tuning, rates and weight of every directory of the run; drives that the profile does not know are
    measured, each once.

    The weight of a directory is the mixed rate of its drive, shared with the run's other directories there;
    1 for all if any is not known.

    Raises:
        StorageError: a drive fails.
    """
    backend = resolve_backend(tiers.backend)
    if profile.cpu != probes.cpu_model():  # device numbers mean something else on another machine
        profile = MachineProfile()
    fallback = _tuning(tiers, DEFAULT_TUNING)

    def measured_of(directory: str) -> DriveProfile | None:
        return profile.drive_for(directory, backend) or measure_drive(directory, backend, fallback)

    return _drives(tiers, measured_of)


def drives_now(tiers: TiersConfig, known: Sequence[KnownDrive]) -> list[KnownDrive]:
    """The drives of `known_drives` as they are now, each measured for some seconds.

    Raises:
        StorageError: a drive fails.
    """
    before = {drive.directory: drive.measured for drive in known}

    def measured_of(directory: str) -> DriveProfile | None:
        measured = before[directory]
        return None if measured is None else measure_long(measured, directory, _LONG_S)

    return _drives(tiers, measured_of)


def _drives(tiers: TiersConfig, measured_of: Callable[[str], DriveProfile | None]) -> list[KnownDrive]:
    """`measured_of` is asked for one directory of each drive."""
    directories = tiers.nvme_dirs or []
    devices = [drive_identity(directory)[0] for directory in directories]
    found: dict[str, DriveProfile | None] = {}
    for directory, device in zip(directories, devices, strict=True):
        if device not in found:
            found[device] = measured_of(directory)
    users, limits = Counter(devices), tiers.throttle.limits
    known = [
        _known(tiers, directory, found[device], users[device], limits)
        for directory, device in zip(directories, devices, strict=True)
    ]
    if any(drive.rates is None for drive in known):
        return [replace(drive, weight=1.0) for drive in known]
    return known


def _known(
    tiers: TiersConfig, directory: str, measured: DriveProfile | None, users: int, limits: Limits | None
) -> KnownDrive:
    """One of the `users` directories of a drive."""
    if measured is None:
        return KnownDrive(directory, _tuning(tiers, DEFAULT_TUNING), None, None, 1.0)
    rates = measured.within(limits, users)
    return KnownDrive(directory, _tuning(tiers, measured.tuning), measured, rates, rates.mixed)


def _tuning(tiers: TiersConfig, tuning: Tuning) -> Tuning:
    return tuning if tiers.io_threads is None else replace(tuning, threads=tiers.io_threads)


def machine_rates(
    profile: MachineProfile,
    drives: Sequence[KnownDrive],
    device: Device,
    dtype: torch.dtype,
    threads: int,
) -> Rates:
    """All rates that bound a step.

    Args:
        dtype: of the weights. threads: of the update.
    """
    same_cpu = profile.cpu == probes.cpu_model()
    same_device = same_cpu if not device.is_cuda else profile.gpu == device_name(device)
    compute = profile.compute.get(compute_key(device, dtype)) if same_device else None
    update = profile.update.get(str(threads)) if same_cpu else None
    upload = profile.copy.get("upload") if same_device and device.is_cuda else None
    rates = Rates(
        flop_per_s=compute or compute_rates.matmul_rate(device, dtype),
        upload=(upload or copy_rates.upload_rate(device)) if device.is_cuda else None,
        update_parameters_per_s=update or adam_rates.update_rate(threads),
    )
    return with_drives(rates, drives)


def mean_drives(times: Sequence[Sequence[KnownDrive]]) -> list[KnownDrive]:
    """The same drives at several times, with the means of their rates."""
    return [_mean_drive(same) for same in zip(*times, strict=True)]


def _mean_drive(times: Sequence[KnownDrive]) -> KnownDrive:
    rates = [each.rates for each in times if each.rates is not None]
    if len(rates) < len(times):
        return replace(times[-1], rates=None)
    means = {each.name: fmean(getattr(rate, each.name) for rate in rates) for each in fields(Throughput)}
    return replace(times[-1], rates=Throughput(**means))


def with_drives(rates: Rates, drives: Sequence[KnownDrive]) -> Rates:
    """With what these drives give side by side, each its share: the one that is done last sets the pace."""
    known = [(drive.rates, drive.weight) for drive in drives if drive.rates is not None]
    return side_by_side(rates, known if len(known) == len(drives) else ())


def with_step_rates(rates: Rates, profile: MachineProfile, device: Device) -> Rates:
    """With what a step takes beside that which bounds it."""
    same_cpu = profile.cpu == probes.cpu_model()
    same_device = same_cpu if not device.is_cuda else profile.gpu == device_name(device)
    host = (profile.host if same_cpu else None) or step_rates.host_figures()
    own = (profile.device if same_device else None) or step_rates.device_figures(device)
    copy = (profile.copy if same_device else None) or copy_rates.quick_rates(device) if device.is_cuda else {}
    return replace(
        rates,
        download=copy.get("download"),
        device_memory=own["memory"],
        launch_s=own["launch_s"],
        host_memory=host["memory"],
        host_copy=host["copy"],
        page_s=host["page_s"],
        wake_s=host["wake_s"],
    )


def device_name(device: Device) -> str:
    """Name of the GPU; empty for the CPU."""
    return torch.cuda.get_device_name(device.torch_device) if device.is_cuda else ""


def compute_key(device: Device, dtype: torch.dtype) -> str:
    """Key of a matrix product's rate in a profile, e.g. "cuda bfloat16"."""
    return f"{device.torch_device.type} {str(dtype).removeprefix('torch.')}"
