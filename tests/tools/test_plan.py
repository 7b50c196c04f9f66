"""`tierstream plan` from the configuration alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import Command
from support.png import size_of
from support.runs import make_run

from tierstream.engine.config_file import dump
from tierstream.engine.planner.outlook import Outlook
from tierstream.engine.planner.what_if import changed


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run whose data and drive are not here."""
    config = changed(
        make_run(tmp_path / "project"),
        {"data.files": ["/nowhere/*.txt"], "tiers.nvme_dirs": ["/mnt/nvme0"], "train.device": "cuda",
         "tiers.profile": None},
    )  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(dump(config))
    return path


def test_a_plan_is_told_and_nothing_is_left_behind(command: Command, run_file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    status, out, err = command.run(
        "plan", str(run_file), "--machine", "workstation", "--price", "2.5", "--what-if", "drives=2",
        "--picture", str(tmp_path / "plan.png"),
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert out.startswith("Fits on 16 cores, ")
    for said in (
        "datasheet figures", "exp_avg_sq", "GPU peak about", "disk: ", "upload", "A step takes about",
        "no step is faster than", "the device waits for", "+1 GiB of DRAM", "twice the tokens per step",
        "+1 drive", "a billion tokens take", " and cost ", "the 8 steps of this run",
    ):  # fmt: skip
        assert said in out
    size_of((tmp_path / "plan.png").read_bytes())
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "plan.png"])


def test_everything_is_there_as_json(command: Command, run_file: Path, tmp_path: Path) -> None:
    options = ("plan", str(run_file), "--machine", "workstation", "--json")
    status, out, _ = command.run(*options, "-")
    assert status == 0
    plain = json.loads(out)
    assert plain.keys() == {field.name for field in dataclasses.fields(Outlook)} | {"chosen"}
    assert plain["chosen"] == {}
    assert plain["cost_per_billion_tokens"] is None
    assert plain["bound_s"].keys() == {"compute", "upload", "update", "update + backward", "nvme"}
    assert command.run(*options, str(tmp_path / "plan.json"))[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == plain


#: Modules of a plan that knows its model (525 with Python 3.11; torch alone has a thousand), and those that
#: it must not have.
MODULES_MAX = 700
HEAVY = {
    "torch", "transformers", "scipy", "sympy", "pyarrow", "tokenizers", "safetensors", "matplotlib", "PIL",
}  # fmt: skip


def test_a_second_plan_imports_little(run_file: Path, tmp_path: Path) -> None:
    """To import torch and transformers takes longer than to plan."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = (
        "import sys\n"
        "from tierstream.tools.cli import main\n"
        f"status = main(['plan', {str(run_file)!r}, '--machine', 'workstation'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)
    )
    assert first.stdout == second.stdout
    assert {"torch", "transformers"} <= set(first.stderr.split())
    modules = second.stderr.split()
    assert HEAVY.intersection(modules) == set()
    assert len(modules) <= MODULES_MAX


def test_what_a_run_leaves_open_is_chosen(command: Command, run_file: Path, tmp_path: Path) -> None:
    """What was chosen, put into the run, is planned like that."""
    options = ("plan", str(run_file), "--machine", "workstation", "--json", str(tmp_path / "plan.json"))
    status, out, _ = command.run(*options, "--choose", "true")
    assert status == 0
    assert out.startswith("Chosen: optimizer.placement ")
    plain = json.loads((tmp_path / "plan.json").read_text())
    chosen = plain.pop("chosen")
    assert "tiers.resident" in chosen
    given = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    assert command.run(*options, *given)[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == plain | {"chosen": {}}


def test_what_cannot_be_planned_is_refused(command: Command, run_file: Path) -> None:
    options = ("plan", str(run_file), "--machine")
    command.refused(*options, "workstatoin", said=["did you mean workstation?"])
    command.refused(
        *options, "workstation", "--what-if", "ram=1", said=["the keys are dram, gpu, drives, cores"]
    )
    for change, said in (
        ("cores=1.5", "cores is a whole number >= 1"),
        ("cores=0", "cores must be >= 1"),
        ("drives=two", "drives is a whole number >= 0"),
        ("dram=0", "dram must be >= 1"),
    ):
        command.refused(*options, "workstation", "--what-if", change, said=[f"--what-if {change}: {said}"])
    command.refused(*options, "workstation", "--picture", "plan.jpg", said=["must end in .png"])
    command.refused(*options, "workstation", "--price", "-1", said=["--price is -1"])
    command.refused("plan", said=["RUN.yaml is missing"])
    command.refused(
        *options, "workstation", "--tiers.nvme-dirs", "null", "--tiers.dram", "100kB",
        said=["bytes are missing)", "any of these would do:", "  tiers.dram: "],
    )  # fmt: skip


def test_places_that_cannot_take_an_output_are_told_first(command: Command, run_file: Path) -> None:
    """Before the machine is looked at, which takes seconds where it is this one."""
    options = ("plan", str(run_file), "--machine", "workstatoin")
    command.refused(
        *options, "--json", "/nope/x.json", said=["--json /nope/x.json: there is no directory /nope"]
    )
    command.refused(*options, "--json", str(run_file.parent), said=["--json ", "is a directory"])
    command.refused(
        *options, "--picture", "/nope/x.png", said=["--picture /nope/x.png: there is no directory"]
    )


def test_drives_of_this_machine_are_looked_at(command: Command, run_file: Path, tmp_path: Path) -> None:
    """As the run does; those of another machine need not be here."""
    drive, link, file = (tmp_path / name for name in ("drive", "link", "file"))
    drive.mkdir()
    link.symlink_to(drive)
    file.touch()
    options = ("plan", str(run_file), "--train.device", "cpu", "--tiers.nvme-dirs")
    command.refused(*options, str(file), said=[str(file), "name a directory, not a file"])
    command.refused(
        *options, str(drive), str(link), said=["tiers.nvme_dirs: ", "are the same directory", "once"]
    )
    command.refused(
        *options, str(drive), f"{drive}/", said=["tiers.nvme_dirs is ", "name each directory once"]
    )
    machine = ("--machine", "workstation", "--train.device", "cuda")
    assert command.run(*options, str(file), *machine)[0] == 0
