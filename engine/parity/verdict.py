"""What the gate found of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

#: binds: every parameter has its place. loss, gradients: of a step, against transformers. packing: documents
#: of a row do not see each other. load: a model directory, as `from_pretrained` reads it. export: one as
#: `save_pretrained` writes it.
Name = Literal["binds", "loss", "gradients", "packing", "load", "export"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Check:
    """One property: whether it holds, and what was found, in one line."""

    name: Name
    holds: bool
    found: str


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    model: class of the model.
    checks: those that were made; one that breaks leaves out what needs it.
    """

    model: str
    checks: tuple[Check, ...]

    def found(self, name: Name) -> str:
        """What was found of one property."""
        return next((check.found for check in self.checks if check.name == name), "not compared")

    @property
    def packs(self) -> bool:
        """Documents may share a row."""
        return any(check.holds for check in self.checks if check.name == "packing")

    @property
    def why_not(self) -> str | None:
        """Why it cannot be trained; None: it can (with a document a row, if it does not pack)."""
        wrong = (check for check in self.checks if not check.holds and check.name != "packing")
        return next((f"{check.name}: {check.found}" for check in wrong), None)

    @property
    def summary(self) -> str:
        """What is equal, in a few words."""
        return f"loss {self.found('loss')}; gradients {self.found('gradients')}"

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Verdict:
        """Raises KeyError, TypeError: these are not the values of one."""
        return cls(values["model"], tuple(Check(**check) for check in values["checks"]))
