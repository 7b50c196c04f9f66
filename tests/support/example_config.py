"""A configuration of the same make as RunConfig, with every kind of field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class EngineSection:
    """The engine of the boat."""

    power: float = 1e-4
    """Power at the shaft, in MW."""
    cylinders: int = 4
    """Number of cylinders."""
    fuel: Literal["diesel", "off"] = "diesel"
    """What it burns; off: nothing."""
    limit: float | None = None
    """Upper limit of the power, in MW; null: none."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.power > self.limit:
            raise ConfigError(f"engine.power is {self.power}; it must be at most engine.limit ({self.limit})")


@dataclass(kw_only=True, slots=True)
class TankSection:
    """The tanks."""

    size: ByteSize = field(default_factory=lambda: ByteSize("8GiB"))
    """What a tank
    holds."""
    reserve: ByteSize | None = None
    """What is kept back; null: an eighth."""
    names: list[str] | None = None
    """Names of the tanks."""
    open: bool = True
    """Whether the valves are open."""
    label: str | None = None
    """Text on the side."""


@dataclass(kw_only=True, slots=True)
class Boat:
    """One boat."""

    name: str
    """What it is called."""
    engine: EngineSection = field(default_factory=EngineSection)
    tanks: TankSection = field(default_factory=TankSection)
