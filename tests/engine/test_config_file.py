from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.example_config import Boat, EngineSection, TankSection

from tierstream.engine.byte_size import MAX_BYTES, ByteSize
from tierstream.engine.config_file import dump, load, parse, parse_scalar, read
from tierstream.engine.config_tree import (
    Given,
    build,
    differences,
    leaves,
    nearest_keys,
    to_plain,
)
from tierstream.io.errors import ConfigError


def parsed(text: str) -> Boat:
    return build(Boat, parse(Boat, text, "boat.yaml"), "boat.yaml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    return str(caught.value)


def test_every_kind_of_value() -> None:
    text = """
    name: Ada            # a comment
    engine: {power: 3e-4, cylinders: 1_000, fuel: off, limit: 2}
    tanks:
      size: 1.5GB
      reserve: 4096
      names: [a, "2"]
      open: false
      label: 2026-01-01
    """
    engine = EngineSection(power=3e-4, cylinders=1000, fuel="off", limit=2.0)
    tanks = TankSection(
        size=ByteSize(1_500_000_000), reserve=ByteSize(4096), names=["a", "2"], open=False, label="2026-01-01"
    )
    boat = parsed(text)
    assert boat == Boat(name="Ada", engine=engine, tanks=tanks)
    assert type(boat.engine.limit) is float
    assert type(boat.tanks.reserve) is ByteSize


@pytest.mark.parametrize(
    "text", ["name: Ada", "name: Ada\ntanks:", "name: Ada\nengine: {}\n", "\ufeffname: Ada"]
)
def test_what_is_left_out_is_the_default(text: str, tmp_path: Path) -> None:
    file = tmp_path / "boat.yaml"
    file.write_text(text)
    assert load(Boat, file) == Boat(name="Ada")


SIZE = "a size such as 8GiB, 512MiB, 1.5GB or 1048576 (bytes)"
TEXT = "a text (in quotes if it looks like something else)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine: {power: fast}", 'boat.yaml:2: engine.power is "fast"; it must be a finite number'),
        ("engine: {power: true}", "boat.yaml:2: engine.power is true; it must be a finite number"),
        ("engine: {power: .nan}", "boat.yaml:2: engine.power is NaN; it must be a finite number"),
        ("engine: {power: null}", "boat.yaml:2: engine.power is null; it must be a finite number"),
        (
            "engine: {limit: 1e999}",
            "boat.yaml:2: engine.limit is Infinity; it must be a finite number, or null",
        ),
        ("engine: {cylinders: 1e4}", "boat.yaml:2: engine.cylinders is 10000.0; it must be a whole number"),
        ("engine: {cylinders: true}", "boat.yaml:2: engine.cylinders is true; it must be a whole number"),
        ("engine: {cylinders: '4'}", 'boat.yaml:2: engine.cylinders is "4"; it must be a whole number'),
        ("engine: {fuel: Diesel}", 'boat.yaml:2: engine.fuel is "Diesel"; it must be one of diesel, off'),
        ("engine: {fuel: [off]}", 'boat.yaml:2: engine.fuel is ["off"]; it must be one of diesel, off'),
        ("tanks: {size: 8 gigs}", f'boat.yaml:2: tanks.size is "8 gigs"; it must be {SIZE}'),
        ("tanks: {size: -1}", f"boat.yaml:2: tanks.size is -1; it must be {SIZE}"),
        ("tanks: {size: 1.5}", f"boat.yaml:2: tanks.size is 1.5; it must be {SIZE}"),
        (
            "tanks: {reserve: }\nengine: 3",
            "boat.yaml:3: engine is a section; write its settings below it as `key: value`, one a line",
        ),
        ("tanks: {open: yes}", 'boat.yaml:2: tanks.open is "yes"; it must be true or false'),
        (
            "tanks: {names: a}",
            f'boat.yaml:2: tanks.names is "a"; it must be a list, each item {TEXT}, or null',
        ),
        (
            "tanks: {names: [1]}",
            f"boat.yaml:2: tanks.names is [1]; it must be a list, each item {TEXT}, or null",
        ),
        ("tanks: {label: 3}", f"boat.yaml:2: tanks.label is 3; it must be {TEXT}, or null"),
        (
            "tanks:\n  open: true\n  label: {a: b}",
            f'boat.yaml:4: tanks.label is {{"a": "b"}}; it must be {TEXT}, or null',
        ),
        ("tanks: {sise: 3}", "boat.yaml:2: unknown key tanks.sise; did you mean tanks.size?"),
        ("power: 3", "boat.yaml:2: unknown key power; did you mean engine.power?"),
        ("tanks: {power: 3}", "boat.yaml:2: unknown key tanks.power; did you mean engine.power?"),
        ("tank: {size: 3}", "boat.yaml:2: unknown key tank; did you mean tanks?"),
        ("tanks.size: 3", "boat.yaml:2: unknown key tanks.size; did you mean tanks.size?"),
        (
            "tanks: {colour: red}",
            "boat.yaml:2: unknown key tanks.colour; known here: size, reserve, names, open, label",
        ),
        ("<<: {name: x}", "boat.yaml:2: unknown key <<; known here: name, engine, tanks"),
        ("[a, b]: 3", "boat.yaml:2: unknown key [...]; known here: name, engine, tanks"),
        (
            "tanks: {open: true, open: false}",
            "boat.yaml:2: tanks.open was set in line 2 already; keep one of the two",
        ),
        ("\nname: Bob", "boat.yaml:3: name was set in line 1 already; keep one of the two"),
        (
            "engine: {power: 3, limit: 2}",
            "boat.yaml: engine.power is 3.0; it must be at most engine.limit (2.0)",
        ),
        ("\tx: 3", "boat.yaml:2: is not valid YAML: found character '\\t' that cannot start any token"),
        ("x: [1", "boat.yaml:2: is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "engine: {power: !!python/name:os.system 3}",
            "boat.yaml:2: is not valid YAML: could not determine a "
            "constructor for the tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("tanks: {names: &a [*a]}", "boat.yaml:2: is not valid YAML: found unconstructable recursive node"),
        ("---\nname: Bob", "boat.yaml:2: is not valid YAML: but found another document"),
    ],
)
def test_one_message_for_each_mistake(line: str, message: str) -> None:
    assert refusal(f"name: Ada\n{line}") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "boat.yaml: name must be set, there or on the command line (--name)"),
        ("# nothing", "boat.yaml: name must be set, there or on the command line (--name)"),
        (
            "- a\n- b",
            "boat.yaml:1: a run file is a mapping; write its settings below it as `key: value`, one a line",
        ),
        (
            "name: \x00",
            "boat.yaml: is not valid YAML: unacceptable character #x0000: special characters are not "
            'allowed in "<unicode string>", position 6',
        ),
    ],
)
def test_one_message_for_each_bad_file(text: str, message: str) -> None:
    assert refusal(text) == message


