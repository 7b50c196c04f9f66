"""A machine, or a run, with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.plan import ThrottleConfig
from tierstream.engine.planner.machine import Machine
from tierstream.io.errors import ConfigError

KEYS = ("dram", "gpu", "drives", "cores")


@dataclass(frozen=True)
class Setting:
    """A run on a machine."""

    config: RunConfig
    machine: Machine

    def with_config(self, changes: Mapping[str, Any]) -> Setting:
        """Other values for dotted keys of the run file."""
        return Setting(changed(self.config, changes), self.machine)

    def with_dram(self, nbytes: int) -> Setting:
        """So much host memory. A budget that is set grows with it; it does not shrink, or what is said of a
        run that does not fit would be of another budget than the one that the user set.
        """
        budget, more = self.config.tiers.dram, max(0, nbytes - self.machine.host_bytes)
        moved = self if budget is None else self._with_budget("dram", budget + more)
        return replace(moved, machine=replace(self.machine, host_bytes=nbytes))

    def with_gpu(self, nbytes: int, least_bytes: int = 0) -> Setting:
        """A GPU with so much memory. The budget grows with it.

        Args:
            least_bytes: what the run takes of it where no budget is set; 0: it goes on without.

        Raises:
            ConfigError: the machine has no GPU.
        """
        if self.machine.gpu_bytes is None:
            raise ConfigError("gpu is to be changed, but layers are computed by the CPU of this machine")
        budget, more = self.config.tiers.gpu or least_bytes, nbytes - self.machine.gpu_bytes
        moved = self._with_budget("gpu", budget + more) if budget and more > 0 else self
        return replace(moved, machine=replace(self.machine, gpu_bytes=nbytes))

    def with_drives(self, count: int) -> Setting:
        """So many drives, all in use; more than there are, are like the first.

        Raises:
            ConfigError: there is none to be like.
        """
        drives = self.machine.drives
        if count > len(drives) and not drives:
            raise ConfigError(f"{count} drives are asked for, and {self.machine.name} has none to be like")
        more = [replace(drives[0], directory=f"drive {index}") for index in range(len(drives), count)]
        # What was measured of the run's own drives together is not what these give.
        rates = replace(
            self.machine.rates, nvme_read=None, nvme_write=None, nvme_read_mixed=None, nvme_write_mixed=None
        )
        machine = replace(self.machine, drives=(*drives, *more)[:count], rates=rates)
        if not count:
            without = {"tiers.throttle": ThrottleConfig(), "tiers.require_path": None}
            return Setting(changed(self.config, {**without, "tiers.nvme_dirs": None}), machine)
        names = [drive.directory for drive in machine.drives]
        return Setting(changed(self.config, {"tiers.nvme_dirs": names}), machine)

    def with_cores(self, count: int) -> Setting:
        """So many cores; the update goes as much faster or slower."""
        rates = self.machine.rates
        update = rates.update_parameters_per_s * count / self.machine.cores
        rates = replace(rates, update_parameters_per_s=update)
        return Setting(self.config, replace(self.machine, cores=count, rates=rates))

    def _with_budget(self, tier: str, nbytes: int) -> Setting:
        return self.with_config({f"tiers.{tier}": ByteSize(nbytes)})


def what_if(setting: Setting, text: str) -> Setting:
    """The setting with changes as they are typed: `dram=256GiB,drives=4`. The machine's name says so too.

    Raises:
        ConfigError: a key that there is not, or twice, or a value that it cannot have.
    """
    seen, budgets = list[str](), _budgets(setting.config)
    for part in filter(None, map(str.strip, text.split(","))):
        key, _, value = map(str.strip, part.partition("="))
        if key in seen:
            raise ConfigError(f"--what-if {part}: {key} is named twice; name it once")
        seen.append(key)
        if key not in KEYS:
            raise ConfigError(f"--what-if {part}: the keys are {', '.join(KEYS)}, as in dram=256GiB,drives=4")
        least = 0 if key == "drives" else 1
        try:
            number = ByteSize(value) if key in ("dram", "gpu") else int(value)
        except ValueError as error:
            why = error if key in ("dram", "gpu") else f"{key} is a whole number >= {least}"
            raise ConfigError(f"--what-if {part}: {why}") from error
        if number < least:
            raise ConfigError(f"--what-if {part}: {key} must be >= {least}")
        change = {
            "dram": setting.with_dram,
            "gpu": setting.with_gpu,
            "drives": setting.with_drives,
            "cores": setting.with_cores,
        }[key]
        setting = change(int(number))
    if not seen:
        return setting
    grown = _budgets(setting.config).items() - budgets.items()
    said = "".join(f", {key} grown to {ByteSize(nbytes)}" for key, nbytes in sorted(grown))
    name = f"{setting.machine.name}, with {text}{said}"
    return replace(setting, machine=replace(setting.machine, name=name))


def _budgets(config: RunConfig) -> dict[str, int]:
    tiers = {"tiers.dram": config.tiers.dram, "tiers.gpu": config.tiers.gpu}
    return {key: int(nbytes) for key, nbytes in tiers.items() if nbytes is not None}


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration with other values for dotted keys.

    Raises:
        ConfigError: what the section refuses.
    """
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        inner = changed(getattr(config, section), {rest: value}) if rest else value
        config = replace(config, **{section: inner})
    return config
