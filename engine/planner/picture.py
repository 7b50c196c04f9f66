"""An outlook as a picture: what lives in which tier, and one step on a time axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tierstream.engine.planner.outlook import Ahead, Outlook
from tierstream.engine.trace.picture import draw, timeline
from tierstream.engine.trace.trace import Track
from tierstream.io.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "weight": "#7fb7e6", "master": "#2f6db3", "master_low": "#2f6db3", "exp_avg": "#d98c21",
    "exp_avg_sq": "#f2c078", "grad": "#b5523b", "gradient sum": "#b5523b", "activation": "#c9a0dc",
    "pages that pass": "#8a8a5c",
}  # fmt: skip
_OTHER = "#9a9a9a"
_TIERS_INCHES = 2.4
#: Spans of threads say little at this scale; lanes, links and drives are shown.
_SHOWN = {Track.STEPS, Track.COMPUTE, Track.UPLOAD, Track.DOWNLOAD, Track.READS, Track.WRITES}


def draw_outlook(ahead: Ahead) -> Figure:
    """Tiers above, the step below."""
    outlook, spans = ahead.outlook, ahead.forecast.spans
    if outlook.grain > 1:
        spans = [span for span in spans if span.track in _SHOWN or span.waiting]
    figure = draw(timeline(spans))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _TIERS_INCHES)
    (steps,) = figure.axes
    grid = figure.add_gridspec(2, 1, height_ratios=(_TIERS_INCHES - 0.4, height))
    steps.set_subplotspec(grid[1])
    _draw_tiers(figure.add_subplot(grid[0]), outlook)
    return figure


def _draw_tiers(axes: Axes, outlook: Outlook) -> None:
    """A bar per tier, each of its own length: they differ by a factor of a thousand."""
    tiers = list(outlook.planes)
    for row, tier in enumerate(tiers):
        kinds = dict(sorted(outlook.planes[tier].items(), key=lambda item: -item[1]))
        whole = max(sum(kinds.values()), 1)
        left = 0.0
        for kind, nbytes in kinds.items():
            axes.barh(row, nbytes / whole, left=left, color=_colour(kind))
            if nbytes / whole > 0.07:
                said = f"{kind}\n{format_bytes(nbytes)}"
                axes.text(left + nbytes / whole / 2, row, said, ha="center", va="center", fontsize=7)
            left += nbytes / whole
    axes.set_yticks(range(len(tiers)), [_label(outlook, tier, outlook.planes[tier]) for tier in tiers])
    axes.set_ylim(len(tiers) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    speed = f"{outlook.step_s:.4g} s a step, {outlook.tokens_per_s:,.4g} tokens/s, set by {outlook.resource}"
    title = f"{outlook.parameters / 1e9:,.1f} G parameters on {outlook.machine}\n{speed}"
    axes.set_title(title, loc="left", fontsize="medium")


def _colour(kind: str) -> str:
    """Of the plane that it begins with."""
    planes = (plane for plane in _COLOURS if kind.startswith(plane))
    return _COLOURS.get(max(planes, key=len, default=""), _OTHER)


def _label(outlook: Outlook, tier: str, kinds: Mapping[str, int]) -> str:
    if tier == "gpu":
        return f"gpu: {format_bytes(sum(kinds.values()))} of buffers"
    if tier == "dram":
        return f"dram: {format_bytes(outlook.dram_bytes)} of arenas"
    return f"nvme: {format_bytes(sum(kinds.values()))}"
