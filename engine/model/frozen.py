"""Which parameters are trained: by patterns of their names, as `requires_grad` of the parameters."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from tierstream.engine.model.config import ModelConfig
from tierstream.io.errors import ConfigError


def freeze(model: Any, config: ModelConfig) -> None:
    """Take `requires_grad` from the parameters that `config` freezes; a tied one is frozen through any of its
    names.

    Raises:
        ConfigError: a pattern fits no parameter, all are frozen, or the names of a tied one contradict each
            other.
    """
    if config.freeze is None and config.train_only is None:
        return
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    known, kind = [name for own in names.values() for name in own], type(model).__name__
    frozen = _fitting("freeze", config.freeze or [], known, kind)
    chosen = _fitting("train_only", config.train_only or [], known, kind) - frozen
    for parameter, own in names.items():
        out, within = (sorted(fitting.intersection(own)) for fitting in (frozen, chosen))
        if out and within:
            raise ConfigError(
                f"{out[0]} and {within[0]} of {kind} are one tensor; model.freeze names the one and "
                "model.train_only the other: change either"
            )
        parameter.requires_grad_(not out and (config.train_only is None or bool(within)))
    if not any(parameter.requires_grad for parameter in names):
        given = (f"model.{key}" for key in ("freeze", "train_only") if getattr(config, key) is not None)
        raise ConfigError(f"no parameter of {kind} is left to train by {' and '.join(given)}; freeze fewer")


def _fitting(key: str, patterns: list[str], names: list[str], kind: str) -> set[str]:
    """The names that a pattern fits; each pattern must fit one."""
    found = set[str]()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(
                f"model.{key} has {pattern!r}, and no parameter of {kind} has such a name; they are like "
                f"{names[0]} and {names[len(names) // 2]}"
            )
        found.update(fitting)
    return found
