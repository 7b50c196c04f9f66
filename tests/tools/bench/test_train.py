"""`tierstream bench train`: figures that agree with each other, refusals, and interrupts."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.png import size_of
from support.storage_bench import StorageBench, everything_under

from tierstream.engine.bound import UPDATE_THEN_BACKWARD, Bound
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.measure import train_bench
from tierstream.engine.measure.train_bench import Setting, TieredBench, TieredCase
from tierstream.io.measure import Measurement
from tierstream.io.profile import DriveProfile
from tierstream.tools.bench.result import figure, label_value
from tierstream.tools.bench.training import case_name, difference, plots

pytestmark = pytest.mark.usefixtures("made_up_rates")

TINY = shlex.split("train --device cpu --rows 2 --seq-len 16 --steps 2 --rounds 2 --dtype float32")
#: Parameters of the tiny shape that are multiplied with: see tests/engine/measure/test_train_bench.py.
HEAD = 1000 * 64 + 64
PARAMETERS = 4 * (64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 176 + 2 * 64) + HEAD
TOKENS = 2 * 16
CASES = ["tiered, clip 0.5", "tiered, no clipping", "resident"]


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def measured(bench: StorageBench, *args: str | Path) -> dict[str, Any]:
    status, out, err = bench.run(*TINY, *args, "--json", "-")
    assert (status, err) == (0, "")
    plain: dict[str, Any] = json.loads(out)
    return plain


def test_figures_agree_with_each_other(bench: StorageBench) -> None:
    plain = measured(bench, "--clip-norm", "0.5", "null", "--baseline", "resident", "--check", "true")
    rates = {entry["run"]: entry["median"] for entry in plain["measurements"]}
    rounds = {entry["run"]: entry["rates"] for entry in plain["measurements"]}
    speed = {row["run"]: row for row in plain["details"]["speed"]}
    ratios = {row["run"]: row["ratio_to_resident"] for row in plain["details"]["ratios"]}
    assert [list(rates), list(speed), list(ratios)] == [CASES, CASES, CASES]
    assert {entry["unit"] for entry in plain["measurements"]} == {"tokens/s"}
    for name, row in speed.items():
        assert row["step_s"] == pytest.approx(TOKENS / rates[name])
        flop_per_token = 1e12 * row["tflop_per_s_8pt"] / rates[name]
        assert flop_per_token == pytest.approx(8 * PARAMETERS)
        assert row["tflop_per_s_6pt"] / row["tflop_per_s_8pt"] == pytest.approx(6 / 8)
        assert ratios[name] == pytest.approx(rates[name] / rates["resident"])
        if name == "resident":
            assert row["bound_s"] is row["bound_resource"] is row["time_over_bound"] is None
        else:
            # The recompute leaves out a layer's last product and the head; updates wait for the verdict.
            flop = 8 * PARAMETERS * TOKENS - 2 * (4 * 64 * 176 + HEAD) * TOKENS
            seconds = {"compute": flop / 1e12, "update": PARAMETERS / 1e9}
            backward_s = (flop - 2 * PARAMETERS * TOKENS) / 1e12
            seconds[UPDATE_THEN_BACKWARD] = seconds["update"] + backward_s
            assert row["bound_s"] == pytest.approx(max(seconds.values()))
            assert row["bound_resource"] == max(seconds, key=seconds.__getitem__)
            assert row["time_over_bound"] == pytest.approx(row["step_s"] / row["bound_s"])
    for row in plain["details"]["memory"]:
        assert row["gpu_peak_bytes"] is None
        assert row["host_peak_bytes"] > 50e6
    assert [row["run"] for row in plain["details"]["moved"]] == CASES[:2]
    waits = plain["details"]["waits"]
    assert {row["run"] for row in waits} == set(CASES[:2])
    for row in waits:
        assert 0 < row["percent"] <= 100
        mean_step_s = statistics.mean(TOKENS / rate for rate in rounds[row["run"]])
        assert 100 * row["wait_s"] / row["percent"] == pytest.approx(mean_step_s)
    assert plain["notes"][0].startswith("4 layers: all ")
    assert "losses are equal to the bit" in plain["notes"][0]


def test_the_bound_is_that_of_the_drives_in_these_minutes(
    bench: StorageBench, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and writes take what the means of all times say, to the last byte of the least traffic. A step
    after a rest does not count.
    """
    given = iter((1e6, 2e6, 3e6))

    def measure_long(rates: DriveProfile, directory: str, seconds: float) -> DriveProfile:
        rate = next(given)
        return replace(rates, read=4 * rate, write=2 * rate, mixed=rate)

    steps: list[TieredCase] = []
    step = TieredBench.step

    def noted(self: TieredBench, case: TieredCase) -> float:
        steps.append(case)
        return step(self, case)

    bounds: list[Bound] = []
    plan_bound = train_bench.plan_bound

    def spy(*args: Any, **settings: Any) -> Bound:
        bounds.append(plan_bound(*args, **settings))
        return bounds[-1]

    monkeypatch.setattr(TieredBench, "step", noted)
    monkeypatch.setattr("tierstream.engine.measure.machine.measure_long", measure_long)
    monkeypatch.setattr(train_bench, "plan_bound", spy)
    plain = measured(bench, "--nvme-dirs", drive, "--dram", "2MiB")
    rows = plain["details"]["drives"]
    assert [(row["after_round"], row["directory"]) for row in rows] == [(i, str(drive)) for i in range(3)]
    assert [row["mixed_gb_per_s"] for row in rows] == [1e-3, 2e-3, 3e-3]
    assert len(steps) == 3 * (1 + 2)
    ((bound,), (speed,)) = bounds, plain["details"]["speed"]
    read, written = bound.nvme_read_bytes, bound.nvme_written_bytes
    assert min(read, written) > 1e6
    together, rest = min(read, written), abs(read - written)
    alone = 8e6 if read > written else 4e6
    assert speed["bound_s"] == pytest.approx(2 * together / 2e6 + rest / alone)
    assert speed["bound_resource"] == "nvme"


