"""Tables for the screen: the plan before the first step, the traffic after the last. At most 80 columns
wide."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from tierstream.engine.metrics import DrivePlan, DriveTotals, PlanReport, RunSummary
from tierstream.io.sizes import format_bytes

WIDTH_COLUMNS = 80


def open_console(stream: TextIO, columns: int = WIDTH_COLUMNS) -> Console:
    """A console of at most so many columns for plain text and tables: colours only on a terminal, ASCII lines
    where the encoding wants them."""
    width = min(columns, shutil.get_terminal_size((columns, 24)).columns)
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> Table:
    """A table whose first `text_columns` columns are text (left), the others numbers (right)."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_plan(console: Console, plan: PlanReport) -> None:
    """What is decided before the first step: bytes per tier, number formats, paths to the drives, the
    bound."""
    dtypes = ", ".join(f"{plane} {dtype}" for plane, dtype in plan.dtypes.items())
    parts = f"{count(plan.parameters)} parameters"
    if plan.frozen_parameters:
        trained = plan.parameters - plan.frozen_parameters
        parts += f", {count(trained)} trained and {count(plan.frozen_parameters)} frozen"
    console.print(f"{parts}: {dtypes}")
    console.print(
        f"steps {plan.first_step} to {plan.last_step}, {plan.tokens_per_step:,} tokens per step",
        soft_wrap=True,
    )
    rows = [
        (tier.tier, tier.holds, format_bytes(tier.used_bytes), _limit(tier.limit_bytes))
        for tier in plan.tiers
    ]
    console.print(table("Plan", ("tier", "holds", "bytes", "of"), rows, text_columns=2))
    if plan.logits_bytes:
        console.print(f"the loss takes up to {format_bytes(plan.logits_bytes)} for logits, beside gpu above")
    if plan.extras_bytes:
        console.print(f"what layers share takes up to {format_bytes(plan.extras_bytes)}, beside gpu above")
    for drive in plan.drives:
        console.print(_drive_line(drive), soft_wrap=True)
    if plan.written_bytes_per_step:
        console.print(_wear_line(plan), soft_wrap=True)
    if plan.sample_tokens:
        weights = format_bytes(plan.sample_bytes_per_token)
        console.print(
            f"samples of up to {plan.sample_tokens} tokens: each takes {weights} of weights to the device, "
            "for all prompts at once",
            soft_wrap=True,
        )
    if plan.bound is not None:
        resource, seconds = plan.bound
        by_time = sorted(plan.bound_s.items(), key=lambda item: -item[1])
        console.print(f"A step takes at least {seconds:.3g} s, set by {resource}")
        console.print(f"  ({', '.join(f'{name} {value:.3g} s' for name, value in by_time)})")


def _drive_line(drive: DrivePlan) -> str:
    line = f"{drive.directory}: {drive.path}"
    if drive.share < 1:
        line += f", {100 * drive.share:.0f} % of the state"
    line += f", {drive.threads} threads, blocks of {format_bytes(drive.task_bytes)}"
    rates = (("read", drive.read), ("written", drive.write), ("both at once", drive.mixed))
    known = [f"{rate / 1e9:.2f} GB/s {name}" for name, rate in rates if rate is not None]
    return "; ".join([line, *known])


def _wear_line(plan: PlanReport) -> str:
    """What the run costs the drives: they are made for a number of bytes written."""
    per_step = plan.written_bytes_per_step
    total = per_step * max(0, plan.last_step - plan.first_step + 1)
    line = (
        f"drives are written at least {per_step / 1e9:.3g} GB per step, {total / 1e12:.3g} TB by step "
        f"{plan.last_step}"
    )
    if plan.bound is None:
        return line
    return f"{line}, up to {per_step / plan.bound[1] * 86400 / 1e12:.3g} TB a day"


def print_summary(console: Console, summary: RunSummary) -> None:
    """What the run has moved, and what it has waited for."""
    if summary.last_step is None or summary.step_s <= 0:
        console.print("No step was left to run")
    else:
        _print_steps(console, summary, summary.step_s)
    if summary.stopped is not None:
        console.print(f"Stopped early: {summary.stopped}")
    if summary.best_loss is not None:
        console.print(f"best evaluation: loss {summary.best_loss:.4f} after step {summary.best_step}")
    if summary.failed_checkpoints:
        console.print(f"{summary.failed_checkpoints} checkpoints could not be written")
    if summary.checkpoint is not None:
        console.print(f"checkpoint {summary.checkpoint}", soft_wrap=True)


