"""Plots of the steps of a run. Lines are means of a bucket of steps, the shade behind them reaches from the
least to the greatest of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstream.tools.figures import new_figure, to_png
from tierstream.tools.history import Array, Band, History
from tierstream.tools.page import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of the buckets, in the running mean of the loss; and the fewest.
_RUNNING_SHARE, _RUNNING_MIN = 0.02, 10
_SIZE_INCHES = (9.0, 3.2)


def plots(
    history: History, evaluations: Sequence[Mapping[str, Any]], clip_norm: float | None
) -> list[Picture]:
    """Those for which the run has numbers.

    Args:
        evaluations: records with `step` and `loss`.
        clip_norm: the limit of the gradient's norm; None: nothing is clipped.
    """
    made = [
        _picture("loss", history, lambda axes: _loss(axes, history, evaluations)),
        _picture("perplexity", history, lambda axes: _perplexity(axes, history, evaluations)),
        _picture("learning rate", history, lambda axes: _line(axes, history, "lr", "learning rate")),
        _picture("gradient norm", history, lambda axes: _grad_norm(axes, history, clip_norm)),
        _picture("speed", history, lambda axes: _line(axes, history, "tokens_per_s", "tokens/s", zero=True)),
    ]
    if "bound_percent" in history.bands:
        made.append(_picture("share of the bound", history, lambda axes: _bound(axes, history)))
    return [*made, *_tiers(history), *_memory_and_routers(history)]


def _tiers(history: History) -> Iterator[Picture]:
    if stalls := _present(history.group("stall_s")):
        yield _picture("waits of the computation", history, lambda axes: _stalls(axes, history, list(stalls)))
    moved = {
        f"{tier} {word}": band
        for what, word in (("bytes_read", "read"), ("bytes_written", "written"))
        for tier, band in _present(history.group(f"{what}_gb_per_s")).items()
    }
    if moved:
        yield _picture("traffic of the tiers", history, lambda axes: _lines(axes, history, moved, "GB/s"))
    hits = [tier for tier in history.group("cache_hits") if f"cache_misses.{tier}" in history.bands]
    if hits:
        yield _picture("hit rates", history, lambda axes: _hits(axes, history, hits))


def _memory_and_routers(history: History) -> Iterator[Picture]:
    peaks = {name: history.bands[f"{name}_peak_bytes"] for name in ("host", "gpu")}
    if peaks := _present(peaks):
        yield _picture("peak memory", history, lambda axes: _peaks(axes, history, peaks))
    named = {"aux": "router_aux_loss", "z of routers": "router_z_loss", "z": "z_loss"}
    losses = {name: history.bands[key] for name, key in named.items() if key in history.bands}
    if losses := _present(losses):
        yield _picture("auxiliary losses", history, lambda axes: _lines(axes, history, losses, "loss"))
    if "experts.with_tokens" in history.bands:
        share = 100 * history.ratio("experts.with_tokens", "experts.experts")
        yield _picture("experts with tokens", history, lambda axes: _share(axes, history, share))


def _picture(title: str, history: History, draw: Any) -> Picture:
    figure = new_figure(*_SIZE_INCHES)
    axes = figure.add_subplot()
    draw(axes)
    _mark_skipped(axes, history)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", loc="best")
    return Picture(title, to_png(figure))


def _mark_skipped(axes: Axes, history: History) -> None:
    skipped = history.steps[history.bands["skipped"].total > 0]
    if len(skipped):
        places = np.zeros(len(skipped))
        axes.plot(skipped, places, "|", color="tab:red", markersize=12, label="skipped",
                  transform=axes.get_xaxis_transform())  # fmt: skip


def _shade(
    axes: Axes, history: History, band: Band, color: str, label: str, line: Array | None = None
) -> None:
    low, high = (np.where(np.isfinite(each), each, np.nan) for each in (band.low, band.high))
    axes.fill_between(history.steps, low, high, color=color, alpha=0.25, linewidth=0)
    mean = band.mean if line is None else line
    marker = "o" if len(history.steps) == 1 else ""
    axes.plot(history.steps, np.where(np.isfinite(mean), mean, np.nan), color=color, linewidth=1.2,
              marker=marker, label=label)  # fmt: skip


def _line(axes: Axes, history: History, name: str, label: str, *, zero: bool = False) -> None:
    _shade(axes, history, history.bands[name], "tab:blue", "")
    axes.set_ylabel(label)
    if zero:
        _from_zero(axes)


def _lines(axes: Axes, history: History, bands: Mapping[str, Band], label: str) -> None:
    for number, (name, band) in enumerate(bands.items()):
        _shade(axes, history, band, f"C{number}", name)
    axes.set_ylabel(label)


def _loss(axes: Axes, history: History, evaluations: Sequence[Mapping[str, Any]]) -> None:
    band, buckets = history.bands["loss"], max(_RUNNING_MIN, round(_RUNNING_SHARE * len(history.steps)))
    _shade(axes, history, band, "tab:blue", "train")
    if len(history.steps) >= 2 * buckets:
        steps = buckets * (history.last.step - history.first.step + 1) // len(history.steps)
        mean = band.running_mean(buckets)
        axes.plot(history.steps, mean, color="tab:orange", label=f"mean of {steps:,} steps", linewidth=1.6)
    _points(axes, evaluations, "loss")
    axes.set_ylabel("nats")


def _perplexity(axes: Axes, history: History, evaluations: Sequence[Mapping[str, Any]]) -> None:
    band = history.bands["perplexity"]
    _shade(axes, history, band, "tab:blue", "train", np.exp(np.minimum(history.bands["loss"].mean, 700)))
    with np.errstate(over="ignore"):
        shown = [{**one, "perplexity": float(np.exp(min(one["loss"], 700)))} for one in evaluations]
    _points(axes, shown, "perplexity")
    _log(axes, band)
    axes.set_ylabel("exp(loss)")


def _points(axes: Axes, evaluations: Sequence[Mapping[str, Any]], key: str) -> None:
    if evaluations:
        steps, values = [one["step"] for one in evaluations], [one[key] for one in evaluations]
        axes.plot(steps, values, "D-", color="tab:green", markersize=4, label="evaluation")


def _grad_norm(axes: Axes, history: History, clip_norm: float | None) -> None:
    band = history.bands["grad_norm"]
    _shade(axes, history, band, "tab:blue", "before clipping")
    if clip_norm is not None:
        share = 100 * history.totals["clipped"] / history.count
        axes.axhline(clip_norm, color="tab:orange", label=f"limit; {share:.1f} % of the steps are above")
    _log(axes, band)
    axes.set_ylabel("L2 norm")


def _bound(axes: Axes, history: History) -> None:
    _line(axes, history, "bound_percent", "% of the speed that is possible", zero=True)
    axes.axhline(100, color="black", linewidth=0.8)


def _stalls(axes: Axes, history: History, causes: Sequence[str]) -> None:
    shares = [np.nan_to_num(100 * history.ratio(f"stall_s.{cause}", "step_s")) for cause in causes]
    if len(history.steps) == 1:
        axes.bar(causes, [share[0] for share in shares])
    else:
        axes.stackplot(history.steps, shares, labels=causes)
    axes.set_ylabel("% of the time")
    _from_zero(axes)


def _hits(axes: Axes, history: History, tiers: Sequence[str]) -> None:
    for tier in tiers:
        hits, misses = history.bands[f"cache_hits.{tier}"].total, history.bands[f"cache_misses.{tier}"].total
        with np.errstate(divide="ignore", invalid="ignore"):
            axes.plot(history.steps, 100 * hits / (hits + misses), label=tier,
                      marker="o" if len(history.steps) == 1 else "")  # fmt: skip
    axes.set_ylabel("% of page uses")
    axes.set_ylim(0, 105)


def _peaks(axes: Axes, history: History, peaks: Mapping[str, Band]) -> None:
    for name, band in peaks.items():
        axes.plot(history.steps, band.high / 2**30, label=name, marker="o" if len(history.steps) == 1 else "")
    axes.set_ylabel("GiB")
    _from_zero(axes)


def _share(axes: Axes, history: History, share: Array) -> None:
    axes.plot(history.steps, share, marker="o" if len(history.steps) == 1 else "")
    axes.set_ylabel("% of the experts")
    axes.set_ylim(0, 105)


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _log(axes: Axes, band: Band) -> None:
    positive = band.low[np.isfinite(band.low) & (band.low > 0)]
    if len(positive) and not (band.low == 0).any():
        axes.set_yscale("log")


def _present(bands: Mapping[str, Band]) -> dict[str, Band]:
    """Those that are not zero throughout."""
    return {name: band for name, band in bands.items() if np.nanmax(np.nan_to_num(band.high), initial=0) > 0}
