"""The benchmark of tokenising tells the truth about a small file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tokenise.py"


def test_every_line_is_a_row_once_within_a_gibibyte(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--lines", "2000", "--folder", str(tmp_path)]
    facts = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    assert (facts["rows"], facts["each_once"], facts["masked"]) == (2_000, True, True)
    assert facts["pss_bytes"] < 1 << 30
    assert list(tmp_path.iterdir()) == []
