"""`tierstream report RUN_DIR [--out FILE]`: a run on one page that can be sent to a colleague."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tierstream.engine.checkpoint import checkpoints
from tierstream.engine.config_tree import flatten
from tierstream.engine.metrics import PlanReport
from tierstream.io.durable import write_file
from tierstream.io.errors import ConfigError
from tierstream.io.sizes import format_bytes
from tierstream.tools.history import History, read_history
from tierstream.tools.options import parse_options, take_positionals
from tierstream.tools.outputs import check_file
from tierstream.tools.page import Grid, Heading, Page, Picture, Text

_DESCRIPTION = """\
Make one HTML file of a run, with plots, tables and its configuration. It needs
no other file and no network. The run may still be going on.
"""
#: Columns of the tables of steps: field -> heading.
_COLUMNS = {
    "step": "step", "loss": "loss, nats", "grad_norm": "norm before clipping", "clip_factor": "clip factor",
    "lr": "learning rate", "trained_tokens": "trained tokens", "tokens_per_s": "tokens/s", "step_s": "s",
}  # fmt: skip
_SAMPLES_SHOWN = 20


@dataclass(kw_only=True)
class ReportOptions:
    """Of the command."""

    out: str | None = None
    """The file; null: report.html in RUN_DIR."""


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    names, rest = take_positionals(args, ["RUN_DIR"], "tierstream report")
    options = parse_options(ReportOptions, rest, prog="tierstream report RUN_DIR", description=_DESCRIPTION)
    run_dir = Path(names[0])
    out = Path(options.out) if options.out is not None else run_dir / "report.html"
    if options.out is not None:
        check_file("--out", options.out)
    write_file(out, report(run_dir).html())
    print(f"report: {out}")
    return 0


def report(run_dir: Path) -> Page:
    """The page of a run.

    Raises:
        ConfigError: no run is there, or none that has a step.
    """
    from tierstream.tools.report_plots import plots

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run directory: it holds no config.yaml")
    metrics_path = run_dir / "metrics.jsonl"
    if not metrics_path.is_file():
        raise ConfigError(f"{run_dir} holds no step yet (no metrics.jsonl); try again when one has ended")
    plan = _plan(run_dir / "plan.json")
    bound_s = plan.bound[1] if plan is not None and plan.bound is not None else None
    history = read_history(metrics_path, bound_s)
    evaluations = _records(run_dir / "evaluations.jsonl")
    ended = datetime.fromtimestamp(metrics_path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    last_step = "" if plan is None else f" of {plan.last_step}"
    return Page(
        title=f"Run {run_dir.resolve().name}",
        subtitle=f"step {history.last.step}{last_step}, written {ended}",
        facts={} if plan is None else plan.machine,
        notes=[*_notes(history, run_dir / "result.json")],
        blocks=[
            _summary(history, plan, evaluations),
            *plots(history, evaluations, history.last.clip_norm),
            *_pictures(run_dir),
            *_tables(history, plan, evaluations),
            *_texts(run_dir),
        ],
    )


def _notes(history: History, result_path: Path) -> Iterator[str]:
    yield (
        "Lines are means of some steps where there are more than the width shows; the shade reaches from the "
        "least to the greatest of them. Norms are those before clipping."
    )
    result = json.loads(result_path.read_text()) if result_path.is_file() else {}
    if result.get("last_step") != history.last.step:
        yield "The run is still going on, or it was killed: it has not written what it does at its end."
    elif result.get("stopped"):
        yield f"Stopped early: {result['stopped']}"
    if skipped := int(history.totals["skipped"]):
        yield f"{skipped} steps were skipped, since their gradient was not finite: marked red in the plots."


def _summary(history: History, plan: PlanReport | None, evaluations: Sequence[Mapping[str, Any]]) -> Grid:
    totals, last = history.totals, history.last
    step_s, count = totals["step_s"], history.count
    rows = [
        ("steps", f"{history.first.step} to {last.step}"),
        ("epoch", f"{last.epoch:.4g}"),
        ("loss of the last step, nats", _number(last.loss)),
        ("least loss, nats", _number(_least(history))),
        ("tokens", f"{int(totals['tokens']):,}"),
        ("trained tokens", f"{int(totals['trained_tokens']):,}"),
        ("time in steps, s", _number(step_s)),
        ("tokens/s", _number(totals["tokens"] / step_s) if step_s else "-"),
        ("skipped steps", str(int(totals["skipped"]))),
        ("clipped steps", f"{int(totals['clipped'])} ({100 * totals['clipped'] / count:.1f} %)"),
        ("peak of host memory", format_bytes(last.host_peak_bytes)),
    ]
    if evaluations:
        best = min(evaluations, key=lambda one: math.inf if math.isnan(one["loss"]) else one["loss"])
        rows.append(("best evaluation, nats", f"{_number(best['loss'])} after step {best['step']}"))
    if last.gpu_peak_bytes:
        rows.append(("peak of GPU memory", format_bytes(last.gpu_peak_bytes)))
    if plan is not None:
        frozen = f", {plan.frozen_parameters:,} of them frozen" if plan.frozen_parameters else ""
        rows.insert(1, ("parameters", f"{plan.parameters:,}{frozen}"))
        if plan.bound is not None and step_s:
            resource, bound_s = plan.bound
            share = 100 * bound_s * count / step_s
            told = f"{share:.1f} %" if share <= 100 else "more than 100 %: the machine was measured slower"
            rows.append(("of the speed that is possible", f"{told} (set by {resource})"))
    return Grid(["", ""], [list(row) for row in rows], 1, "Summary")


def _tables(
    history: History, plan: PlanReport | None, evaluations: Sequence[Mapping[str, Any]]
) -> Iterator[Heading | Grid]:
    totals, step_s = history.totals, history.totals["step_s"] or math.nan
    yield Heading("Figures")
    yield _step_table(history.shown, "Some of the steps")
    if history.skipped:
        yield _step_table(history.skipped, "Skipped steps, the first 100; metrics.jsonl names their samples")
    if evaluations:
        yield _record_table(evaluations, "Evaluations")
    tiers = dict.fromkeys([*history.group("bytes_read"), *history.group("bytes_written")])
    rows = []
    for tier in tiers:
        read, written = totals[f"bytes_read.{tier}"], totals[f"bytes_written.{tier}"]
        uses = totals[f"cache_hits.{tier}"] + totals[f"cache_misses.{tier}"]
        hit_rate = f"{100 * totals[f'cache_hits.{tier}'] / uses:.1f} %" if uses else "-"
        rates = (_number(nbytes / step_s / 1e9) for nbytes in (read, written))
        rows.append([tier, format_bytes(int(read)), format_bytes(int(written)), *rates, hit_rate])
    if rows:
        columns = ["tier", "read", "written", "read GB/s", "written GB/s", "hit rate"]
        yield Grid(columns, rows, 1, "Traffic of the tiers")
    waits = [("computation", cause, f"stall_s.{cause}") for cause in history.group("stall_s")]
    waits += [("threads", cause, f"tier_wait_s.{cause}") for cause in history.group("tier_wait_s")]
    shown = [
        [who, cause, _number(totals[key]), f"{100 * totals[key] / step_s:.1f} %"] for who, cause, key in waits
    ]
    if shown:
        yield Grid(["who", "for what", "s", "of the time"], shown, 2, "Waits; threads wait side by side")
    if plan is not None:
        held = [
            [tier.tier, tier.holds, format_bytes(tier.used_bytes),
             "-" if tier.limit_bytes is None else format_bytes(tier.limit_bytes)]
            for tier in plan.tiers
        ]  # fmt: skip
        yield Grid(["tier", "holds", "bytes", "of"], held, 2, "Plan of the process that ran last")
        bounds = [[resource, _number(seconds)] for resource, seconds in plan.bound_s.items()]
        yield Grid(["resource", "s a step"], bounds, 1, "The least time that a step takes here, by resource")
        yield Grid(["plane", "dtype"], [list(pair) for pair in plan.dtypes.items()], 2, "Number formats")


def _step_table(records: Sequence[Mapping[str, Any]], caption: str) -> Grid:
    rows = [[_number(record.get(key)) for key in _COLUMNS] for record in records]
    return Grid(list(_COLUMNS.values()), rows, 0, caption)


def _record_table(records: Sequence[Mapping[str, Any]], caption: str) -> Grid:
    """Every number and text of records, whatever they are."""
    flat = [dict(flatten(record)) for record in records]
    keys = list(dict.fromkeys(key for record in flat for key in record))
    return Grid(keys, [[_number(record.get(key)) for key in keys] for record in flat], 0, caption)


def _pictures(run_dir: Path) -> Iterator[Picture]:
    """What the run has drawn itself."""
    named = (("tokens of each expert", "experts.png"), ("what happens in a step", "trace.png"))
    for title, name in named:
        if (run_dir / name).is_file():
            yield Picture(title, (run_dir / name).read_bytes())


def _texts(run_dir: Path) -> Iterator[Heading | Text | Grid]:
    if saved := checkpoints(run_dir / "checkpoints"):
        yield Heading("Checkpoints")
        yield Grid(["step", "name"], [[str(step), path.name] for step, path in saved], 2, "")
    if samples := _records(run_dir / "samples.jsonl"):
        yield Heading("Samples")
        for sample in samples[-_SAMPLES_SHOWN:]:
            yield Text("\n".join(f"{key}: {value}" for key, value in sample.items()))
    yield Heading("Configuration")
    yield Text((run_dir / "config.yaml").read_text())


def _plan(path: Path) -> PlanReport | None:
    """None: a run of an older version."""
    try:
        return PlanReport.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no plan of a run ({error}); move the file away") from error


def _records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of records; none where there is no file."""
    if not path.is_file():
        return []
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); move the file away") from error


def _least(history: History) -> float:
    """Least loss of a step."""
    losses = [loss for loss in history.bands["loss"].low if not math.isnan(loss)]
    return float(min(losses, default=math.nan))


def _number(value: Any) -> str:
    """Six digits that matter; what is not a number stays visible."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
