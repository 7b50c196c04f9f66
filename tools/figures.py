"""What figures share: made without a display, saved as PNG."""

from __future__ import annotations

from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


def new_figure(width_inches: float, height_inches: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure) -> bytes:
    with SpooledTemporaryFile() as stream:
        figure.savefig(stream, format="png", dpi=_DPI)
        stream.seek(0)
        return stream.read()
