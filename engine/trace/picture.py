"""A traced step as a picture: a row per lane and thread, coloured by what it did, and the gaps of the lane
`compute` coloured by what it waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, NamedTuple

from tierstream.engine.trace.summary import find_gaps
from tierstream.engine.trace.trace import Span, Track

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_DPI = 120
_WIDTH_INCHES, _ROW_INCHES, _MARGIN_INCHES = 13.0, 0.34, 1.5
#: Pieces of one colour that lie closer than this share of the step are drawn as one: less than a pixel.
_MERGED_SHARE = 1 / 2000
#: A gap at least so long, as a share of the step, is told by name.
_NAMED_SHARE = 0.03
#: A cause that takes less is left out of the legend: it would read 0.0 %.
_TOLD_SHARE = 0.0005
WAITING, OTHER, PAGES = "waiting", "other", "pages"
_OTHER = "#7d7d7d"
_KINDS = {
    "forward": "#4c9f70",
    "backward": "#2f6db3",
    "head": "#8e6bbf",
    "adamw": "#d98c21",
    "weight": "#7fb7e6",
    "grad": "#b5523b",
    "activation": "#c9a0dc",
    PAGES: "#8a8a5c",
    OTHER: _OTHER,
    WAITING: "#e3e3e3",
}
_CAUSES = {
    "weights: page of the update": "#7a0019",
    "weights: update": "#d7263d",
    "weights: page": "#f46036",
    "weights: slot": "#f8a03f",
    "weights: copy": "#f2d13c",
    "experts": "#a85c32",
    "activations": "#c14bd0",
    "gradients": "#3fb8af",
    "verdict": "#1b998b",
    "host": "#555b6e",
}
_ROWS = [track for track in Track if track is not Track.STEPS]


class Bar(NamedTuple):
    """Milliseconds since the begin of the step."""

    kind: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        step: its number.
        rows: track -> what it did, in order; tracks with nothing to show are left out.
        gaps: idle time of the lane `compute`, with its causes as kinds.
        idle_ms: cause -> milliseconds, longest first.
    """

    step: int
    length_ms: float
    rows: dict[Track, list[Bar]]
    gaps: list[Bar]
    idle_ms: dict[str, float]


