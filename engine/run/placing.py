"""The plan of a run; what the run leaves open of it is chosen, if the profile of its machine says enough."""

from __future__ import annotations

import os
from collections.abc import Callable

from tierstream.engine import assemble
from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import device_name
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan
from tierstream.engine.planner.choose import choose
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.remedies import with_remedies
from tierstream.engine.planner.what_if import Setting
from tierstream.io import probes
from tierstream.io.backend import resolve_backend
from tierstream.io.errors import BudgetError
from tierstream.io.profile import MachineProfile
from tierstream.tiered.layout import Layout


def placed(
    config: RunConfig,
    profile: MachineProfile,
    device: Device,
    units: ModelUnits,
    vocabulary: int,
    say: Callable[[str], None],
) -> tuple[RunConfig, Plan, Layout]:
    """The run with nothing open, of which `say` is told; or as it is, if its profile is empty, or one that
    does not know its drives, processor or GPU: a start measures none of them for this.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once; says what would do.
    """
    try:
        if _is_known(config, profile, device):
            choice = choose(config, Machine.here(config, profile), model=(units, vocabulary))
            step_s, resource = choice.forecast.step_s, choice.forecast.resource
            say(f"plan: {choice.describe()}; {step_s:.3g} s per step expected, bound by {resource}")
            config = choice.config
        return config, *assemble.plan_run(config, units, device)
    except BudgetError as error:
        setting = Setting(config, Machine.unmeasured(config))
        raise with_remedies(error, setting, (units, vocabulary)) from error


def _is_known(config: RunConfig, profile: MachineProfile, device: Device) -> bool:
    tiers = config.tiers
    if not (profile.host and profile.device) or profile.cpu != probes.cpu_model():
        return False
    if device.is_cuda and profile.gpu != device_name(device):
        return False
    backend = resolve_backend(tiers.backend)
    return all(os.path.isdir(path) and profile.drive_for(path, backend) for path in tiers.nvme_dirs or [])
