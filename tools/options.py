"""Command-line options from a tree of configuration dataclasses, by tyro.

tyro cuts the command line into options and renders the help; it sees a *draft* of the tree whose leaves are
the texts as typed. What they mean is settled where it is for a run file, in
`tierstream.engine.config_tree.build`: a value has one meaning and one error message wherever it was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tyro

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config_file import parse_scalar, read
from tierstream.engine.config_tree import (
    REQUIRED,
    Given,
    Leaf,
    build,
    convert,
    leaves,
    nearest_keys,
    option,
    sections,
)
from tierstream.io.errors import ConfigError

ConfigT = TypeVar("ConfigT")
#: What a draft's leaf holds when the command line does not mention it.
_UNSET = object()


def parse_options(
    cls: type[ConfigT],
    args: Sequence[str],
    *,
    prog: str,
    description: str,
    given: Mapping[str, Given] | None = None,
    source: str = "command line",
) -> ConfigT:
    """The configuration that `given`, changed by the options in `args`, describes. `--help` prints and exits.

    Args:
        prog: the command with its positional arguments, for the usage line.
        description: for the help. tyro joins lines that begin with a letter: make a longer text a list.
        given: what a run file sets; the help shows these values as the defaults.
        source: name of that file.

    Raises:
        ConfigError: an option or value that is wrong.
    """
    tree: type = cls
    given, known = given or {}, leaves(tree)
    if not args:
        return build(cls, given, source)
    draft: Any = _draft(tree, "", known, given, documented=bool({"-h", "--help"} & set(args)))
    parsed, rest = tyro.cli(
        draft,
        args=args,
        prog=prog,
        description=description,
        return_unknown_args=True,
        config=(tyro.conf.HelptextFromCommentsOff,),  # a draft has no source; looking for it is slow
    )
    if rest:
        raise ConfigError(_unexpected(tree, rest[0], prog))
    typed = {key: _given(texts, known[key]) for key, texts in _texts(parsed, "")}
    return build(cls, {**given, **typed}, f"{source} with the options given" if typed and given else source)


def parse_run(cls: type[ConfigT], args: Sequence[str], *, command: str, description: str) -> ConfigT:
    """The configuration of `command RUN.yaml [options]`: that of the run file, changed by the options.

    Args:
        cls: `RunConfig`, or one with options of the command's own.

    Raises:
        ConfigError: the file is missing or wrong, or an option or value is.
    """
    from tierstream.engine.config import RunConfig  # which most commands do without

    files, options = take_positionals(args, ["RUN.yaml"], command)
    return parse_options(
        cls,
        options,
        prog=f"{command} RUN.yaml",
        description=description,
        given=read(RunConfig, Path(files[0])) if files else {},
        source=files[0] if files else "RUN.yaml",
    )


@dataclasses.dataclass(kw_only=True)
class NoOptions:
    """For commands that have none but --help."""


def take_positionals(args: Sequence[str], names: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """The leading positional arguments called `names`, and the rest; fewer if `--help` is asked for.

    Raises:
        ConfigError: one is missing.
    """
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    taken = list(args[: min(count, len(names))])
    if len(taken) < len(names) and not {"-h", "--help"} & set(args):
        raise ConfigError(f"{names[len(taken)]} is missing; usage: {command} {' '.join(names)} [options]")
    return taken, list(args[len(taken) :])


def take_paths(args: Sequence[str], name: str, command: str) -> tuple[list[str], list[str]]:
    """All leading positional arguments, at least one, and the rest; none if `--help` is asked for.

    Raises:
        ConfigError: there is none.
    """
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    if not count and not {"-h", "--help"} & set(args):
        raise ConfigError(f"{name} is missing; usage: {command} {name}... [options]")
    return list(args[:count]), list(args[count:])


def _draft(
    cls: type, prefix: str, known: Mapping[str, Leaf], given: Mapping[str, Given], *, documented: bool
) -> type:
    nested = sections(cls)
    fields: list[Any] = []
    for spec in dataclasses.fields(cls):
        key = prefix + spec.name
        if spec.name in nested:
            inner = _draft(nested[spec.name], f"{key}.", known, given, documented=documented)
            fields.append((spec.name, inner))
        else:
            unset = dataclasses.field(default=_UNSET)
            fields.append((spec.name, _draft_type(known[key], given.get(key), documented), unset))
    namespace = {"__doc__": cls.__doc__ if prefix else ""}
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True, namespace=namespace)


def _draft_type(leaf: Leaf, given: Given | None, documented: bool) -> Any:
    default = leaf.default if given is None else given.value
    hint = "(required)" if default is REQUIRED else f"(default: {shown(default)})"
    # nargs "*" for all: how many values an option takes is checked in `_given`, which knows how to say it.
    texts = tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs="*",
        metavar=metavar(leaf.hint),
        instance_from_str=list,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [""],
    )
    told = leaf.doc if documented else ""
    return Annotated[object, texts, tyro.conf.arg(help=told, help_behavior_hint=hint)]


def _texts(parsed: Any, prefix: str) -> Iterable[tuple[str, list[str]]]:
    for spec in dataclasses.fields(parsed):
        value = getattr(parsed, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _texts(value, f"{prefix}{spec.name}.")
        elif value is not _UNSET:
            yield prefix + spec.name, value


def _given(texts: list[str], leaf: Leaf) -> Given:
    where = option(leaf.key)
    lists = [member for member in _members(leaf.hint) if get_origin(member) is list]
    if lists and texts != ["null"]:
        (item_hint,) = get_args(lists[0])
        if len(texts) == 1 and texts[0].startswith("[") and texts[0].endswith("]"):  # as in a run file
            texts = [text.strip().strip("'\"") for text in texts[0][1:-1].split(",") if text.strip()]
        return Given([_meaning(text, item_hint) for text in texts], where)
    if not texts and leaf.hint is bool:  # --master
        return Given(True, where)
    if len(texts) != 1:
        raise ConfigError(f"{where} takes one value, got {len(texts)}: {' '.join(texts)}".rstrip(": "))
    return Given(_meaning(texts[0], leaf.hint), where)


def _meaning(text: str, hint: Any) -> Any:
    """What `text` would be in a run file, or else the text itself: a name like 2024 needs no quotes here."""
    value = parse_scalar(text)
    try:
        return convert(value, hint)
    except ValueError:
        return text if str in _members(hint) else value


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _unexpected(cls: type, argument: str, prog: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; options are written --key value"
    name = argument.split("=")[0]
    nearest = " or ".join(option(key) for key in nearest_keys(cls, name.lstrip("-")))
    hint = f"did you mean {nearest}?" if nearest else f"`{prog} --help` lists the known ones"
    return f"unknown option {name}; {hint}"


def metavar(hint: Any) -> str:
    """Type of a setting as the help shows it, e.g. `SIZE|null`, `{sdpa,eager}`, `TEXT ...`."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return "|".join(metavar(member) for member in get_args(hint))
    if origin is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if origin is list:
        return metavar(*get_args(hint)) + " ..."
    names = {
        int: "INT",
        float: "FLOAT",
        bool: "{true,false}",
        str: "TEXT",
        ByteSize: "SIZE",
        NoneType: "null",
    }
    return names[hint]


def shown(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
