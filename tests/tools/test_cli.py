"""The command as users meet it: statuses and messages; no traceback for what a user can cause."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tierstream.io.errors import BudgetError, InvariantError, StorageError, TrainingStopped
from tierstream.tools import cli

COMMAND = "import sys; from tierstream.tools.cli import main; sys.exit(main())"


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


def run_process(*args: str, cwd: Path | None = None, code: str = COMMAND) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=cwd, timeout=60
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command in this process."""

    def run_here(*args: str) -> Outcome:
        try:
            status = cli.main(args)
        except SystemExit as end:  # --help
            status = int(end.code or 0)
        return Outcome(status, *capsys.readouterr())

    return run_here


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `tierstream verify` raise."""

    def install(error: BaseException) -> None:
        def fail(args: Sequence[str]) -> int:
            raise error

        monkeypatch.setitem(sys.modules, "tierstream.tools.verify", SimpleNamespace(main=fail))  # type: ignore[arg-type]

    return install


def test_help_lists_the_commands(run: Callable[..., Outcome]) -> None:
    for option in ("--help", "-h"):
        outcome = run(option)
        assert (outcome.status, outcome.err) == (0, "")
        for name in cli.COMMANDS:
            assert f"\n  {name} " in outcome.out
        assert max(map(len, outcome.out.splitlines())) <= 80


def test_no_command_is_told_how(run: Callable[..., Outcome]) -> None:
    outcome = run()
    assert outcome.status == 2
    assert outcome.out.startswith("usage: tierstream COMMAND")


def test_version(run: Callable[..., Outcome]) -> None:
    from tierstream import __version__

    assert run("--version") == (0, f"tierstream {__version__}\n", "")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(run: Callable[..., Outcome], command: str) -> None:
    outcome = run(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"usage: tierstream {command} ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "unknown command trian; did you mean train?"),
        (["zzz"], f"unknown command zzz; the commands are {', '.join(cli.COMMANDS)}"),
        (["train"], "RUN.yaml is missing; usage: tierstream train RUN.yaml [options]"),
        (["train", "--model.path", "x"], "RUN.yaml is missing; usage: tierstream train RUN.yaml [options]"),
        (["train", "absent.yaml"], "absent.yaml: cannot be read: No such file or directory; name a run file"),
        (["verify"], "RUN_OR_CHECKPOINT is missing; usage: tierstream verify RUN_OR_CHECKPOINT [options]"),
        (["verify", "absent"], "absent is not a directory"),
        (["verify", "absent", "--forse"], "unknown option --forse; `tierstream verify RUN_OR_CHECKPOINT "
         "--help` lists the known ones"),
        (["inspect", "absent"], "absent is not a directory"),
        (["inspect", "absent", "more"], "unexpected argument 'more'; options are written --key value"),
    ],
)  # fmt: skip
def test_mistakes_get_one_message_and_status_2(
    run: Callable[..., Outcome], args: list[str], message: str
) -> None:
    assert run(*args) == (2, "", f"tierstream: error: {message}\n")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BudgetError("tiers.dram is 1 GiB"), 2, "tiers.dram is 1 GiB"),
        (TrainingStopped("5 steps were skipped"), 3, "5 steps were skipped"),
        (StorageError("reading", "/x", OSError(5, "")), 2, "reading /x failed: Input/output error (errno 5)"),
        (
            FileNotFoundError(2, "No such file or directory", "/data/x"),
            2,
            "/data/x: No such file or directory",
        ),
    ],
)
def test_errors_become_a_message_and_a_status(
    run: Callable[..., Outcome],
    broken: Callable[[BaseException], None],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    broken(error)
    outcome = run("verify", "x")
    assert (outcome.status, outcome.out) == (status, "")
    assert outcome.err.startswith(f"tierstream: error: {message}")
    assert "Traceback" not in outcome.err


def test_an_interrupt_is_one_line(
    run: Callable[..., Outcome], broken: Callable[[BaseException], None]
) -> None:
    broken(KeyboardInterrupt())
    assert run("verify", "x") == (130, "", "tierstream: interrupted\n")


@pytest.mark.parametrize("error", [InvariantError("two writers"), OSError(5, "no file named"), KeyError("x")])
def test_a_bug_shows_its_traceback(
    run: Callable[..., Outcome], broken: Callable[[BaseException], None], error: BaseException
) -> None:
    broken(error)
    outcome = run("verify", "x")
    assert outcome.status == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert type(error).__name__ in outcome.err
    assert outcome.err.endswith(
        "tierstream: this is a bug in tierstream; please report it with the traceback above\n"
    )


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from tierstream.tools.cli import COMMANDS, main\n"
        "for command in ('', *COMMANDS):\n"
        "    try:\n"
        "        main([*command.split(), '--help'])\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    outcome = run_process(code=code)
    assert (outcome.status, outcome.err) == (0, "")


def test_the_process_exits_with_the_status(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_dir: x\nmodle: {path: y}\n")
    outcome = run_process("train", "run.yaml", cwd=tmp_path)
    assert outcome == (2, "", "tierstream: error: run.yaml:2: unknown key modle; did you mean model?\n")


def test_a_reader_that_goes_away_is_no_bug() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_help_on_an_ascii_terminal() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "train", "--help"], capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()


def test_a_full_drive_under_the_output_is_said() -> None:
    entry = "import sys; from tierstream.tools.cli import main; sys.exit(main(['--help']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", entry], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "writing the output failed: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_plan_ends_with_all_that_was_to_be_done_and_no_more(command: str, status: int) -> None:
    """What it made is not taken apart, and what others do at the end is done."""
    code = (
        "import atexit, sys, threading, time\n"
        "from tierstream.tools import cli\n"
        "class Made:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "made = Made()\n"
        "def late():\n"
        "    time.sleep(0.2)\n"
        "    print('by a thread')\n"
        "def dispatch(args):\n"
        "    atexit.register(print, 'at the end')\n"
        "    threading.Thread(target=late).start()\n"
        "    print('x' * 100_000)\n"
        f"    return {status}\n"
        "cli._dispatch = dispatch\n"
        "sys.exit(cli.main())\n"
    )
    outcome = run_process(command, code=code)
    assert (outcome.status, outcome.err) == (status, "")
    said = ["x" * 100_000, "by a thread", "at the end", *(["taken apart"] if command != "plan" else [])]
    assert outcome.out.splitlines() == said


def test_what_a_plan_cannot_write_is_said() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "plan", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert "writing the output failed: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
