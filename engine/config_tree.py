"""A configuration, a tree of keyword-only dataclasses, seen as a flat table of dotted keys.

The dataclasses hold the whole truth: types, defaults, ranges (`__post_init__`) and documentation (the string
under each field). Run files and command-line options are both brought to `{dotted key: Given}` and become
objects in one place, `build`. Knows nothing of torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import ConfigError

ConfigT = TypeVar("ConfigT")
#: Default of a key that has none.
REQUIRED: Any = dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting. `key` is dotted; `default` is `REQUIRED` where there is none; `section`: its class."""

    key: str
    hint: Any
    default: Any
    section: type

    @property
    def doc(self) -> str:
        """For the help alone: to read sources takes longer than a run file."""
        return field_docs(self.section).get(self.key.rpartition(".")[2], "")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a user gave, and where: `run.yaml:12: optimizer.lr` or `--optimizer.lr`."""

    value: Any
    where: str


@cache
def leaves(cls: type) -> Mapping[str, Leaf]:
    """Every setting of the tree under `cls`, in the order of declaration."""
    return {leaf.key: leaf for leaf in _walk(cls, "")}


@cache
def sections(cls: type) -> Mapping[str, type]:
    """Fields of `cls` that are configurations themselves."""
    hints: dict[str, Any] = get_type_hints(cls)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


def _walk(cls: type, prefix: str) -> Iterator[Leaf]:
    hints, nested = get_type_hints(cls), sections(cls)
    for spec in dataclasses.fields(cls):
        if spec.name in nested:
            yield from _walk(nested[spec.name], f"{prefix}{spec.name}.")
        else:
            default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
            yield Leaf(prefix + spec.name, hints[spec.name], default, cls)


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The string literal under each field, as one line; Python itself does not keep them."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        docs |= _own_field_docs(base)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {}
    for field_node, doc_node in pairwise(definition.body):  # type: ignore[attr-defined]
        match field_node, doc_node:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def build(cls: type[ConfigT], given: Mapping[str, Given], source: str) -> ConfigT:
    """The configuration from what was given; the rest are defaults.

    Args:
        source: what the values come from as a whole, for errors that concern several of them.

    Raises:
        ConfigError: a value of the wrong type, a missing key, or what `__post_init__` refuses.
    """
    tree: type = cls
    known = leaves(tree)
    values = {key: _converted(item, known[key]) for key, item in given.items()}
    missing = [key for key, leaf in known.items() if leaf.default is REQUIRED and key not in values]
    if missing:
        keys, options = " and ".join(missing), " ".join(map(option, missing))
        raise ConfigError(f"{source}: {keys} must be set, there or on the command line ({options})")
    try:
        made: ConfigT = _construct(tree, values, "")
        return made
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def option(key: str) -> str:
    """The command-line option of a key."""
    return "--" + key.replace("_", "-")


def _construct(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    arguments = {
        name: _construct(section, values, f"{prefix}{name}.") for name, section in sections(cls).items()
    }
    for spec in dataclasses.fields(cls):
        if (key := prefix + spec.name) in values:
            arguments[spec.name] = values[key]
    return cls(**arguments)


def _converted(given: Given, leaf: Leaf) -> Any:
    try:
        return convert(given.value, leaf.hint)
    except ValueError:
        shown = textwrap.shorten(json.dumps(given.value, ensure_ascii=False, default=str), 80)
        raise ConfigError(f"{given.where} is {shown}; it must be {describe(leaf.hint)}") from None


def convert(value: Any, hint: Any) -> Any:
    """`value`, as YAML knows it, as `hint`; nothing is guessed but int -> float and text or int -> ByteSize.

    Raises:
        ValueError: it is something else.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _first_that_fits(value, get_args(hint))
    if origin is Literal:
        if any(type(choice) is type(value) and choice == value for choice in get_args(hint)):
            return value
    elif origin is list:
        if isinstance(value, list):
            return [convert(item, *get_args(hint)) for item in value]
    elif hint is ByteSize:
        if isinstance(value, int | str) and not isinstance(value, bool):
            return ByteSize(value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint in (int, bool, str, NoneType):
        if type(value) is hint:
            return value
    else:
        raise TypeError(f"a configuration field of type {hint} cannot be read from a run file")
    raise ValueError(value)


def _first_that_fits(value: Any, hints: Iterable[Any]) -> Any:
    for hint in hints:
        try:
            return convert(value, hint)
        except ValueError:
            continue
    raise ValueError(value)


def describe(hint: Any) -> str:
    """What a value of type `hint` looks like, to follow "must be"."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return ", or ".join(describe(member) for member in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is list:
        return "a list, each item " + describe(*get_args(hint))
    return {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text (in quotes if it looks like something else)",
        ByteSize: "a size such as 8GiB, 512MiB, 1.5GB or 1048576 (bytes)",
        NoneType: "null",
    }[hint]


def to_plain(config: Any) -> dict[str, Any]:
    """The tree as nested dicts of what YAML and JSON know, sizes as text: what a run file holds."""
    plain: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            plain[spec.name] = to_plain(value)
        else:
            plain[spec.name] = str(value) if isinstance(value, ByteSize) else value
    return plain


def nearest_keys(cls: type, key: str) -> list[str]:
    """What the author of an unknown dotted `key` meant: its name in another section, else a similar key."""
    wanted, names = key.replace("-", "_"), dict[str, list[str]]()
    for known in leaves(cls):
        names.setdefault(known.rsplit(".", 1)[-1], []).append(known)
    name = wanted.rsplit(".", 1)[-1]
    if name in names:
        return names[name]
    if close := difflib.get_close_matches(wanted, leaves(cls), n=1, cutoff=0.75):
        return close
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return names[similar[0]] if similar else []


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dicts; a key that is absent counts as None."""
    old, new = dict(flatten(before)), dict(flatten(now))
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested dicts."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
