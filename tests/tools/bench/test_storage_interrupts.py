"""`tierstream bench storage` stopped at several moments: nothing stays on the drive, no fio goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.storage_bench import TINY, StorageBench, rows, unexpected

#: Moment -> code that prints "running" when it has come; what follows takes longer than any test.
MOMENTS = {
    "files are written": """
from tierstream.io import scratch
fill = scratch.fill
def slowly(*args):
    print("running", flush=True)
    while True:
        fill(*args)
scratch.fill = slowly
""",
    "the grid": """
from tierstream.io.drive_rates import DriveTarget
run = DriveTarget.run
def running(self, *args):
    print("running", flush=True)
    return run(self, *args)
DriveTarget.run = running
""",
    "a pass over the store": """
from tierstream.engine.measure.streaming import StreamedStore
run = StreamedStore._run
def running(self, *args):
    print("running", flush=True)
    while True:
        run(self, *args)
StreamedStore._run = running
""",
    "fio": """
from tierstream.tools.bench import fio
run_fio, runs = fio.run_fio, []
def running(program, engine, paths, options):
    runs.append(1)
    if len(runs) > 1:
        options = options | {"io_size": 1 << 50}
        print("running", flush=True)
    return run_fio(program, engine, paths, options)
fio.run_fio = running
""",
}
LAUNCH = "\nimport sys\nfrom tierstream.tools.cli import main\nsys.exit(main())\n"


@contextmanager
def stopped_at(moment: str, drive: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process and a group of its own, at this moment."""
    if moment == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    compared = ["--compare", "fio"] if moment == "fio" else []
    rounds = ["--rounds", "1000000"] if moment == "the grid" else []
    command = [sys.executable, "-c", MOMENTS[moment] + LAUNCH, "bench", "storage", str(drive)]
    with subprocess.Popen(
        [*command, *TINY, *compared, *rounds, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(drive.parent / "tmp")},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def descendants(session: int) -> list[str]:
    """Commands of the processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # After the command in parentheses: state, parent, process group, session.
                name, _, fields = entry.joinpath("stat").read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, its_session = fields.split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(name.partition("(")[2])
    return found


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    for name in ("drive", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path / "drive"


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        ("files are written", signal.SIGINT),
        ("the grid", signal.SIGINT),
        ("the grid", signal.SIGTERM),
        ("the grid", signal.SIGHUP),
        ("a pass over the store", signal.SIGINT),
        ("fio", signal.SIGTERM),
    ],
)
def test_an_interrupt_leaves_nothing(drive: Path, moment: str, signum: signal.Signals) -> None:
    """Every signal at one moment: all of them become the same exception."""
    with stopped_at(moment, drive) as process:
        assert os.listdir(drive) != []
        if moment == "fio":
            assert "fio" in descendants(process.pid)
        process.send_signal(signum)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, unexpected(err)) == (130, ["tierstream: interrupted"])
        assert descendants(process.pid) == []
    assert os.listdir(drive) == []
    assert os.listdir(drive.parent / "tmp") == []


def test_a_ctrl_c_that_fio_gets_too_leaves_nothing(drive: Path) -> None:
    """A terminal sends it to the whole group."""
    with stopped_at("fio", drive) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, unexpected(err)) == (130, ["tierstream: interrupted"])
        assert descendants(process.pid) == []
    assert os.listdir(drive) == []


@pytest.mark.parametrize("moment", ["files are written", "the grid"])
def test_what_a_killed_run_left_goes_with_the_next(
    drive: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (drive / "precious").write_text("not ours")
    with stopped_at(moment, drive) as process:
        process.kill()
        process.communicate(timeout=30)
    assert len(os.listdir(drive)) == 2
    assert rows(StorageBench(capsys).measured(drive, *TINY), "best")
    assert os.listdir(drive) == ["precious"]