def test_screen_json_and_report_say_the_same(
    bench: StorageBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Figures of a slow machine have more digits: none may be broken over two lines.
    monkeypatch.setattr("tierstream.tools.bench.report._WIDTH_COLUMNS", 200)
    monkeypatch.setenv("COLUMNS", "200")
    file, folder = tmp_path / "result.json", tmp_path / "report"
    status, out, err = bench.run(*TINY, "--baseline", "resident", "--json", file, "--report", folder)
    assert (status, err) == (0, "")
    plain = json.loads(file.read_text())
    assert json.loads((folder / "result.json").read_text()) == plain
    assert sorted(path.name for path in folder.iterdir()) == ["plot-speed.png", "report.html", "result.json"]
    page = (folder / "report.html").read_text()
    printed = [line.split() for line in out.splitlines()]
    for entry in plain["measurements"]:
        assert [entry["run"], figure(entry["median"] / 1e3)] in [line[:2] for line in printed]
    for name, rows in plain["details"].items():
        for row in rows:
            values = [value for value in row.values() if value is not None]
            texts = [
                figure(value) if isinstance(value, float) else label_value(key, value)
                for key, value in row.items()
                if value is not None
            ]
            line = " ".join(texts).split()
            assert any(line == [word for word in words if word != "-"] for words in printed), (name, values)
            assert all(text in page for text in texts)


def test_traces_of_the_cases_lie_in_the_report(bench: StorageBench, drive: Path, tmp_path: Path) -> None:
    """Recorded after the measured steps, as many as asked for; the check repeats them too."""
    report = tmp_path / "report"
    places = ["--nvme-dirs", drive, "--dram", "2MiB", "--report", report]
    wanted = ["--clip-norm", "0.5", "null", "--trace-steps", "3", "--check", "true"]
    status, _, err = bench.run(*TINY, *wanted, *places, "--json", "-")
    assert (status, err) == (0, "")
    page = (report / "report.html").read_text()
    for case in CASES[:2]:
        name = f"trace-{case.replace(', ', '-').replace(' ', '-')}-4-layers"
        events = json.loads((report / f"{name}.json").read_text())["traceEvents"]
        steps = [event["name"] for event in events if event["name"].startswith("step ")]
        assert steps == ["step 1", "step 2", "step 3"]
        assert any(event["name"] == "nvme read" for event in events)
        png = (report / f"{name}.png").read_bytes()
        assert size_of(png) > (1000, 300)
        assert base64.b64encode(png).decode() in page


def test_depths_are_measured_one_after_the_other(bench: StorageBench, tmp_path: Path) -> None:
    plain = measured(
        bench, "--layers", "1", "3", "--baseline", "resident", "--check", "true", "--report", tmp_path / "r"
    )
    names = [(entry["run"], entry["layers"]) for entry in plain["measurements"]]
    assert names == [("tiered", 1), ("resident", 1), ("tiered", 3), ("resident", 3)]
    assert [note.split(":")[0] for note in plain["notes"][:2]] == ["1 layers", "3 layers"]
    one, three = plain["details"]["memory"][::2]
    layer_bytes = 4 * (PARAMETERS - 1000 * 64 - 64) // 4
    # Weights and moments of two layers more (and padding); a second slot and a second sum on the device.
    assert three["state_bytes"] - one["state_bytes"] == pytest.approx(2 * 3 * layer_bytes, rel=0.03)
    assert 2 * layer_bytes < three["gpu_buffer_bytes"] - one["gpu_buffer_bytes"] < 2.2 * layer_bytes


def test_plots_of_depths_are_of_speed_times_layers_and_of_memory() -> None:
    found = [
        Measurement({"run": "tiered", "layers": layers, "gpu_peak_bytes": 10**9}, "tokens", (8.0,), 0.0)
        for layers in (1, 2)
    ]
    speed, memory = plots(found)
    assert (speed.x, speed.times, speed.y) == ("layers", "layers", None)
    assert (memory.x, memory.y) == ("layers", "gpu_peak_bytes")
    assert [plot.x for plot in plots(found[:1])] == ["run"]


def test_state_on_drives_goes_when_it_ends(bench: StorageBench, drive: Path) -> None:
    (drive / "precious").write_text("not ours")
    (drive / "tierstream-state").mkdir()
    (drive / "tierstream-state" / "of a run").write_text("not ours either")
    before = everything_under(drive)
    plain = measured(bench, "--nvme-dirs", str(drive), "--dram", "1MiB", "--check", "true")
    (row,) = plain["details"]["moved"]
    assert row["nvme_read_bytes"] > 0
    assert row["nvme_written_bytes"] > 0
    assert plain["details"]["memory"][0]["dram_bytes"] <= 1 << 20
    assert "--dram holds 1008.00 KiB" in plain["notes"][0]  # and so pages are small
    assert everything_under(drive) == before
    assert len(os.listdir(drive)) == 2


def test_dram_holds_what_was_saved_of_a_state_that_stays_on_the_device(bench: StorageBench) -> None:
    plain = measured(bench, "--gpu", "1GiB", "--activations", "gpu")
    (memory,), (moved,) = plain["details"]["memory"], plain["details"]["moved"]
    assert memory["dram_bytes"] == memory["state_bytes"] < memory["gpu_buffer_bytes"]
    assert {value for key, value in moved.items() if key.endswith("_bytes")} == {0}
    assert any("holds the state as it was last saved" in note for note in plain["notes"])


def test_a_loss_that_differs_is_said_and_is_a_failure(
    bench: StorageBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = train_bench.resident_losses

    def wrong(*args: Any) -> list[float]:
        losses = true(*args)
        losses[3] += 1e-9
        return losses

    monkeypatch.setattr(train_bench, "resident_losses", wrong)
    status, out, err = bench.run(*TINY, "--check", "true", "--json", "-")
    assert (status, err) == (1, "")
    assert json.loads(out)["notes"][0].startswith("4 layers: the loss of step 4 is ")


def test_difference_is_of_bits() -> None:
    assert difference([1.0, 2.0], [1.0, 2.0]) == ""
    assert "step 2" in difference([1.0, 0.0], [1.0, -0.0])
    assert difference([float("nan")], [float("nan")]) == ""


def test_names_say_what_differs() -> None:
    settings = [Setting(gpu=gpu, clip_norm=0.5) for gpu in (None, ByteSize("8GiB"))]
    assert [case_name(each, settings) for each in settings] == [
        "tiered, GPU two layers", "tiered, GPU 8 GiB",
    ]  # fmt: skip
    assert case_name(settings[0], settings[:1]) == "tiered"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--shape", "qwen3"], ['--shape is "qwen3"', "qwen2.5-3b"]),
        (["--layers", "4", "0"], ["--layers is 0"]),
        (["--layers", "4", "4"], ["--layers must have at least one value, each of them once"]),
        (["--clip-norm", "-1"], ["--clip-norm is -1"]),
        (["--steps", "0"], ["--steps is 0"]),
        (["--trace-steps", "1"], ["--trace-steps is 1", "--report"]),
        (["--rows-per-chunk", "3"], ["--rows-per-chunk is 3", "between 1 and --rows (2)"]),
        (["--seq-len", "1"], ["--seq-len is 1"]),
        (["--device", "gpu"], ["--device is 'gpu'"]),
        (["--placement", "auto", "gpu"], ["--placement is gpu and --device is cpu", "use --placement auto"]),
        (["--baseline", "deepspeed"], ['--baseline is ["deepspeed"]', "resident"]),
        (["--dram", "1MiB"], ["the state needs", "--dram holds 1.00 MiB", "drives in --nvme-dirs"]),
        (["--gpu", "64KiB"], ["error: --gpu is 64.00 KiB", "two layers", "raise --gpu, or lower --rows"]),
        (["--nvme-dirs", "/absent"], ["/absent"]),
        (["--kernels", "liger"], ["--kernels is liger and --device is cpu", "use --kernels plain, or"]),
        (["--profile", "/absent/machine.json"], ["/absent/machine.json"]),
    ],
)
def test_mistakes_get_one_message(bench: StorageBench, args: list[str], said: list[str]) -> None:
    bench.refused(*TINY, *args, said=said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--check-finite", "false"], ["--check-finite is false", "add null to --clip-norm"]),
        (["--check-finite", "false", "--clip-norm", "1", "2"], ["--check-finite is false"]),
        (["--grad-dtype", "bfloat16"], ["--grad-dtype is bfloat16", "--dtype bfloat16"]),
        (["--expert-cache", "1GiB", "--stream", "layers", "--shape", "tiny-moe"],
         ["--expert-cache is", "add experts"]),
        (["--expert-cache", "1GiB"], ["--expert-cache is", "tiny has no experts"]),
        (["--stream", "layers", "experts"], ["--stream names layers", "tiny has no experts"]),
        (["--turns", "blocks"], ["--turns is blocks", "--baseline", "fsdp2-offload"]),
        (["--turns", "blocks", "--baseline", "resident"], ["--turns is blocks"]),
        (["--peer-nvme-dir", "/tmp"], ["--peer-nvme-dir is /tmp", "--baseline deepspeed-nvme"]),
        (["--peer-nvme-dir", "/tmp", "--baseline", "fsdp2-offload"], ["--peer-nvme-dir is /tmp"]),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(bench: StorageBench, args: list[str], said: list[str]) -> None:
    bench.refused(*TINY, *args, said=[*said, "leave"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_what_to_do(bench: StorageBench, drive: Path) -> None:
    bench.refused("train", "--nvme-dirs", drive, said=["--device is cuda", "nvidia-smi", "--device cpu"])
    assert os.listdir(drive) == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tierstream.tools.cli import main\n"
        "try:\n"
        "    main(['bench', 'train', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


#: Moment -> code that prints "running" when it has come.
MOMENTS = {
    "the state is filled": """
import os
import time
from tierstream.engine.model import initialise
draw = initialise._draw
def running(*args):  # by threads, each of which ends what it draws
    os.write(1, b"running\\n")  # print would write the end of the line on its own
    time.sleep(0.2)
    return draw(*args)
initialise._draw = running
""",
    "steps": """
from tierstream.engine.measure.train_bench import TieredBench
run = TieredBench.run
def running(self, case, steps):
    print("running", flush=True)
    return run(self, case, 1000000)
TieredBench.run = running
""",
}
LAUNCH = "\nimport sys\nfrom tierstream.tools.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize(
    ("moment", "signum"), [("the state is filled", signal.SIGTERM), ("steps", signal.SIGINT)]
)
def test_an_interrupt_leaves_nothing(
    drive: Path, moment: str, signum: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary, caches = (tmp_path_factory.mktemp(name) for name in ("tmp", "torch"))
    args = ["bench", *TINY, "--nvme-dirs", str(drive), "--dram", "1MiB", "--json", str(drive.parent / "x")]
    with subprocess.Popen(
        [sys.executable, "-c", MOMENTS[moment] + LAUNCH, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # torch keeps what it compiles, for the next process: that is not ours to remove.
        env=os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(caches)},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == "running\n", process.communicate(timeout=60)
        time.sleep(0.3)
        assert os.listdir(drive) != []
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "tierstream: interrupted\n")
    assert os.listdir(drive) == []
    assert os.listdir(temporary) == []
    assert os.listdir(drive.parent) == ["drive"]


@pytest.mark.gpu
def test_on_cuda(bench: StorageBench, drive: Path) -> None:
    args = shlex.split("train --rows 4 --seq-len 128 --rounds 2 --baseline resident --check true")
    status, out, err = bench.run(
        *args, "--clip-norm", "1.0", "null", "--nvme-dirs", drive, "--dram", "2MiB", "--json", "-"
    )
    assert (status, err) == (0, ""), err
    plain = json.loads(out)
    assert all(0 < entry["gpu_peak_bytes"] < 1 << 30 for entry in plain["measurements"])
    assert os.listdir(drive) == []
