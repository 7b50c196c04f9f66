"""A run in a control group of the real kernel, whose limit stands on the group above it, with a state that
does not fit: an automatic budget that is too large ends in SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from support.children import in_a_child
from support.command import use_drive
from support.runs import dump, final_planes, make_run, records, train_file

from tierstream.io.mounts import read_mounts

MIB = 1 << 20
LIMIT_BYTES = 1000 * MIB
#: 61 M parameters: 740 MB of state.
SHAPE = {"hidden_size": 256, "intermediate_size": 20_000}
ENTRY = "import sys; from support.runs import train_file; train_file(sys.argv[1])"


@pytest.fixture
def group() -> Iterator[Path]:
    """An unlimited group in a limited one."""
    parent, limit = make_group()
    try:
        (parent / limit).write_text(str(LIMIT_BYTES))
        (parent / "run").mkdir()
        yield parent / "run"
    finally:
        with suppress(FileNotFoundError):
            (parent / "run").rmdir()
        parent.rmdir()


def make_group() -> tuple[Path, str]:
    """A new group that counts memory, and the name of its limit; or a skip."""
    for mount in read_mounts():
        top = Path(mount.point)
        if mount.filesystem == "cgroup" and "memory" in mount.super_options:
            limit = "memory.limit_in_bytes"
        elif mount.filesystem == "cgroup2" and "memory" in (top / "cgroup.subtree_control").read_text():
            limit = "memory.max"
        else:
            continue
        with suppress(OSError):
            (top / f"tierstream-test-{os.getpid()}").mkdir()
            return top / f"tierstream-test-{os.getpid()}", limit
    pytest.skip("making a control group for memory is not permitted here")


def run_in(group: Path, run_file: Path) -> None:
    """A run in a process that is born in the group, which is charged for all of it; it must end well."""
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", ENTRY]
    done = subprocess.run(
        [*command, str(run_file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_automatic_budget_keeps_below_the_limit_of_the_group_above(tmp_path: Path, group: Path) -> None:
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
