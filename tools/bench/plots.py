"""Plots of measurements as PNG files, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstream.io.measure import Measurement
from tierstream.tools.bench.result import label_name, label_value, rate_scale, rate_unit
from tierstream.tools.figures import new_figure, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = (5.2, 4.0)
_MARKERS = "osD^vPX*<>"


@dataclass(frozen=True)
class PlotSpec:
    """One plot: rates over a label, a line per value of others.

    Attributes:
        name: of the file, without .png.
        x: the label on the horizontal axis.
        series: the labels that tell the lines apart.
        facet: the label that tells the panels apart, side by side; None: one panel.
        log_x: powers of two at equal distances.
        only: a label and the value that measurements must have to be shown.
        y: a label in bytes that is drawn instead of the rate.
        times: a label that rates are multiplied by.
    """

    name: str
    title: str
    x: str
    series: tuple[str, ...]
    facet: str | None = None
    log_x: bool = False
    only: tuple[str, str | int] | None = None
    y: str | None = None
    times: str | None = None


def render(spec: PlotSpec, measurements: Sequence[Measurement]) -> bytes:
    """The plot as a PNG."""
    return to_png(draw(spec, measurements))


def draw(spec: PlotSpec, measurements: Sequence[Measurement]) -> Figure:
    """Medians as lines, with bars from the lowest to the highest round.

    Takes the measurements that have all labels of the plot; those of one plot have one unit.
    """
    needed = {spec.x, *spec.series, *(key for key in (spec.facet, spec.y, spec.times) if key)}
    shown = [m for m in measurements if needed <= m.labels.keys() and _is_meant(spec, m)]
    panels = list(_grouped(shown, (spec.facet,) if spec.facet else ()))
    figure = new_figure(_PANEL_INCHES[0] * len(panels), _PANEL_INCHES[1])
    figure.suptitle(spec.title)
    for index, (name, members) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), index)
        if spec.facet is not None:
            axes.set_title(f"{label_name(spec.facet)} {name}", fontsize="medium")
        _draw_panel(axes, spec, members)
    return figure


def _is_meant(spec: PlotSpec, measurement: Measurement) -> bool:
    return spec.only is None or measurement.labels.get(spec.only[0]) == spec.only[1]


def _draw_panel(axes: Axes, spec: PlotSpec, measurements: Sequence[Measurement]) -> None:
    places = _places(spec, measurements)
    for number, (name, members) in enumerate(_grouped(measurements, spec.series)):
        members = sorted(members, key=lambda m: places[m.labels[spec.x]])
        heights = [_height(spec, m) for m in members]
        axes.errorbar(
            [places[m.labels[spec.x]] for m in members],
            [median for _, median, _ in heights],
            yerr=[
                [median - low for low, median, _ in heights],
                [high - median for _, median, high in heights],
            ],
            label=name,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            capsize=3,
            linewidth=1.4,
            linestyle="-" if all(isinstance(value, int) for value in places) else "none",
        )
    if spec.log_x:
        axes.set_xscale("log", base=2)
    texts = [label_value(spec.x, value) for value in places]
    axes.set_xticks(list(places.values()), texts)
    if len("".join(texts)) > 40:
        for label in axes.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")  # a slanted text ends at its tick
    axes.minorticks_off()
    axes.set_xlabel(label_name(spec.x))
    axes.set_ylabel(_height_name(spec, measurements[0].unit))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if spec.series:
        axes.legend(fontsize="small", title=", ".join(map(label_name, spec.series)))


def _height(spec: PlotSpec, measurement: Measurement) -> tuple[float, float, float]:
    """What is drawn of a measurement: lowest, median, highest."""
    if spec.y is not None:
        value = int(measurement.labels[spec.y]) / 1e9
        return value, value, value
    factor = int(measurement.labels[spec.times]) if spec.times else 1
    rates = (min(measurement.rates), measurement.median, max(measurement.rates))
    low, median, high = (factor * rate / rate_scale(measurement.unit) for rate in rates)
    return low, median, high


def _height_name(spec: PlotSpec, unit: str) -> str:
    if spec.y is not None:
        return f"{label_name(spec.y)}, GB"
    return f"{rate_unit(unit)} x {label_name(spec.times)}" if spec.times else rate_unit(unit)


def _places(spec: PlotSpec, measurements: Sequence[Measurement]) -> dict[str | int, float]:
    """Value of the horizontal label -> where it stands: numbers at their value, names one after the other."""
    values = dict.fromkeys(m.labels[spec.x] for m in measurements)
    if all(isinstance(value, int) for value in values):
        return {value: float(value) for value in sorted(values, key=int)}
    return {value: float(index) for index, value in enumerate(values)}


def _grouped(
    measurements: Sequence[Measurement], keys: Sequence[str]
) -> Iterator[tuple[str, list[Measurement]]]:
    """Measurements with the same values of `keys`, and these values as a text, in order of appearance."""
    groups: dict[tuple[str | int, ...], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(tuple(measurement.labels[key] for key in keys), []).append(measurement)
    for values, members in groups.items():
        texts = (label_value(key, value) for key, value in zip(keys, values, strict=True))
        yield ", ".join(texts), members
