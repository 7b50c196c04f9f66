"""SIGTERM and SIGINT, at any place of a run: it ends soon and cleanly, with a checkpoint where it writes any,
and goes on to the same bits.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.children import FORKS
from support.command import nothing_is_locked, use_drive
from support.runs import (
    Unharmed,
    assert_ended_like,
    dump,
    make_run,
    records,
    train,
    unharmed_run,
)
from support.signalled import train_signalled

from tierstream.engine.checkpoint import checkpoints
from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import StepMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer

STEPS = 4
#: Most seconds from a signal to the end of a process whose steps take a tenth of one, on a busy machine.
SECONDS_MAX = 20.0


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return unharmed_run(tmp_path_factory.mktemp("unharmed"), STEPS)


def make(folder: Path) -> RunConfig:
    """With its state on a drive, and a checkpoint at its end."""
    config = make_run(folder, steps=STEPS)
    use_drive(config, folder / "state")
    return config


def send(config: RunConfig, place: str, call: int, *numbers: int) -> int:
    """The exit status of a run that gets signals there."""
    folder = Path(config.run_dir).parent
    told = folder / "told"
    arguments = str(dump(config, folder / "run.yaml")), place, call, list(numbers), str(told)
    process = FORKS.Process(target=train_signalled, args=arguments)
    process.start()
    process.join(120)
    seconds = time.time() - float(told.read_text())
    print(f"{place}: {seconds:.2f} s")
    assert seconds < SECONDS_MAX
    assert process.exitcode is not None
    return process.exitcode


def goes_on(config: RunConfig, unharmed: Unharmed) -> None:
    """`checkpoint.resume auto` ends where the unharmed run ended, to the bit."""
    config.checkpoint.resume = "auto"
    train(config)
    assert_ended_like(config, unharmed)


@pytest.mark.parametrize(
    ("place", "call", "number"),
    [
        ("forward", 4, signal.SIGTERM),
        ("backward", 3, signal.SIGINT),
        ("update", 2, signal.SIGTERM),
        ("checkpoint", 5, signal.SIGTERM),
    ],
)
def test_a_signal_in_training_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, unharmed: Unharmed, place: str, call: int, number: signal.Signals
) -> None:
    config = make(tmp_path)
    if place == "checkpoint":
        config.checkpoint.every_steps = 2
    assert send(config, place, call, number) == 128 + number
    result = json.loads(Path(config.run_dir, "result.json").read_text())
    last = result["last_step"]
    assert 1 <= last < STEPS
    assert result["stopped"] == number.name
    assert result["checkpoint"].endswith(f"step-{last:08d}")
    assert [m["step"] for m in records(config)] == [*range(1, last + 1)]
    assert checkpoints(Path(config.run_dir, "checkpoints"))[-1][0] == last
    nothing_is_locked(config)
    goes_on(config, unharmed)


@pytest.mark.parametrize(
    ("place", "call"), [("/data/", 9), ("weights", 2), ("tierstream-state", 20)]
)
def test_a_signal_while_it_is_set_up_ends_it_at_once(
    tmp_path: Path, unharmed: Unharmed, place: str, call: int
) -> None:
    """Nothing that it leaves keeps the next start from a new run, without `resume`."""
    config = make(tmp_path)
    number = signal.SIGTERM if call % 2 else signal.SIGINT
    assert send(config, place, call, number) == 128 + number
    assert not Path(config.run_dir, "result.json").exists()
    assert list(Path(config.run_dir, "checkpoints").iterdir()) == []
    nothing_is_locked(config)
    train(config)
    goes_on(config, unharmed)


@pytest.mark.parametrize("place", ["forward", "checkpoint"])
def test_a_second_signal_ends_it_where_it_is(
    tmp_path: Path, unharmed: Unharmed, place: str
) -> None:
    config = make(tmp_path)
    config.checkpoint.every_steps = 1
    call = 6 if place == "forward" else 30  # of the second checkpoint
    assert send(config, place, call, signal.SIGTERM, signal.SIGTERM) == -signal.SIGTERM
    nothing_is_locked(config)
    goes_on(config, unharmed)


def test_without_checkpoints_a_signal_ends_it_without_one(tmp_path: Path) -> None:
    config = make(tmp_path)
    config.checkpoint.at_end = False
    assert send(config, "backward", 3, signal.SIGTERM) == 128 + signal.SIGTERM
    assert checkpoints(Path(config.run_dir, "checkpoints")) == []
    assert json.loads(Path(config.run_dir, "result.json").read_text())["stopped"] == "SIGTERM"


def test_the_real_command_from_a_shell(tmp_path: Path) -> None:
    """SIGINT to the command while it computes."""
    config = make(tmp_path)
    config.train.steps = 100_000
    code = "import sys; from tierstream.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", str(dump(config, tmp_path / "run.yaml"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = Path(config.run_dir, "metrics.jsonl")
    deadline = time.time() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert err.strip() == "SIGINT: the run ends after this step; once more ends it at once"
    assert "SIGINT" in out
    newest = checkpoints(Path(config.run_dir, "checkpoints"))[-1][0]
    assert newest == records(config)[-1]["step"]


def test_as_a_library_no_handler_is_installed(tmp_path: Path) -> None:
    class Look(Callback):
        def on_step(self, metrics: StepMetrics) -> None:
            found.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))

    found: list[object] = []
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    config = make_run(tmp_path, steps=1)
    Trainer(config, [Look()]).run()
    assert found == [before]

