from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_config import Boat, EngineSection, TankSection

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config_file import dump, parse
from tierstream.engine.config_tree import Given, leaves, option
from tierstream.io.errors import ConfigError
from tierstream.tools.options import NoOptions, metavar, parse_options, take_positionals

FILE = "name: Ada\nengine: {power: 2.5, limit: 9}\ntanks: {size: 1GiB}\n"


def boat(*args: str, text: str = FILE) -> Boat:
    return parse_options(
        Boat,
        args,
        prog="boat RUN.yaml",
        description="A boat.",
        given=parse(Boat, text, "boat.yaml"),
        source="boat.yaml",
    )


def refusal(*args: str, text: str = FILE) -> str:
    with pytest.raises(ConfigError) as caught:
        boat(*args, text=text)
    return str(caught.value)


def test_the_file_gives_the_defaults() -> None:
    expected = Boat(
        name="Ada", engine=EngineSection(power=2.5, limit=9.0), tanks=TankSection(size=ByteSize("1GiB"))
    )
    assert boat() == expected


SPACED = "--tanks.size 512MiB --engine.power 1e-3 --tanks.names a b --tanks.open false --name 2024"
GLUED = "--tanks.size=512MiB --engine.power=1e-3 --tanks.names a b --tanks.open=false --name=2024"


@pytest.mark.parametrize("args", [SPACED, GLUED, f"--engine.power 7 {SPACED}", f"--name Bob {GLUED}"])
def test_options_override_the_file(args: str) -> None:
    assert boat(*args.split()) == Boat(
        name="2024",
        engine=EngineSection(power=1e-3, limit=9.0),
        tanks=TankSection(size=ByteSize("512MiB"), names=["a", "b"], open=False),
    )


def test_null_takes_a_value_back() -> None:
    text = "name: Ada\nengine: {limit: 9}\ntanks: {names: [a], label: b}"
    typed = boat("--engine.limit", "null", "--tanks.names", "null", "--tanks.label", "null", text=text)
    assert typed == Boat(name="Ada")
    assert boat("--name", "null").name == "null"


@pytest.mark.parametrize("typed", [["[a, b]"], ["['a', \"b\"]"], ["a", "b"]])
def test_a_list_may_be_typed_as_in_a_file(typed: list[str]) -> None:
    assert boat("--tanks.names", *typed).tanks.names == ["a", "b"]


def test_a_list_may_be_empty() -> None:
    assert boat("--tanks.names").tanks.names == []


def test_a_bare_truth_is_true() -> None:
    assert boat("--tanks.open", text="name: Ada\ntanks: {open: false}").tanks.open is True


def test_hyphens_and_underscores_are_the_same() -> None:
    from tierstream.engine.update.optimizer import OptimizerConfig

    for name in ("--clip-norm", "--clip_norm"):
        config = parse_options(OptimizerConfig, [name, "3"], prog="x", description="")
        assert config == OptimizerConfig(clip_norm=3.0)


def test_a_required_key_may_come_from_either_side() -> None:
    assert boat("--name", "Bob", text="").name == "Bob"
    assert refusal(text="") == "boat.yaml: name must be set, there or on the command line (--name)"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--tanks.sise 3", "unknown option --tanks.sise; did you mean --tanks.size?"),
        ("--tanks.sise=3", "unknown option --tanks.sise; did you mean --tanks.size?"),
        ("--power 3", "unknown option --power; did you mean --engine.power?"),
        ("--zzz", "unknown option --zzz; `boat RUN.yaml --help` lists the known ones"),
        ("-q", "unknown option -q; `boat RUN.yaml --help` lists the known ones"),
        ("more", "unexpected argument 'more'; options are written --key value"),
        ("--engine.power", "--engine.power takes one value, got 0"),
        ("--engine.power 3 4", "--engine.power takes one value, got 2: 3 4"),
        ("--engine.power much", '--engine.power is "much"; it must be a finite number'),
        ("--engine.cylinders 3.5", "--engine.cylinders is 3.5; it must be a whole number"),
        ("--engine.fuel coal", '--engine.fuel is "coal"; it must be one of diesel, off'),
        ("--tanks.open yes", '--tanks.open is "yes"; it must be true or false'),
        (
            "--tanks.size 8G",
            '--tanks.size is "8G"; it must be a size such as 8GiB, 512MiB, 1.5GB or 1048576 (bytes)',
        ),
        (
            "--tanks.size null",
            "--tanks.size is null; it must be a size such as 8GiB, 512MiB, 1.5GB or 1048576 (bytes)",
        ),
        (
            "--engine.power 10",
            "boat.yaml with the options given: engine.power is 10.0; it must be at most engine.limit (9.0)",
        ),
    ],
)
def test_one_message_for_each_mistake(args: str, message: str) -> None:
    assert refusal(*args.split()) == message


