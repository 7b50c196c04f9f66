"""Few open files allowed: a run of hundreds of pages and its export of hundreds of shards do without more."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.children import in_a_child, with_few_files
from support.command import told, use_drive
from support.exports import stored
from support.models import different
from support.runs import dump, final_planes, make_run

from tierstream.engine.config import RunConfig


def commands(folder: Path) -> tuple[RunConfig, list[list[str]]]:
    """A run with its state on a drive, and how to train, check and export it to `folder/out`."""
    config = make_run(folder, steps=2, num_hidden_layers=20)
    use_drive(config, folder / "state")
    return config, [
        ["train", str(dump(config, folder / "run.yaml"))],
        ["verify", f"{config.run_dir}/checkpoints/step-00000002"],
        ["export", config.run_dir, str(folder / "out"), "--max_shard", "1"],
    ]


@pytest.mark.slow
def test_a_run_and_its_export_with_64_file_handles(tmp_path: Path) -> None:
    """C87: results equal to those without the limit."""
    limited, steps = commands(tmp_path / "limited")
    assert [in_a_child(with_few_files, 64, told, args) for args in steps] == [(0, "")] * 3
    free, steps = commands(tmp_path / "free")
    assert [told(args) for args in steps] == [(0, "")] * 3
    chunks = list((tmp_path / "limited" / "state").glob("*/*/*/c/*"))
    assert len(chunks) > 200
    ours, theirs = final_planes(limited), final_planes(free)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key].tobytes() != theirs[key].tobytes()] == []
    assert len(list((tmp_path / "limited" / "out").glob("*.safetensors"))) > 200
    assert different(stored(tmp_path / "limited" / "out"), stored(tmp_path / "free" / "out")) == []
