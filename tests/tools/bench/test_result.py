"""Tables and JSON of the same measurements, and the plots' lines."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import numpy as np
import pytest
from matplotlib.figure import Figure

from tierstream.io.measure import Measurement
from tierstream.tools.bench.plots import PlotSpec, draw, render
from tierstream.tools.bench.result import Result, figure, grids, label_value

SIZES = (65536, 1 << 20, 1 << 24)


def copies() -> list[Measurement]:
    """Six lines in two panels; the rates of each are its own."""
    return [
        Measurement(
            {"direction": direction, "memory": memory, "size_bytes": size, "device": "cuda:0"},
            "B",
            tuple(1e9 * (10 * number + step + extra) for extra in (0.0, 0.25, 1.0)),
            0.125,
            "slow" if memory == "pageable" else "",
        )
        for direction in ("H2D", "D2H")
        for number, memory in enumerate(("arena", "torch", "pageable"), start=1)
        for step, size in enumerate(SIZES)
    ]


def result(measurements: list[Measurement]) -> Result:
    return Result(
        "copy", "Copies", ["tierstream", "bench", "copy"], {"cpu": "a & b"}, measurements, ["<note>"]
    )


def test_the_table_shows_what_the_json_holds() -> None:
    made = result(copies())
    (grid,) = grids(made)
    assert grid.columns == ["direction", "memory", "size", "GB/s", "spread", "CPU s/GB", ""]
    rows = [
        [
            entry["direction"],
            entry["memory"],
            label_value("size_bytes", entry["size_bytes"]),
            figure(entry["median"] / 1e9),
            f"{100 * (entry['highest'] - entry['lowest']) / entry['median']:.0f} %",
            figure(entry["cpu_s_per_giga"]),
            "(1)" if entry["note"] else "",
        ]
        for entry in made.to_json()["measurements"]
    ]
    assert grid.rows == rows
    assert rows[0] == ["H2D", "arena", "64 KiB", "10.2", "10 %", "0.125", ""]
    assert grid.caption.startswith("device cuda:0; median of 3 rounds")
    (note,) = {entry["note"] for entry in made.to_json()["measurements"]} - {""}
    assert grid.caption.endswith(f"; (1) {note}")


def test_json_has_the_documented_keys_and_an_utc_date() -> None:
    plain = result(copies()).to_json()
    assert list(plain) == [
        "kind", "title", "tierstream", "date", "command", "machine", "notes", "measurements",
    ]  # fmt: skip
    made = datetime.fromisoformat(plain["date"])
    assert made.tzinfo == UTC
    assert abs((datetime.now(UTC) - made).total_seconds()) < 60
    assert set(plain["measurements"][0]) == {
        "direction", "memory", "size_bytes", "device", "unit", "median", "lowest", "highest", "rates",
        "cpu_s_per_giga", "note",
    }  # fmt: skip


def test_units_have_a_table_each_and_bytes_per_parameter_become_a_rate() -> None:
    adam = [
        Measurement({"threads": threads, "bytes_per_parameter": 26}, "parameters", (threads * 1e9,), 1.0)
        for threads in (1, 2)
    ]
    first, second = grids(result([*adam, *copies()]))
    assert first.columns == ["threads", "Gparam/s", "GB/s", "spread", "CPU s/Gparam"]
    assert [row[:3] for row in first.rows] == [["1", "1.00", "26.0"], ["2", "2.00", "52.0"]]
    assert len(second.rows) == len(copies())


def test_a_label_that_some_lack_is_a_column() -> None:
    one, two = (
        Measurement({"a": 1}, "B", (1e9,), 0.0),
        Measurement({"a": 1, "b_bytes": 4096}, "B", (1e9,), 0.0),
    )
    (grid,) = grids(result([one, two]))
    assert grid.columns[:2] == ["b", "GB/s"]
    assert [row[0] for row in grid.rows] == ["-", "4 KiB"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.00123, "0.00123"),
        (1.5e-5, "1.5e-05"),
        (12.345, "12.3"),
        (123.4, "123"),
        (54321, "54321"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


SPEC = PlotSpec("copies", "Copies", "size_bytes", ("memory",), "direction", log_x=True)


def lines(drawn: Figure) -> dict[tuple[str, str], tuple[list[float], list[float], np.ndarray]]:
    """(panel, line) -> x, median, ends of the bars [point, (lowest, highest)]."""
    found = {}
    for axes in drawn.axes:
        for container in axes.containers:
            data, _, (bars,) = container.lines
            ends = np.array([segment[:, 1] for segment in bars.get_segments()])
            found[axes.get_title(), container.get_label()] = (*map(list, data.get_data()), ends)
    return found


def test_a_plot_has_a_line_per_series_and_a_panel_per_facet() -> None:
    found = lines(draw(SPEC, copies()))
    names = ("arena", "torch", "pageable")
    assert list(found) == [(f"direction {d}", memory) for d in ("H2D", "D2H") for memory in names]
    for measurement in copies():
        labels = measurement.labels
        x, medians, ends = found[f"direction {labels['direction']}", str(labels["memory"])]
        assert x == list(SIZES)
        at = x.index(labels["size_bytes"])
        assert medians[at] == pytest.approx(measurement.median / 1e9)
        assert ends[at] == pytest.approx([min(measurement.rates) / 1e9, max(measurement.rates) / 1e9])


def test_a_plot_says_what_it_shows() -> None:
    drawn = draw(SPEC, copies())
    axes = drawn.axes[0]
    assert drawn.get_suptitle() == "Copies"
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("size", "GB/s", "log")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64 KiB", "1 MiB", "16 MiB"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["arena", "torch", "pageable"]
    assert axes.get_ylim()[0] == 0


def test_names_on_the_horizontal_axis_keep_their_order() -> None:
    drawn = draw(PlotSpec("m", "M", "memory", (), None), copies()[::3])
    assert [tick.get_text() for tick in drawn.axes[0].get_xticklabels()] == ["arena", "torch", "pageable"]
    assert drawn.axes[0].get_legend() is None


def test_a_rendered_plot_is_a_png_of_some_size() -> None:
    png = render(SPEC, copies())
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 2 * height > 600
