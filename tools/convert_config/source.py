"""A JSON file of settings, read strictly: types are checked, and what nobody asked for is known."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tierstream.engine.config_tree import convert, describe, flatten
from tierstream.io.errors import ConfigError

#: What transformers is to fill in from its own arguments.
AUTO = "auto"


class Source:
    """Settings by dotted key.

    Attributes:
        auto: keys that were asked for and are "auto".
    """

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        self.name, self.settings = name, dict(_leaves(settings))
        self.auto: list[str] = []
        self._taken = set[str]()

    @classmethod
    def load(cls, path: Path) -> Source:
        """Raises ConfigError: not readable, not JSON, a key given twice, no object at the top."""
        try:
            settings = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: is not valid JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: must hold one JSON object, {{...}}, and holds something else")
        return cls(settings, str(path))

    def take(self, key: str, hint: Any) -> Any:
        """The value of a key; None if it is not there, null or "auto".

        Raises:
            ConfigError: it is of another type.
        """
        self._taken.add(key)
        section = key.rpartition(".")[0]
        if self.settings.get(section) is not None:
            raise self._error(section, "a section, {...}")
        value = self.settings.get(key)
        if value is None:
            return None
        if value == AUTO:
            self.auto.append(key)
            return None
        if hint is int and isinstance(value, float) and value.is_integer():  # 1e9
            return int(value)
        try:
            return convert(value, hint)
        except ValueError:
            raise self._error(key, describe(hint)) from None

    def _error(self, key: str, wanted: str) -> ConfigError:
        shown = textwrap.shorten(json.dumps(self.settings[key], ensure_ascii=False), 60)
        return ConfigError(f"{self.name}: {key} is {shown}; it must be {wanted}")

    def skip(self, prefix: str) -> list[str]:
        """Take all keys below `prefix`, whatever they hold. Returns those that are not null."""
        keys = [key for key in self.settings if key.startswith(prefix) and key not in self._taken]
        self._taken.update(keys)
        return [key for key in keys if self.settings[key] is not None]

    def has(self, section: str) -> bool:
        """Whether anything is set in a section, or the key itself."""
        return any(key == section or key.startswith(f"{section}.") for key in self.settings)

    def rest(self) -> Iterator[str]:
        """Keys that were not taken and ask for something: null does not, nor do sections that are not
        enabled.
        """
        disabled = [
            key.removesuffix("enabled")
            for key, value in self.settings.items()
            if key.endswith(".enabled") and value is False
        ]
        for key, value in self.settings.items():
            if key not in self._taken and value is not None and not key.startswith(tuple(disabled)):
                yield key


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys; an empty section is a key, so that it is not lost."""
    yield from flatten({key: value for key, value in settings.items() if value != {}})


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    return made