def test_deep_nesting_is_refused() -> None:
    assert refusal("name: " + "[" * 5000) == "boat.yaml: is nested too deeply"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for file, content, message in (
        (tmp_path / "absent.yaml", None, "cannot be read: No such file or directory; name a run file"),
        (tmp_path, None, "cannot be read: Is a directory"),
        (tmp_path / "latin.yaml", b"name: \xe9t\xe9", "is not UTF-8 text (byte 6)"),
    ):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read(Boat, file)
        assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("010", 10),
        ("+7", 7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("1__0", "1__0"),
        ("e5", "e5"),
        ("8GiB", "8GiB"),
        ("=", "="),
        ("<<", "<<"),
        ("none", "none"),
        ("9" * 5000, float("inf")),
        ("1\n", "1\n"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    got = parse_scalar(text)
    assert (type(got), got) == (type(value), value)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "null",
        "true",
        "1e-4",
        "off",
        "12",
        "~",
        "",
        " a ",
        "a: b",
        "# a",
        "- a",
        "2026-01-01",
        "8GiB",
        "'",
        '"',
        "\u2028",
        "\x85",
    ]
)
floats = st.floats(allow_nan=False, allow_infinity=False)
byte_sizes = st.integers(0, MAX_BYTES).map(ByteSize)
boats = st.builds(
    Boat,
    name=texts,
    engine=st.builds(
        EngineSection,
        power=floats,
        cylinders=st.integers(-(10**18) + 1, 10**18 - 1),
        fuel=st.sampled_from(["diesel", "off"]),
        limit=st.none(),
    ),
    tanks=st.builds(
        TankSection,
        size=byte_sizes,
        reserve=st.none() | byte_sizes,
        names=st.none() | st.lists(texts, max_size=3),
        open=st.booleans(),
        label=st.none() | texts,
    ),
)


