"""Writes README's performance table from the published results in docs/measurements.

    python benchmarks/performance_table.py [--check]

A result of `tierstream bench train` is published when its JSON has the key "publish", as
docs/measurements/README.md says. With --check nothing is written, and the exit status is 1 if the table is
not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstream.io.sizes import format_bytes

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
#: Of `tierstream bench train`, where its command line does not say it.
_DEFAULTS = {"--shape": ["tiny"], "--rows": ["8"], "--seq-len": ["1024"], "--clip-norm": ["1.0"]}
COLUMNS = (
    "shape", "tokens a step", "state", "clipping", "kernels", "tokens/s", "of resident", "time / bound",
    "GPU peak", "others, tokens/s", "measured",
)  # fmt: skip


def published(directory: Path) -> list[dict[str, Any]]:
    """The published results, by name of their files."""
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    return [result for result in results if "publish" in result]


def options(command: list[str]) -> dict[str, list[str]]:
    """Option -> its values."""
    found: dict[str, list[str]] = dict(_DEFAULTS)
    name = ""
    for word in command:
        if word.startswith("--"):
            name, found[word] = word, []
        elif name:
            found[name].append(word)
    return found


def rows(result: dict[str, Any]) -> Iterator[list[str]]:
    """One row per case that trains from the tiers."""
    given, machine, publish = options(result["command"]), result["machine"], result["publish"]
    speeds = {(row["run"], row["layers"]): row for row in result["details"]["speed"]}
    memory = {(row["run"], row["layers"]): row for row in result["details"]["memory"]}
    cores = machine["cores"].partition(" ")[0]
    where = f"{machine.get('gpu', machine['cpu']).removeprefix('1 x ')}, {cores} cores"
    for entry in result["measurements"]:
        key, (kind, *parts) = (entry["run"], entry["layers"]), entry["run"].split(", ")
        if kind != "tiered":
            continue
        speed, held = speeds[key], memory[key]
        clipping = next((part for part in parts if "clip" in part), _clipping(given["--clip-norm"][0]))
        beside = {
            other["run"]: other["median"]
            for other in result["measurements"]
            if other["layers"] == entry["layers"] and other["run"].split(", ")[0] != kind
        }
        resident = beside.pop("resident", None)
        shape = given["--shape"][0] + (f", {entry['layers']} layers" if "--layers" in given else "")
        kernels = given.get("--kernels", ["plain"]) + [part for part in parts if "clip" not in part]
        if given.get("--deterministic", ["true"]) == ["true"]:
            kernels.append("deterministic")
        yield [
            shape,
            f"{int(given['--rows'][0]) * int(given['--seq-len'][0]):,}",
            _state(held, on_drives="--nvme-dirs" in given),
            clipping,
            ", ".join(kernels),
            f"{entry['median']:,.0f}",
            "" if resident is None else f"{entry['median'] / resident:.2f}",
            f"{speed['time_over_bound']:.2f} ({speed['bound_resource']})",
            "" if held["gpu_peak_bytes"] is None else format_bytes(held["gpu_peak_bytes"]),
            ", ".join(f"{name} {rate:,.0f}" for name, rate in beside.items()),
            f"{where}, {result['date'][:10]}, {publish['commit']}",
        ]


def table(results: list[dict[str, Any]]) -> str:
    """The Markdown between the two comments; columns without any value are left out."""
    cells = [row for result in results for row in rows(result)]
    shown = [column for column in range(len(COLUMNS)) if any(row[column] for row in cells)]
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *cells]
    return "".join(f"| {' | '.join(line[column] or '-' for column in shown)} |\n" for line in lines)


def with_table(readme: str, made: str) -> str:
    """README with this table in the place of the one it has."""
    before, begin, rest = readme.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no place for the table: it needs the lines {BEGIN} and {END}")
    return before + begin + made + end + after


def _state(held: dict[str, Any], *, on_drives: bool) -> str:
    state, dram = format_bytes(held["state_bytes"]), format_bytes(held["dram_bytes"])
    return f"{state} on disk, {dram} of DRAM" if on_drives else f"{state} in DRAM"


def _clipping(value: str) -> str:
    return "no clipping" if value == "null" else f"clip {float(value):g}"


def main() -> int:
    parser = argparse.ArgumentParser(description="README's performance table, from docs/measurements.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if README.md is not right"
    )
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text()
    made = with_table(readme, table(published(ROOT / "docs" / "measurements")))
    if args.check:
        if made != readme:
            print("README.md's table is old: run python benchmarks/performance_table.py", file=sys.stderr)
        return int(made != readme)
    path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