def timeline(spans: Sequence[Span]) -> Timeline:
    """The traced step of median length: of the two in the middle, the shorter."""
    steps = sorted(find_gaps(spans), key=lambda item: item[0].end_s - item[0].begin_s)
    step, gaps = steps[(len(steps) - 1) // 2]
    length_ms = 1e3 * (step.end_s - step.begin_s)

    def bar(kind: str, begin_s: float, end_s: float) -> Bar:
        """Cut to the step."""
        begin_ms, end_ms = (1e3 * (time_s - step.begin_s) for time_s in (begin_s, end_s))
        return Bar(kind, max(0.0, begin_ms), min(length_ms, end_ms))

    rows: dict[Track, list[Bar]] = {track: [] for track in _ROWS}
    for span in spans:
        if span.track in rows and span.begin_s < step.end_s and span.end_s > step.begin_s:
            rows[span.track].append(bar(_kind(span), span.begin_s, span.end_s))
    nearness_ms = length_ms * _MERGED_SHARE
    idle_ms = Counter[str]()
    for gap in gaps:
        idle_ms[gap.cause] += 1e3 * (gap.end_s - gap.begin_s)  # type: ignore[assignment]
    return Timeline(
        int(step.unit),
        length_ms,
        {track: _merged(bars, nearness_ms) for track, bars in rows.items() if bars},
        _merged((bar(*gap) for gap in gaps), 0.0),
        dict(idle_ms.most_common()),
    )


def picture(spans: Sequence[Span], title: str = "") -> bytes:
    """The median step of a trace as a PNG."""
    with SpooledTemporaryFile() as stream:
        draw(timeline(spans), title).savefig(stream, format="png", dpi=_DPI)
        stream.seek(0)
        return stream.read()


def draw(line: Timeline, title: str = "") -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _MARGIN_INCHES + _ROW_INCHES * max(len(line.rows), 9)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tracks = list(line.rows)
    for row, track in enumerate(tracks):
        _draw_bars(axes, line.rows[track], row, 0.8, _KINDS)
    _draw_gaps(axes, line, tracks)
    axes.set_yticks(range(len(tracks)), [track.value for track in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(0, line.length_ms)
    axes.set_xlabel("ms")
    idle_ms = sum(line.idle_ms.values())
    busy = 100 * (1 - idle_ms / line.length_ms)
    said = f"step {line.step}: {line.length_ms:.4g} ms, of which the lane compute works {busy:.0f} %"
    axes.set_title(": ".join(filter(None, (title, said))), loc="left")
    _draw_legends(figure, line, idle_ms)
    return figure


def _kind(span: Span) -> str:
    if span.waiting:
        return WAITING
    if span.page is not None:
        return PAGES
    return span.what if span.what in _KINDS else OTHER


def _merged(bars: Iterable[Bar], nearness_ms: float) -> list[Bar]:
    """In order; neighbours of one kind that overlap, touch or nearly do are one."""
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.begin_ms):
        last = merged[-1] if merged else None
        if last is not None and last.kind == bar.kind and bar.begin_ms <= last.end_ms + nearness_ms:
            merged[-1] = last._replace(end_ms=max(last.end_ms, bar.end_ms))
        else:
            merged.append(bar)
    return merged


def _draw_bars(axes: Axes, bars: Sequence[Bar], row: float, height: float, colours: dict[str, str]) -> None:
    """One collection, however many there are."""
    axes.broken_barh(
        [(bar.begin_ms, bar.end_ms - bar.begin_ms) for bar in bars],
        (row - height / 2, height),
        facecolors=[colours.get(bar.kind, _OTHER) for bar in bars],
        linewidth=0,
    )


def _draw_gaps(axes: Axes, line: Timeline, tracks: Sequence[Track]) -> None:
    """In the row `compute`, and pale over all rows, where what delayed it can be seen."""
    row = tracks.index(Track.COMPUTE)
    _draw_bars(axes, line.gaps, row, 0.8, _CAUSES)
    axes.broken_barh(
        [(gap.begin_ms, gap.end_ms - gap.begin_ms) for gap in line.gaps],
        (-0.6, len(tracks) + 0.2),
        facecolors=[_CAUSES.get(gap.kind, _OTHER) for gap in line.gaps],
        alpha=0.13,
        linewidth=0,
        zorder=0,
    )
    for gap in line.gaps:
        if gap.end_ms - gap.begin_ms >= _NAMED_SHARE * line.length_ms:
            middle = (gap.begin_ms + gap.end_ms) / 2
            said = gap.kind.replace(": ", ":\n")
            axes.text(middle, row, said, ha="center", va="center", fontsize=6.5, clip_on=True)


def _draw_legends(figure: Figure, line: Timeline, idle_ms: float) -> None:
    used = {bar.kind for bars in line.rows.values() for bar in bars}
    figure.legend(
        handles=[_patch(colour, kind) for kind, colour in _KINDS.items() if kind in used],
        loc="outside lower center",
        ncols=len(_KINDS),
        fontsize="small",
    )
    figure.legend(
        handles=[
            _patch(_CAUSES.get(cause, _OTHER), f"{cause}: {lost_ms:.3g} ms, {lost_ms / line.length_ms:.1%}")
            for cause, lost_ms in line.idle_ms.items()
            if lost_ms / line.length_ms >= _TOLD_SHARE
        ],
        title=f"compute waits {idle_ms:.4g} ms, for",
        loc="outside right upper",
        fontsize="small",
    )


def _patch(colour: str, text: str) -> Patch:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=text)