@given(boats)
def test_a_written_configuration_reads_back_as_an_equal_one(boat: Boat) -> None:
    assert parsed(dump(boat)) == boat


@given(boats)
def test_plain_form_is_the_written_form(boat: Boat) -> None:
    assert {key: item.value for key, item in parse(Boat, dump(boat), "x").items()} == {
        f"{section}.{key}" if isinstance(values, dict) else section: value
        for section, values in to_plain(boat).items()
        for key, value in (values if isinstance(values, dict) else {section: values}).items()
    }


def test_written_file_holds_every_setting_in_order() -> None:
    written = dump(Boat(name="Ada"))
    assert written.splitlines()[0].startswith("# ")
    assert yaml.safe_load(written) == {
        "name": "Ada",
        "engine": {"power": 1e-4, "cylinders": 4, "fuel": "diesel", "limit": None},
        "tanks": {"size": "8 GiB", "reserve": None, "names": None, "open": True, "label": None},
    }
    assert list(parse(Boat, written, "x")) == list(leaves(Boat))


def test_leaves_hold_key_type_default_and_documentation() -> None:
    known = leaves(Boat)
    assert list(known)[:3] == ["name", "engine.power", "engine.cylinders"]
    assert known["name"].default is dataclasses.MISSING
    assert known["tanks.size"].doc == "What a tank holds."
    assert known["tanks.size"].default == ByteSize("8GiB")
    assert all(leaf.doc for leaf in known.values())


def test_a_field_of_another_type_is_a_mistake_of_the_program() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Odd:
        when: complex = 0j

    Odd.__annotations__["when"] = complex
    with pytest.raises(TypeError, match="complex"):
        build(Odd, {"when": Given("3", "x")}, "x")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("tanks.size", ["tanks.size"]),
        ("size", ["tanks.size"]),
        ("engine.size", ["tanks.size"]),
        ("tanks.sise", ["tanks.size"]),
        ("tank.size", ["tanks.size"]),
        ("cylinder", ["engine.cylinders"]),
        ("engine-power", ["engine.power"]),
        ("zzz", []),
        ("", []),
    ],
)
def test_nearest_keys(key: str, nearest: list[str]) -> None:
    assert nearest_keys(Boat, key) == nearest


def test_differences_are_by_dotted_key() -> None:
    old, new = to_plain(Boat(name="Ada")), to_plain(Boat(name="Bob", tanks=TankSection(size=ByteSize(3))))
    del new["engine"]["limit"]
    assert differences(old, new) == {"name": ("Ada", "Bob"), "tanks.size": ("8 GiB", "3 B")}
    assert differences(old, {}) | {} == {
        key: (value, None)
        for key, value in [
            ("name", "Ada"),
            ("engine.power", 1e-4),
            ("engine.cylinders", 4),
            ("engine.fuel", "diesel"),
            ("tanks.size", "8 GiB"),
            ("tanks.open", True),
        ]
    }
