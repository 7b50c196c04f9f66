"""What a run leaves open of its placement is chosen for this machine, if its profile says what that gives."""

from __future__ import annotations

import os
from collections.abc import Callable

from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import device_name
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.planner.choose import choose
from tierstream.engine.planner.machine import Machine
from tierstream.io import probes
from tierstream.io.backend import resolve_backend
from tierstream.io.profile import MachineProfile


def placed(
    config: RunConfig,
    profile: MachineProfile,
    device: Device,
    units: ModelUnits,
    vocabulary: int,
    say: Callable[[str], None],
) -> RunConfig:
    """The run with nothing open, of which `say` is told; or as it is, if its profile is empty, or one that
    does not know its drives, processor or GPU: a start measures none of them for this.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
    """
    if not _is_known(config, profile, device):
        return config
    choice = choose(config, Machine.here(config, profile), model=(units, vocabulary))
    say(f"plan: {choice.describe()}")
    return choice.config


def _is_known(config: RunConfig, profile: MachineProfile, device: Device) -> bool:
    tiers = config.tiers
    if not (profile.host and profile.device) or profile.cpu != probes.cpu_model():
        return False
    if device.is_cuda and profile.gpu != device_name(device):
        return False
    backend = resolve_backend(tiers.backend)
    return all(os.path.isdir(path) and profile.drive_for(path, backend) for path in tiers.nvme_dirs or [])
