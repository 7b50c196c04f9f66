"""`tierstream bench`: what is printed and written, refusals, and interrupts that leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tierstream.engine.measure import copy_rates
from tierstream.engine.measure.adam_rates import BYTES_PER_PARAMETER, traffic_of
from tierstream.io.measure import Measurement
from tierstream.tools import cli
from tierstream.tools.bench import copy
from tierstream.tools.bench.result import Result, grids

Run = Callable[..., tuple[int, str, str]]
SMALL_MEMORY = ("--memory", "1MiB")
TINY = ("adam", "--parameters", "2000", "--threads", "1", "2", "--rounds", "2")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["bench", *args])
        except SystemExit as end:  # --help
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run


def read_back(plain: dict) -> Result:
    """The result that JSON describes."""
    figures = ("unit", "median", "lowest", "highest", "rates", "cpu_s_per_giga", "note")
    measurements = [
        Measurement(
            {key: value for key, value in entry.items() if key not in figures},
            entry["unit"].removesuffix("/s"),
            tuple(entry["rates"]),
            entry["cpu_s_per_giga"],
            entry["note"],
        )
        for entry in plain["measurements"]
    ]
    return Result(
        plain["kind"], plain["title"], plain["command"], plain["machine"], measurements, plain["notes"],
        plain["date"],
    )  # fmt: skip


def test_screen_json_and_report_hold_the_same(bench: Run, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    status, out, err = bench(*TINY, "--json", str(target), "--report", str(tmp_path / "report"))
    assert (status, err) == (0, "")
    plain = json.loads(target.read_text())
    assert json.loads((tmp_path / "report" / "result.json").read_text()) == plain
    result = read_back(plain)
    assert result.to_json() | {"details": plain["details"]} == plain
    updates, memory = grids(result)
    lines = [line.split() for line in out.splitlines()]
    for row in updates.rows + memory.rows:
        cells = " ".join(row[1:]).split()  # the kernel's name is folded into several lines
        assert any(line[-len(cells) :] == cells for line in lines), row
    assert [len(updates.rows), len(memory.rows)] == [7 * 2, 5 * 2]
    rates = {(e["part"], e["kernel"], e["threads"]): e["median"] for e in plain["measurements"]}
    shares = {(row["kernel"], row["threads"]): row for row in plain["details"]["shares"]}
    for (kernel, threads), row in shares.items():
        update, limit = rates["AdamW", kernel, threads], rates["memory", traffic_of(kernel), threads]
        assert row["share_of_memory"] == pytest.approx(update / limit)
        assert row["gb_per_s"] == pytest.approx(BYTES_PER_PARAMETER[kernel] * update / 1e9)
    assert len(shares) == 7 * 2
    assert result.command[: 2 + len(TINY)] == ["tierstream", "bench", *TINY]
    assert {"cpu", "cores", "isa", "memory", "kernel", "torch"} <= result.machine.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "result.json"]


def test_json_to_standard_output_is_all_there_is(bench: Run) -> None:
    status, out, err = bench(*TINY, "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out)["kind"] == "adam"


def test_copies_through_the_command(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU: its lanes are those of the CPU, and nothing is pinned."""
    monkeypatch.setattr(copy, "_check_device", lambda name: None)
    monkeypatch.setattr(copy_rates, "RUN_BYTES", 1 << 20)
    args = ("copy", "--device", "cpu", "--sizes", "64KiB", "1MiB", "64KiB", "--rounds", "2", *SMALL_MEMORY)
    status, out, err = bench(*args, "--json", "-", "--report", str(tmp_path / "report"))
    assert (status, len(err.splitlines())) == (0, 2)  # what is measured, as there is no bar
    labels = [
        (entry["memory"], entry["direction"], entry["size_bytes"])
        for entry in json.loads(out)["measurements"]
        if "direction" in entry
    ]
    assert labels == [
        (memory, direction, size)
        for memory in ("arena", "pageable")
        for direction in ("H2D", "D2H", "both")
        for size in (65536, 1 << 20)
    ]
    assert (tmp_path / "report" / "plot-copies.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_copies_on_cuda_through_the_command(bench: Run, tmp_path: Path) -> None:
    status, out, _ = bench("copy", "--sizes", "1MiB", "64MiB", "--rounds", "3", "--json", "-")
    assert status == 0
    plain = json.loads(out)
    copies = [entry for entry in plain["measurements"] if "direction" in entry]
    assert {entry["memory"] for entry in copies} == {"arena", "torch", "pageable"}
    assert {entry["note"] for entry in copies} == {""}
    assert "gpu" in plain["machine"]


def test_host_memory_needs_no_gpu(bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = tmp_path / "report"
    status, out, _ = bench(
        "copy", "--rounds", "2", *SMALL_MEMORY, "--json", str(tmp_path / "x.json"), "--report", str(report)
    )
    assert status == 0
    plain = json.loads((tmp_path / "x.json").read_text())
    assert {entry["part"] for entry in plain["measurements"]} == {"host memory"}
    assert {entry["pattern"] for entry in plain["measurements"]} == {"read", "copy", "update"}
    assert "over 1.00 MiB in huge pages" in plain["notes"][0]
    assert "update" in out
    assert sorted(path.name for path in report.iterdir()) == ["plot-memory.png", "report.html", "result.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_copies_without_a_gpu_are_refused_with_what_to_do(bench: Run) -> None:
    status, out, err = bench("copy", "--device", "cuda:0")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "sees no GPU" in err
    assert "nvidia-smi" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["adm"], "unknown benchmark adm; did you mean adam?"),
        (["xyz"], "unknown benchmark xyz; the benchmarks are "),
        (["adam", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["adam", "--threads", "1", "0"], "--threads has 0; each must be between 1 and 1024"),
        (["adam", "--parameters", "0"], "--parameters is 0; it must be at least 1"),
        (["adam", "--parameters", str(10**13)], "needs 345.61 TiB of host memory"),
        (["adam", "--round", "3"], "unknown option --round; did you mean --rounds?"),
        (["adam", "--json", "/absent/x"], "there is no directory /absent"),
        (["copy", "--memory", "4095"], "--memory is 4095 B; it must be at least 4096 bytes"),
        (["copy", "--sizes", "0"], "--sizes must be one size or more"),
        (["copy", "--sizes", "1Mb5"], "--sizes is"),
        (["copy", "--device", "gpu7"], "'gpu7' is no device; write cuda or cuda:0"),
        (["copy", "--device", "cpu"], "copies are measured to a GPU: write cuda:0"),
    ],
)
def test_mistakes_get_one_message(bench: Run, args: list[str], message: str) -> None:
    status, out, err = bench(*args)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_usage_lists_the_benchmarks(bench: Run) -> None:
    status, out, _ = bench("--help")
    assert status == 0
    assert "  copy " in out
    assert "  adam " in out
    assert bench() == (2, out, "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tierstream.tools.cli import main\n"
        "for command in ('bench', 'bench copy', 'bench adam'):\n"
        "    try:\n"
        "        main([*command.split(), '--help'])\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'torch', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tierstream.io import measure\n"
        "from tierstream.tools.cli import main\n"
        "timed = measure.timed\n"
        "def first(*args):\n"
        "    print('running', flush=True)\n"
        "    return timed(*args)\n"
        "measure.timed = first\n"
        "sys.exit(main())\n"
    )
    args = ["bench", "adam", "--parameters", "100000", "--rounds", "1000000"]
    outputs = ["--json", str(tmp_path / "x.json"), "--report", str(tmp_path / "report")]
    with subprocess.Popen(
        [sys.executable, "-c", code, *args, *outputs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "tierstream: interrupted\n")
    assert list(tmp_path.iterdir()) == []
