"""`tierstream inspect RUN_OR_CHECKPOINT`"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tierstream.engine.checkpoint import checkpoints
from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import load
from tierstream.engine.config_tree import REQUIRED, convert, flatten, leaves, to_plain
from tierstream.engine.metrics import read_metrics
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import PlaneSpec
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools.checkpoints import find_complete_checkpoint
from tierstream.tools.options import NoOptions, parse_options, shown, take_positionals
from tierstream.tools.tables import count, open_console, table

_DESCRIPTION = """\
Show what a run or a checkpoint holds.
- A checkpoint: step, planes, bytes, number formats, and the settings that are
  not the defaults.
- A run: how far it has come, its checkpoints, and the newest of them in full.
"""


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    names, options = take_positionals(args, ["RUN_OR_CHECKPOINT"], "tierstream inspect")
    parse_options(NoOptions, options, prog="tierstream inspect RUN_OR_CHECKPOINT", description=_DESCRIPTION)
    console, path = open_console(sys.stdout), Path(names[0])
    is_run = (path / "config.yaml").is_file()
    if is_run:
        _print_run(console, path)
    if not is_run or checkpoints(path / "checkpoints"):
        newest = find_complete_checkpoint(path)
        snapshot = Snapshot.open(newest)
        _print_checkpoint(console, newest, snapshot)
        _print_settings(console, snapshot.state["settings"], path / "config.yaml" if is_run else None)
    return 0


def _print_run(console: Console, path: Path) -> None:
    metrics_path = path / "metrics.jsonl"
    steps = read_metrics(metrics_path) if metrics_path.is_file() else []
    console.print(f"run {path}", soft_wrap=True)
    if steps:
        last = steps[-1]
        skipped = f", {last.skipped_total} skipped" if last.skipped_total else ""
        console.print(f"step {last.step}{skipped}: loss {last.loss:.4f}, {count(last.tokens_per_s)} tok/s")
    else:
        console.print("no step yet")
    found = [str(step) for step, _ in checkpoints(path / "checkpoints")]
    console.print(f"checkpoints of steps {', '.join(found)}" if found else "no checkpoint yet")


def _print_checkpoint(console: Console, path: Path, snapshot: Snapshot) -> None:
    state = snapshot.state
    console.print(f"\ncheckpoint {path}", soft_wrap=True)
    console.print(
        f"step {state['step']}, {state['applied_updates']} updates, {state['skipped_total']} skipped steps"
    )
    kinds: dict[tuple[str, str], list[PlaneSpec]] = {}
    for spec in snapshot.planes.values():
        kinds.setdefault((spec.plane, spec.dtype), []).append(spec)
    rows = [
        (plane, dtype, str(len(specs)), format_bytes(sum(spec.nbytes for spec in specs)))
        for (plane, dtype), specs in kinds.items()
    ]
    console.print(table("Planes", ("plane", "dtype", "units", "bytes"), rows, text_columns=2))
    changing = {unit for unit, plane in snapshot.planes if plane != "weight"}
    weights = [spec for spec in snapshot.planes.values() if spec.plane == "weight"]
    parameters, trained = _parameters(weights), _parameters(spec for spec in weights if spec.unit in changing)
    some = f" ({count(trained)} trained)" if trained < parameters else ""
    nbytes = format_bytes(snapshot.layout.nbytes(durable=True))
    page = format_bytes(snapshot.layout.page_bytes)
    family = state["settings"]["architecture"]["model_type"]
    console.print(f"{family}, {count(parameters)} parameters{some}, {nbytes} in pages of {page}")


def _parameters(planes: Iterable[PlaneSpec]) -> int:
    """Elements, without padding."""
    return sum(tensor.numel for spec in planes for tensor in spec.tensors)


def _print_settings(console: Console, saved: Mapping[str, Any], config_path: Path | None) -> None:
    """The checkpoint's settings that are not the defaults, and those that `config.yaml` has by now."""
    sections = {key: value for key, value in saved.items() if key != "architecture"}
    settings = dict(_normalised(flatten(sections)))
    defaults = {key: leaf.default for key, leaf in leaves(RunConfig).items()}
    console.print("\nsettings that are not the defaults:")
    for key, value in settings.items():
        default = defaults.get(key, REQUIRED)
        if default != value:
            note = "" if default is REQUIRED else f"  (default {shown(default)})"
            console.print(f"  {key}: {shown(value)}{note}", soft_wrap=True)
    if config_path is None:
        return
    now = dict(_normalised(flatten(to_plain(load(RunConfig, config_path)))))
    changed = [key for key in now if settings.get(key, now[key]) != now[key]]
    if changed:
        console.print("\nchanged since, in config.yaml:")
    for key in changed:
        console.print(f"  {key}: {shown(settings[key])} -> {shown(now[key])}", soft_wrap=True)


def _normalised(settings: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    """Settings as the configuration holds them (sizes as `ByteSize`); what this version does not know stays
    as it is."""
    known = leaves(RunConfig)
    for key, value in settings:
        try:
            yield key, convert(value, known[key].hint)
        except (KeyError, ValueError):
            yield key, value
