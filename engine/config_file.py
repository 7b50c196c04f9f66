"""The run file: strict YAML to a configuration, and back.

Scalars are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), as people expect
them: `1e-4` is a number; `off`, `no` and `2026-01-01` are texts. Every key is checked against the tree of
dataclasses; a key given twice is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tierstream.engine.config_tree import Given, build, leaves, nearest_keys, sections, to_plain
from tierstream.io.errors import ConfigError

ConfigT = TypeVar("ConfigT")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema (decimal only)."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (the base class's API)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9](?:_?[0-9]){0,17}", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", [*"-+."]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))  # type: ignore[arg-type]


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Control characters and odd line ends survive only between double quotes."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_scalar(text: str) -> Any:
    """What the plain YAML scalar `text` means: a number, true, false, null, or the text itself."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def read(cls: type, path: Path) -> dict[str, Given]:
    """What the run file sets, `{dotted key: value and line}`: the keys are checked, the values not yet.

    Raises:
        ConfigError: not readable, not YAML, a key that is unknown or given twice.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        remedy = "; name a run file" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{remedy}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    return parse(cls, text, str(path))


def parse(cls: type, text: str, name: str) -> dict[str, Given]:
    """`read` of a text; `name` stands for the file in messages."""
    try:
        return _Reader(cls, text, name).read()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: is not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply") from None


def load(cls: type[ConfigT], path: Path, changes: Mapping[str, Any] | None = None) -> ConfigT:
    """The configuration that a run file describes, with `changes` of dotted keys. Raises ConfigError."""
    tree: type = cls
    given = read(tree, path)
    for key, value in (changes or {}).items():
        if key not in leaves(tree):
            nearest = " or ".join(nearest_keys(tree, key))
            raise ConfigError(f"unknown key {key}" + (f"; did you mean {nearest}?" if nearest else ""))
        given[key] = Given(value, key)
    return build(cls, given, f"{path} with the changes given" if changes else str(path))


def dump_value(value: Any) -> str:
    """One value as a run file has it, in one line."""
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "width": 10**6}
    return yaml.dump(value, Dumper=_Dumper, **options).removesuffix("...\n").rstrip("\n")


def dump(config: Any) -> str:
    """A run file that reads back as an equal configuration; every setting is in it, defaults included."""
    header = "# Every setting of this run, defaults included. `tierstream train` reads it.\n"
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 10**6}
    return header + yaml.dump(to_plain(config), Dumper=_Dumper, **options)


class _Reader:
    """Walks the nodes of one document: they know their lines, and repeated keys are still there."""

    def __init__(self, root: type, text: str, name: str) -> None:
        self._loader, self._root, self._name = _Loader(text), root, name

    def read(self) -> dict[str, Given]:
        node = self._loader.get_single_node()
        return {} if node is None else dict(self._settings(self._root, node, ""))

    def _settings(self, cls: type, node: yaml.Node, section: str) -> Iterator[tuple[str, Given]]:
        if not isinstance(node, yaml.MappingNode):
            if section and node.tag == "tag:yaml.org,2002:null":  # a section whose keys are all commented out
                return
            what = f"{section.rstrip('.')} is a section" if section else "a run file is a mapping"
            raise self._error(node, f"{what}; write its settings below it as `key: value`, one a line")
        nested, lines = sections(cls), dict[str, int]()
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "[...]"
            if key in lines:
                twice = f"{section}{key} was set in line {lines[key]} already; keep one of the two"
                raise self._error(key_node, twice)
            lines[key] = key_node.start_mark.line + 1
            if key in nested:
                yield from self._settings(nested[key], value_node, f"{section}{key}.")
            elif "." not in key and section + key in leaves(self._root):
                value = self._loader.construct_object(value_node, deep=True)
                yield section + key, Given(value, f"{self._name}:{lines[key]}: {section}{key}")
            else:
                raise self._error(key_node, self._unknown(cls, section, key))

    def _unknown(self, cls: type, section: str, key: str) -> str:
        similar = difflib.get_close_matches(key, sections(cls), n=1, cutoff=0.75)
        nearest = [section + name for name in similar] or nearest_keys(self._root, section + key)
        known = ", ".join(spec.name for spec in fields(cls))
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known here: {known}"
        return f"unknown key {section}{key}; {hint}"

    def _error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._name}:{node.start_mark.line + 1}: {text}")
