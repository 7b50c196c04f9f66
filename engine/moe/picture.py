"""A heat map of experts: how many tokens went to each, layer by layer."""

from __future__ import annotations

from tempfile import SpooledTemporaryFile

import numpy as np

from tierstream.engine.moe.use import ExpertUse

_DPI = 120


def expert_picture(use: ExpertUse, title: str) -> bytes:
    """A PNG: a row per layer, a column per expert. Colour is the expert's load, 1 where all of a layer had
    the same; white: no token ever.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    means = use.tokens.sum(axis=1, keepdims=True) / (use.tokens.shape[1] or 1)
    load = np.ma.masked_equal(use.tokens / np.maximum(means, 1e-9), 0.0)
    rows, columns = use.tokens.shape
    figure = Figure(figsize=(min(4 + 0.09 * columns, 14), min(2 + 0.16 * rows, 10)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        load, aspect="auto", interpolation="nearest", cmap="viridis", norm=LogNorm(1 / 16, 16, clip=True)
    )
    ticks = range(0, rows, max(1, rows // 12))
    axes.set_yticks(list(ticks), [str(use.layers[row]) for row in ticks])
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    share = float(use.hit_share().mean()) if rows else 0.0
    axes.set_title(f"{title}\n{100 * share:.0f} % had tokens in a step", fontsize="medium")
    bar = figure.colorbar(image, ax=axes, ticks=[1 / 16, 1 / 4, 1, 4, 16], label="load / mean of the layer")
    bar.ax.set_yticklabels(["1/16", "1/4", "1", "4", "16"])
    with SpooledTemporaryFile() as stream:
        figure.savefig(stream, format="png", dpi=_DPI)
        stream.seek(0)
        return stream.read()
