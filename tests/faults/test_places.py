"""C63: temporary files lie beside their target, wherever that is, and nothing is left elsewhere."""

from __future__ import annotations

import gc
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import Command
from support.drive_kinds import small_ext4
from support.runs import make_run

from tierstream.engine.checkpoint import checkpoints
from tierstream.tiered.snapshot import Snapshot


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    """`source` seen at `target` as well; skips where mounting is not permitted."""
    if subprocess.run(["mount", "--bind", str(source), str(target)], capture_output=True).returncode:
        pytest.skip("bind mounts are not permitted here")
    try:
        yield
    finally:
        gc.collect()  # tokens stay mapped into memory for as long as the run's objects live
        subprocess.run(["umount", str(target)], check=True)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="tierstream-", dir="/dev/shm") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@pytest.mark.parametrize("how", ["link", "bound run", "bound checkpoints"])
def test_checkpoints_on_another_drive_than_temporary_files(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """The run directory is a link to another drive, or it or its checkpoints are bind-mounted from there."""
    command = Command(capsys, tmp_path)
    config = make_run(tmp_path, steps=2)
    config.checkpoint.every_steps = 1
    run_dir = Path(config.run_dir)
    with small_ext4(tmp_path, 24 << 20) as drive:
        place = drive / "place"
        place.mkdir()
        target = run_dir / "checkpoints" if how == "bound checkpoints" else run_dir
        if how == "link":
            run_dir.symlink_to(place)
            assert command.train(config)[::2] == (0, "")
        else:
            target.mkdir(parents=True)
            with bound(place, target):
                assert command.train(config)[::2] == (0, "")
        found = checkpoints(place if how == "bound checkpoints" else place / "checkpoints")
        assert [step for step, _ in found] == [1, 2]
        for _, path in found:
            Snapshot.open(path).verify()
        gc.collect()
        assert [path for path in temporary.rglob("*") if path.is_file()] == []
        assert {path.name for path in tmp_path.iterdir()} == {
            "corpus.txt", "corpus-2.txt", "model", "machine.json", "run", "run.yaml", "drive", "drive.img",
        }  # fmt: skip