def _print_steps(console: Console, summary: RunSummary, step_s: float) -> None:
    rows = []
    for tier, totals in summary.tiers.items():
        moved = (totals.bytes_read, totals.bytes_written)
        uses = totals.hits + totals.misses
        rows.append(
            (
                tier,
                *(format_bytes(nbytes) for nbytes in moved),
                *(f"{nbytes / step_s / 1e9:.2f}" for nbytes in moved),
                f"{100 * totals.hits / uses:.1f} %" if uses else "-",
            )
        )
    if rows:
        columns = ("tier", "read", "written", "read GB/s", "written GB/s", "hit rate")
        console.print(table("Traffic of the steps", columns, rows))
    waits = [(f"computation, for {cause}", seconds) for cause, seconds in _longest_first(summary.stall_s)]
    waits += [(f"threads, for {cause}", seconds) for cause, seconds in _longest_first(summary.tier_wait_s)]
    if waits:
        stalls = [(what, f"{seconds:.2f}", f"{100 * seconds / step_s:.1f} %") for what, seconds in waits]
        console.print(table("Waiting", ("who, for what", "s", "of the time"), stalls))
    for directory, drive in summary.drives.items():
        console.print(_traffic_line(directory, drive), soft_wrap=True)
    if summary.drives:
        per_day = summary.tiers["nvme"].bytes_written / step_s * 86400
        console.print(f"drives are written {per_day / 1e12:.3g} TB a day at this pace")
    _print_trace(console, summary)
    skipped = f", {summary.skipped_steps} skipped" if summary.skipped_steps else ""
    console.print(
        f"steps {summary.first_step} to {summary.last_step}{skipped}: loss {summary.loss:.4f}, "
        f"{summary.tokens:,} tokens in {step_s:.1f} s ({count(summary.tokens / step_s)} tok/s)"
    )
    peaks = [("host", summary.host_peak_bytes), ("gpu", summary.gpu_peak_bytes)]
    shown = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in peaks if nbytes)
    if shown:
        console.print(f"peak memory: {shown}")


def _print_trace(console: Console, summary: RunSummary) -> None:
    """What the device did in the traced steps, in few lines, and where to see more."""
    if summary.trace is None:
        return
    total_s = sum(step.step_s for step in summary.traced)
    busy_s = sum(step.busy_s for step in summary.traced)
    idle_s = sum((Counter(step.idle_s) for step in summary.traced), Counter())
    steps = f"steps {summary.traced[0].step} to {summary.traced[-1].step}"
    console.print(f"Traced {steps}: computing {100 * busy_s / total_s:.1f} % of the time, else waiting for")
    shares = [f"{cause} {100 * seconds / total_s:.1f} %" for cause, seconds in _longest_first(idle_s)]
    console.print(f"  ({', '.join(shares[:5])})")
    console.print(f"{summary.trace}: open it in https://ui.perfetto.dev", soft_wrap=True)
    picture = Path(summary.trace).with_suffix(".png")
    console.print(f"{picture}: one of these steps as a picture", soft_wrap=True)


def _traffic_line(directory: str, drive: DriveTotals) -> str:
    """All that a run moved there: what wears a drive is not only the steps."""
    line = (
        f"{directory}, in all (steps, first fill, checkpoints): {drive.bytes_read / 1e9:.3g} GB read, "
        f"{drive.bytes_written / 1e9:.3g} GB written"
    )
    if drive.bytes_checked:
        line += f", {drive.bytes_checked / 1e9:.3g} GB compared with checksums"
    if drive.bytes_buffered:
        line += f", {drive.bytes_buffered / 1e9:.3g} GB of all through the page cache"
    return f"{line}; by {drive.path}"


def _limit(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def count(value: float, gap: str = "") -> str:
    """At most three significant digits, with k, M, G or T after the gap: 12345 gives "12.3k"."""
    suffixes = iter(("", "k", "M", "G", "T"))
    suffix = next(suffixes)
    while abs(value) >= 999.5 and suffix != "T":
        value, suffix = value / 1000, next(suffixes)
    text = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"
    return (text if suffix else f"{value:.3g}") + gap + suffix


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
