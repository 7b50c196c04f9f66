"""A machine to plan for: this one, one whose profile was taken elsewhere, or one that nobody has."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from tierstream.engine.bound import Rates
from tierstream.engine.planner.drive import DriveRates
from tierstream.io.errors import ConfigError
from tierstream.io.profile import MachineProfile, Throughput

if TYPE_CHECKING:
    from tierstream.engine.config import RunConfig
    from tierstream.engine.measure.machine import KnownDrive
    from tierstream.io.throttle import Limits


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run finds.

    Attributes:
        host_bytes: host memory that a run may use.
        gpu_bytes: memory of the GPU; None: layers are computed by the CPU, in host memory.
        cores: of the CPU, that a run may use.
        drives: in the order of the run's `tiers.nvme_dirs`.
        rates: what all of it gives; those of drives are in `drives`.
    """

    name: str
    host_bytes: int
    gpu_bytes: int | None
    cores: int
    drives: tuple[DriveRates, ...]
    rates: Rates

    @classmethod
    def here(cls, config: RunConfig, profile: MachineProfile | None = None) -> Self:
        """This machine, as the run would find it now; what its profile does not know is measured, which takes
        some seconds.

        Args:
            profile: that of the run, where it was read already.

        Raises:
            StorageError, ConfigError: see `load_profile` and `known_drives`.
        """
        import torch

        from tierstream.engine import assemble
        from tierstream.engine.device.device import Device
        from tierstream.engine.measure import machine

        profile, device = profile or machine.load_profile(config.tiers), Device(config.train.device)
        drives = machine.known_drives(config.tiers, profile)
        dtype = getattr(torch, config.model.dtype)
        threads = assemble.update_threads(config)
        rates = machine.machine_rates(profile, drives, device, dtype, threads)
        return replace(
            cls.unmeasured(config),
            drives=drive_rates(drives, config.tiers.throttle.limits),
            rates=machine.with_step_rates(rates, profile, device),
        )

    def drives_of(self, directories: Sequence[str]) -> tuple[DriveRates, ...]:
        """Those on which directories of a run lie, if it has drives of these names; else its first ones."""
        found = [self._drive_of(Path(directory)) for directory in directories]
        named = [drive for drive in found if drive is not None]
        if len({drive.directory for drive in named}) == len(directories):
            return tuple(named)
        return self.drives[: len(directories)]

    def _drive_of(self, path: Path) -> DriveRates | None:
        above = [drive for drive in self.drives if path.is_relative_to(drive.directory)]
        return max(above, key=lambda drive: len(Path(drive.directory).parts), default=None)

    @classmethod
    def unmeasured(cls, config: RunConfig) -> Self:
        """This machine for questions of what fits: its rates are not known."""
        import torch

        from tierstream.io import probes
        from tierstream.io.memory import memory_budget

        device = torch.device(config.train.device)
        unknown = math.nan
        return cls(
            name=probes.cpu_model() or "this machine",
            host_bytes=memory_budget().available_bytes,
            gpu_bytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
            cores=len(os.sched_getaffinity(0)),
            drives=tuple(DriveRates.unknown(path) for path in config.tiers.nvme_dirs or []),
            rates=Rates(flop_per_s=unknown, upload=unknown, update_parameters_per_s=unknown),
        )

    @classmethod
    def from_profile(
        cls,
        path: str | os.PathLike[str],
        threads_of: Callable[[int], int] = lambda cores: cores,
        limits: Limits | None = None,
    ) -> Self:
        """The machine of a profile (`tierstream bench --profile`), which may be another than this one: with
        its GPU if it has one, and with each of its drives.

        Args:
            threads_of: of so many cores, the threads of a run's update.
            limits: of each drive, of a run with `tiers.throttle`.

        Raises:
            StorageError, ConfigError: it is missing or damaged, or parts of it were not measured.
        """
        profile = MachineProfile.load(path)
        gpu = bool(profile.gpu)
        compute = profile.compute.get("cuda bfloat16" if gpu else "cpu bfloat16")
        missing = [
            part
            for part, known in (
                ("compute", compute), ("update", profile.update), ("host", profile.host),
                ("device", profile.device), ("copy", profile.copy or not gpu),
            )
            if not known
        ]  # fmt: skip
        if missing or compute is None:
            raise ConfigError(
                f"{path} does not say what its machine gives ({', '.join(missing)}): write it anew there, "
                f"with `tierstream bench --profile {path} DIRECTORY...`"
            )
        host, device = profile.host, profile.device
        return cls(
            name=", ".join(filter(None, (profile.cpu, profile.gpu))),
            host_bytes=int(host["bytes"]),
            gpu_bytes=int(device["bytes"]) if gpu else None,
            cores=int(host["cores"]),
            drives=tuple(_drive(each.directory, each.within(limits), limits) for each in profile.drives),
            rates=Rates(
                flop_per_s=compute,
                upload=profile.copy["upload"] if gpu else None,
                download=profile.copy["download"] if gpu else None,
                update_parameters_per_s=_update_rate(profile.update, threads_of(int(host["cores"]))),
                device_memory=device["memory"],
                launch_s=device["launch_s"],
                host_memory=host["memory"],
                host_copy=host["copy"],
                page_s=host["page_s"],
                wake_s=host["wake_s"],
            ),
        )


def _update_rate(measured: Mapping[str, float], threads: int) -> float:
    """Between the numbers of threads that were measured, which are keys, on a straight line."""
    counts = sorted(map(int, measured))
    return float(np.interp(threads, counts, [measured[str(count)] for count in counts]))


def drive_rates(drives: Sequence[KnownDrive], limits: Limits | None) -> tuple[DriveRates, ...]:
    """Of the directories of a run.

    Raises:
        ConfigError: the drive of one could not be measured.
    """
    found = []
    for drive in drives:
        if drive.rates is None:
            raise ConfigError(
                f"{drive.directory}: there was too little space to measure its drive; free some, or name a "
                "profile of it in tiers.profile"
            )
        found.append(_drive(drive.directory, drive.rates, limits))
    return tuple(found)


def _drive(directory: str, rates: Throughput, limits: Limits | None) -> DriveRates:
    latency_s = 0.0 if limits is None else limits.latency_s
    return DriveRates(directory=directory, weight=rates.mixed, latency_s=latency_s, **asdict(rates))