def test_checks_see_the_final_values_only() -> None:
    """What the file gets wrong, the command line may put right."""
    text = "name: Ada\nengine: {power: 10, limit: 9}"
    assert refusal(text=text) == "boat.yaml: engine.power is 10.0; it must be at most engine.limit (9.0)"
    assert boat("--engine.limit", "20", text=text).engine == EngineSection(power=10.0, limit=20.0)


@settings(max_examples=20)  # each parses a command line: 50 ms
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**17), 10**17), st.booleans())
def test_typed_values_mean_what_they_mean_in_a_file(power: float, cylinders: int, is_open: bool) -> None:
    typed = [
        "--engine.power",
        repr(power),
        "--engine.cylinders",
        str(cylinders),
        "--tanks.open",
        str(is_open).lower(),
    ]
    expected = replace(
        boat(text="name: Ada"),
        engine=EngineSection(power=power, cylinders=cylinders),
        tanks=TankSection(open=is_open),
    )
    assert boat(*typed, text="name: Ada") == expected
    assert boat(text=dump(expected)) == expected


def test_help_shows_type_documentation_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        boat("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for text in (
        "usage: boat RUN.yaml",
        "A boat.",
        "The tanks.",
        "--name TEXT What it is called. (default: Ada)",
        "--engine.power FLOAT Power at the shaft, in MW. (default: 2.5)",
        "--engine.fuel {diesel,off} What it burns; off: nothing. (default: diesel)",
        "--engine.limit FLOAT|null Upper limit of the power, in MW; null: none. (default: 9)",
        "--tanks.size SIZE What a tank holds. (default: 1GiB)",
        "--tanks.reserve SIZE|null What is kept back; null: an eighth. (default: null)",
        "--tanks.names TEXT ...|null Names of the tanks. (default: null)",
        "--tanks.open {true,false} Whether the valves are open. (default: true)",
    ):
        assert text in shown


def test_help_of_a_command_without_a_file_marks_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        boat("-h", text="")
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "--name TEXT What it is called. (required)" in shown
    assert "--tanks.size SIZE What a tank holds. (default: 8 GiB)" in shown


@pytest.mark.parametrize("key", sorted(leaves(Boat).keys() - {"tanks.names"}))
def test_every_key_has_an_option(key: str) -> None:
    assert refusal(option(key), "a", "b") == f"{option(key)} takes one value, got 2: a b"


def test_commands_without_options() -> None:
    assert parse_options(NoOptions, [], prog="x", description="") == NoOptions()
    with pytest.raises(ConfigError, match=r"^unknown option --force; `x --help` lists the known ones$"):
        parse_options(NoOptions, ["--force"], prog="x", description="")


@pytest.mark.parametrize(
    ("args", "taken", "rest"),
    [
        (["a", "b", "--x", "c"], ["a", "b"], ["--x", "c"]),
        (["a", "b", "c"], ["a", "b"], ["c"]),
        (["a", "--help"], ["a"], ["--help"]),
        (["-h"], [], ["-h"]),
    ],
)
def test_positional_arguments_come_first(args: list[str], taken: list[str], rest: list[str]) -> None:
    assert take_positionals(args, ["FROM", "TO"], "tierstream export") == (taken, rest)


@pytest.mark.parametrize("args", [[], ["a"], ["--x", "a", "b"], ["a", "--x", "b"]])
def test_a_missing_positional_argument_is_named(args: list[str]) -> None:
    missing = "TO" if args[:1] == ["a"] else "FROM"
    with pytest.raises(ConfigError) as caught:
        take_positionals(args, ["FROM", "TO"], "tierstream export")
    assert str(caught.value) == f"{missing} is missing; usage: tierstream export FROM TO [options]"


def test_metavars_name_the_type() -> None:
    assert {key: metavar(leaf.hint) for key, leaf in leaves(Boat).items()} == {
        "name": "TEXT", "engine.power": "FLOAT", "engine.cylinders": "INT", "engine.fuel": "{diesel,off}",
        "engine.limit": "FLOAT|null", "tanks.size": "SIZE", "tanks.reserve": "SIZE|null",
        "tanks.names": "TEXT ...|null", "tanks.open": "{true,false}", "tanks.label": "TEXT|null",
    }  # fmt: skip


def test_the_draft_does_not_touch_the_defaults() -> None:
    given_name = {"name": Given("Ada", "x")}
    first = parse_options(Boat, ["--tanks.names", "a"], prog="x", description="", given=given_name)
    second = parse_options(Boat, [], prog="x", description="", given=given_name)
    assert (first.tanks.names, second.tanks.names) == (["a"], None)
