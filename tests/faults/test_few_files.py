"""Few open files allowed: a run of hundreds of pages and its export of hundreds of shards do without more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import use_drive
from support.exports import stored
from support.models import different
from support.runs import dump, final_planes, make_run

from tierstream.engine.config import RunConfig

COMMANDS = """
import resource, sys
if sys.argv[1] != "0":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from tierstream.engine import export
from tierstream.tools import cli
config, run_dir, out = sys.argv[2:]
statuses = [cli.main(["train", config]), cli.main(["verify", run_dir + "/checkpoints/step-00000002"])]
statuses += [cli.main(["export", run_dir, out, "--max_shard", "1"])]
print(statuses)
assert statuses == [0, 0, 0]
"""


def run(folder: Path, limit: int) -> RunConfig:
    """Train, check and export in a process that may open so many files (0: as many as it likes)."""
    config = make_run(folder, steps=2, num_hidden_layers=20)
    use_drive(config, folder / "state")
    command = [sys.executable, "-c", COMMANDS, str(limit), str(dump(config, folder / "run.yaml"))]
    done = subprocess.run(
        [*command, config.run_dir, str(folder / "out")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return config


@pytest.mark.slow
def test_a_run_and_its_export_with_64_file_handles(tmp_path: Path) -> None:
    """C87: results equal to those without the limit."""
    limited, free = run(tmp_path / "limited", 64), run(tmp_path / "free", 0)
    chunks = list((tmp_path / "limited" / "state").glob("*/*/*/c/*"))
    assert len(chunks) > 200
    ours, theirs = final_planes(limited), final_planes(free)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key].tobytes() != theirs[key].tobytes()] == []
    assert len(list((tmp_path / "limited" / "out").glob("*.safetensors"))) > 200
    assert different(stored(tmp_path / "limited" / "out"), stored(tmp_path / "free" / "out")) == []
