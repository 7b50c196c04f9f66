"""What a benchmark found, in words and figures: the one source of its table, its JSON and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tierstream.io.measure import Measurement
from tierstream.io.sizes import format_bytes
from tierstream.tools.page import Grid

_UNITS = {"parameters": "param"}
#: Units of which rates are shown by the thousand; all others by 10^9.
_BY_THE_THOUSAND = frozenset({"tokens"})
_BYTES = "_bytes"
#: A label with this name says how many bytes a parameter's update moves; a second rate comes of it.
BYTES_PER_PARAMETER = "bytes_per_parameter"
#: A label with this name parts a benchmark's table in several.
PART = "part"
#: And one with this name too.
DRIVE = "drive"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Details:
    """Figures of the cases that are no rates, as a table.

    Attributes:
        name: key in the JSON.
        title: the table's, for people.
        headings: key of a row -> heading of its column, in order.
        rows: keys with `_bytes` are sizes; None is shown as a dash. A column without any value is not shown.
        text_columns: the first ones, which are texts.
    """

    name: str
    title: str
    headings: dict[str, str]
    rows: list[dict[str, str | int | float | None]]
    text_columns: int = 1

    def grid(self) -> Grid:
        keys = [key for key in self.headings if any(row[key] is not None for row in self.rows)]
        texts = self.text_columns - sum(key not in keys for key in list(self.headings)[: self.text_columns])
        rows = [[_detail(key, row[key]) for key in keys] for row in self.rows]
        return Grid([self.headings[key] for key in keys], rows, texts, self.title)


@dataclass(frozen=True)
class Result:
    """All of one benchmark.

    Attributes:
        kind: the benchmark's name, "copy".
        title: what was measured, for people.
        command: the command line that gives it again.
        machine: name of a part -> what it is.
        notes: what a reader must know of all of it.
        date: ISO 8601, UTC, of the end.
        details: tables of further figures.
    """

    kind: str
    title: str
    command: list[str]
    machine: dict[str, str]
    measurements: list[Measurement]
    notes: list[str]
    date: str = field(default_factory=_now)
    details: list[Details] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Keys, which do not change: kind, title, tierstream (version), date, command, machine, notes,
        measurements (of each: its labels, unit, median, lowest, highest, rates, cpu_s_per_giga, note); and
        where there are any, details (name of a table -> its rows).
        """
        plain: dict[str, Any] = {
            "kind": self.kind,
            "title": self.title,
            "tierstream": version("tierstream"),
            "date": self.date,
            "command": self.command,
            "machine": self.machine,
            "notes": self.notes,
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }
        if self.details:
            plain["details"] = {details.name: details.rows for details in self.details}
        return plain


def grids(result: Result) -> list[Grid]:
    """One per unit, drive and part of the benchmark, in order of appearance, and one per table of details."""
    groups: dict[tuple[str | int | None, ...], list[Measurement]] = {}
    for measurement in result.measurements:
        key = (measurement.unit, measurement.labels.get(DRIVE), measurement.labels.get(PART))
        groups.setdefault(key, []).append(measurement)
    return [*(_grid(members) for members in groups.values()), *(part.grid() for part in result.details)]


def varying_labels(measurements: Sequence[Measurement]) -> list[str]:
    """Labels whose values are not the same everywhere (one that some lack varies), in order of appearance."""
    keys = dict.fromkeys(key for measurement in measurements for key in measurement.labels)
    return [key for key in keys if len({m.labels.get(key) for m in measurements}) > 1]


def label_name(key: str) -> str:
    """A label's name for people: `block_bytes` gives "block"."""
    return key.removesuffix(_BYTES).replace("_", " ")


def label_value(key: str, value: str | int | None) -> str:
    """A label's value for people: sizes with a unit."""
    if value is None:
        return "-"
    if key.endswith(_BYTES) and isinstance(value, int):
        return format_bytes(value).replace(".00 ", " ")
    return str(value)


def rate_unit(unit: str) -> str:
    """Unit of a rate as it is shown: "GB/s", "Gparam/s", "ktokens/s"."""
    return f"{'k' if unit in _BY_THE_THOUSAND else 'G'}{_UNITS.get(unit, unit)}/s"


def rate_scale(unit: str) -> float:
    """What a rate is divided by to be shown in `rate_unit(unit)`."""
    return 1e3 if unit in _BY_THE_THOUSAND else 1e9


def _grid(measurements: Sequence[Measurement]) -> Grid:
    unit = measurements[0].unit
    varying = [key for key in varying_labels(measurements) if key != BYTES_PER_PARAMETER]
    with_traffic = all(BYTES_PER_PARAMETER in m.labels for m in measurements)
    notes = list(dict.fromkeys(m.note for m in measurements if m.note))
    columns = [*map(label_name, varying), rate_unit(unit)]
    columns += ["GB/s"] * with_traffic + ["spread", f"CPU s/{rate_unit(unit).removesuffix('/s')}"]
    columns += [""] * bool(notes)
    rows = []
    for measurement in measurements:
        row = [label_value(key, measurement.labels.get(key)) for key in varying]
        row.append(figure(measurement.median / rate_scale(unit)))
        if with_traffic:
            row.append(figure(measurement.median * int(measurement.labels[BYTES_PER_PARAMETER]) / 1e9))
        cpu_s = measurement.cpu_s_per_giga * rate_scale(unit) / 1e9
        row += [f"{100 * measurement.spread:.0f} %", figure(cpu_s)]
        row += [f"({notes.index(measurement.note) + 1})" if measurement.note else ""] * bool(notes)
        rows.append(row)
    fixed = [
        f"{label_name(key)} {label_value(key, value)}"
        for key, value in measurements[0].labels.items()
        if key not in varying and key != BYTES_PER_PARAMETER
    ]
    rounds = len(measurements[0].rates)
    how = f"median of {rounds} rounds; spread: (highest - lowest) / median"
    footnotes = [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
    return Grid(columns, rows, len(varying), "; ".join([*fixed, how, *footnotes]))


def _detail(key: str, value: str | int | float | None) -> str:
    return figure(value) if isinstance(value, float) else label_value(key, value)


def figure(value: float) -> str:
    """Three significant digits, without an exponent where that can be read."""
    if value == 0 or 0.001 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.1e}"
