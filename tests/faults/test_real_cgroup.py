"""Runs in a control group of the real kernel, whose limit stands on the group above it, with a state that
does not fit: what takes too much memory ends in SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from support.children import in_a_child
from support.command import use_drive
from support.runs import dump, final_planes, make_run, records, train_file

from tierstream.engine.byte_size import ByteSize
from tierstream.io.mounts import read_mounts

MIB = 1 << 20
LIMIT_BYTES = 1000 * MIB
#: 61 M parameters: 740 MB of state.
SHAPE = {"hidden_size": 256, "intermediate_size": 20_000}
ENTRY = "import sys; from support.runs import train_file; train_file(sys.argv[1])"


@dataclass(frozen=True)
class Group:
    """An unlimited group in one that can be limited, for those who are born in it."""

    parent: Path
    v2: bool

    @property
    def path(self) -> Path:
        return self.parent / "run"

    def limit(self, nbytes: int) -> None:
        (self.parent / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(str(nbytes))

    def peak_bytes(self) -> int:
        """The most that was charged to it."""
        return int((self.path / ("memory.peak" if self.v2 else "memory.max_usage_in_bytes")).read_text())


@pytest.fixture
def group() -> Iterator[Group]:
    made = make_group()
    try:
        made.path.mkdir()
        yield made
    finally:
        with suppress(FileNotFoundError):
            made.path.rmdir()
        made.parent.rmdir()


def make_group() -> Group:
    """One that counts memory; or a skip."""
    for mount in read_mounts():
        top = Path(mount.point)
        v2 = mount.filesystem == "cgroup2" and "memory" in (top / "cgroup.subtree_control").read_text()
        if v2 or (mount.filesystem == "cgroup" and "memory" in mount.super_options):
            with suppress(OSError):
                (top / f"tierstream-test-{os.getpid()}").mkdir()
                return Group(top / f"tierstream-test-{os.getpid()}", v2)
    pytest.skip("making a control group for memory is not permitted here")


def run_in(group: Group, run_file: Path) -> None:
    """A run in a process that is born in the group, which is charged for all of it; it must end well."""
    join = f'echo $$ > {group.path}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", join, "sh", sys.executable, "-c", ENTRY, str(run_file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_automatic_budget_keeps_below_the_limit_of_the_group_above(tmp_path: Path, group: Group) -> None:
    group.limit(LIMIT_BYTES)
    planes, peaks = [], []
    for name, run in (("limited", partial(run_in, group)), ("free", partial(in_a_child, train_file))):
        config = make_run(tmp_path / name, steps=2, **SHAPE)
        use_drive(config, tmp_path / name / "state")
        config.tiers.page, config.tiers.dram = None, None
        run(dump(config, tmp_path / f"{name}.yaml"))
        planes.append(final_planes(config))
        peaks.append(records(config)[-1]["host_peak_bytes"])
        shutil.rmtree(tmp_path / name / "state")
    # A group is not charged for libraries that others have loaded too, so the process may be larger than it.
    assert peaks[0] + 256 * MIB < peaks[1] > LIMIT_BYTES, peaks
    limited, free = planes
    assert limited.keys() == free.keys()
    for key, values in limited.items():
        assert (values == free[key]).all(), key


@pytest.mark.slow
def test_a_resume_needs_no_more_memory_than_the_run_before_it(tmp_path: Path, group: Group) -> None:
    """C59: the limit is what the run took from its start, and 5 %; the state does not fit beside that."""
    config = make_run(tmp_path, steps=2, hidden_size=256, intermediate_size=8000)
    use_drive(config, tmp_path / "state")
    config.tiers.page, config.tiers.dram = None, ByteSize(64 * MIB)
    config.optimizer.schedule = "constant"
    run_in(group, dump(config, tmp_path / "run.yaml"))
    (checkpoint,) = (Path(config.run_dir) / "checkpoints").iterdir()
    state_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert state_bytes > 200 * MIB
    group.limit(group.peak_bytes() * 105 // 100)
    config.checkpoint.resume, config.train.steps = "auto", 3
    run_in(group, dump(config, tmp_path / "run.yaml"))
    first, second, resumed = (record["host_peak_bytes"] for record in records(config))
    assert resumed <= second * 105 // 100, (first, second, resumed)
