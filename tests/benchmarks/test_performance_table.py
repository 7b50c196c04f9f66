"""README's performance table: what the results in docs/measurements say, row by row."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "performance_table.py"
_spec = importlib.util.spec_from_file_location("performance_table", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
performance_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(performance_table)


COMMAND = "tierstream bench train --shape tiny --layers 2 4 --rows 4 --clip-norm 0.5 null --nvme-dirs a b"


def result(**changes: Any) -> dict[str, Any]:
    """Two cases, resident and a peer, at two depths."""
    runs = {
        "tiered, clip 0.5": 1500.0,
        "tiered, no clipping": 1600.0,
        "resident": 2000.0,
        "deepspeed-cpu": 500.0,
    }
    ours = [(run, layers) for layers in (2, 4) for run in list(runs)[:2]]
    named = [{"run": run, "layers": layers} for run, layers in ours]
    bound = {"time_over_bound": 1.234, "bound_resource": "update"}
    held = {"state_bytes": 8 << 30, "dram_bytes": 2 << 30, "gpu_peak_bytes": 3 << 30}
    plain = {
        "publish": {"commit": "abcdef0"},
        "date": "2026-11-30T21:11:19+00:00",
        "command": shlex.split(COMMAND),
        "machine": {"cpu": "Some CPU", "cores": "8 usable of 16"},
        "measurements": [
            {"run": run, "layers": layers, "median": rate / layers}
            for layers in (2, 4)
            for run, rate in runs.items()
        ],
        "details": {"speed": [row | bound for row in named], "memory": [row | held for row in named]},
    }
    return plain | changes


def test_rows_say_what_the_result_does() -> None:
    first, second, *deeper = performance_table.rows(result())
    assert first == [
        "tiny, 2 layers", "4,096", "8.00 GiB on disk, 2.00 GiB of DRAM", "clip 0.5",
        "plain, deterministic", "750", "0.75",
        "1.23 (update)", "3.00 GiB", "deepspeed-cpu 250", "Some CPU, 8 cores, 2026-11-30, abcdef0",
    ]  # fmt: skip
    assert second[3:7] == ["no clipping", "plain, deterministic", "800", "0.80"]
    assert [row[5] for row in deeper] == ["375", "400"]


def test_clipping_is_the_command_lines_where_the_case_does_not_say_it() -> None:
    for values, said in (([], "clip 1"), (["--clip-norm", "null"], "no clipping")):
        plain = result(command=["tierstream", "bench", "train", *values])
        for rows in (plain["measurements"], *plain["details"].values()):
            rows[:] = [{**row, "run": "tiered", "layers": 2} for row in rows[:1]]
        (row,) = performance_table.rows(plain)
        assert (row[0], row[3], row[6], row[9]) == ("tiny", said, "", "")
        assert "of resident" not in performance_table.table([plain])


def test_only_published_results_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"kind": "train"}')
    (tmp_path / "b.json").write_text('{"kind": "train", "publish": {"commit": "abc"}}')
    assert performance_table.published(tmp_path) == [{"kind": "train", "publish": {"commit": "abc"}}]


def test_the_table_stands_between_the_comments() -> None:
    begin, end = performance_table.BEGIN, performance_table.END
    assert (
        performance_table.with_table(f"a\n{begin}\nold\n{end}\nb\n", "new\n")
        == f"a\n{begin}\nnew\n{end}\nb\n"
    )
    for readme in ("a\n", f"{begin}\n", f"{end}\n"):
        with pytest.raises(SystemExit, match="has no place for the table"):
            performance_table.with_table(readme, "new\n")


def test_readme_has_the_table_of_the_published_results() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
