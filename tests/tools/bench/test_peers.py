"""Peers of `tierstream bench train`: the protocol, processes that die, and real ones on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.storage_bench import StorageBench

from tierstream.engine.model.shapes import architecture
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tools.bench import peers
from tierstream.tools.bench.peers import Job, PeerError, PeerProcess

pytestmark = pytest.mark.usefixtures("made_up_rates")

TINY = shlex.split("train --device cpu --rows 2 --seq-len 16 --steps 2 --rounds 1 --dtype float32")
#: A peer that knows the answer. What it prints must not come between the lines.
FAKE = """
import os, sys, time
from tierstream.tools.bench.peers.child import Training, serve
def build(job):
    print("building", job.rows, flush=True)
    os.system("echo from a program")
    losses = iter([3.0, 2.5, 2.0, 1.5, 1.0])
    def step(batch):
        assert batch.input_ids.shape == (job.rows, job.seq_len)
        time.sleep(0.01)
        return next(losses), None
    return Training(step, 1000, {"rows": job.rows}, ("numpy",))
serve(build)
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "config.json").write_text(json.dumps(architecture("tiny")))
    return Job(
        config=str(tmp_path),
        dtype="float32",
        rows=2,
        seq_len=16,
        seed=0,
        device="cpu",
        kernels="plain",
        optimizer=asdict(OptimizerConfig(schedule="constant")),
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is the fake one, and nothing needs to be installed."""
    monkeypatch.setattr(peers, "command", lambda name: [sys.executable, "-c", FAKE])
    monkeypatch.setattr(peers, "check_installed", lambda name: None)


def started(code: str, job: Job, **limits: float) -> PeerProcess:
    return PeerProcess(
        "fake", [sys.executable, "-c", code], os.environ, job, Path(job.config, "log"), **limits
    )


def measured(bench: StorageBench, *args: str) -> dict[str, Any]:
    status, out, err = bench.run(*TINY, *args, "--json", "-")
    assert (status, err) == (0, "")
    plain: dict[str, Any] = json.loads(out)
    return plain


def test_a_peer_answers_with_its_turns_and_when_it_dies_says_what_it_said_last(job: Job) -> None:
    code = FAKE.replace(", 1.5, 1.0", "")
    process = started(code.replace("next(losses)", "next(losses, 0) or sys.exit('the GPU\\nburns')"), job)
    try:
        assert process.settings == {"rows": 2}
        assert set(process.versions) == {"torch", "transformers", "numpy"}
        turns = [process.run(2), process.run(1)]
        with pytest.raises(PeerError, match=r"--baseline fake.*ended with status 1.*the GPU burns\. Choose"):
            process.run(1)
    finally:
        process.close()
    assert [turn.losses for turn in turns] == [[3.0, 2.5], [2.0]]
    assert [turn.grad_norms for turn in turns] == [[None, None], [None]]
    assert 0.02 < turns[0].seconds < 5
    assert turns[0].gpu_peak_bytes is None
    assert turns[0].host_peak_bytes > 50e6
    assert Path(job.config, "log").read_text().splitlines()[:2] == ["building 2", "from a program"]


def test_a_peer_that_dies_at_once_said_nothing(job: Job) -> None:
    with pytest.raises(PeerError, match="ended with status 7; it said last: nothing"):
        started("import sys; sys.exit(7)", job)


def test_a_peer_that_died_between_turns_says_what_it_said_last(job: Job) -> None:
    """What was meant for it is dropped when it is closed, and hides nothing."""
    ready = json.dumps({"settings": {}, "versions": {}})
    process = started(f"import sys; input(); print({ready!r}, flush=True); sys.exit('burnt')", job)
    process._process.wait()
    with pytest.raises(PeerError, match=r"ended with status 1; it said last: burnt\."), closing(process):
        process.run(1)


def test_a_peer_that_does_not_answer_is_ended(job: Job) -> None:
    with pytest.raises(PeerError, match=r"did not answer within 0\.5 s"):
        started("import time; time.sleep(60)", job, limit_s=0.5)
    process = started(FAKE.replace("0.01", "60"), job)
    try:
        with pytest.raises(PeerError, match=r"did not answer within 0\.5 s.*; it said last: building 2"):
            process.run(1, limit_s=0.5)
    finally:
        process.close()


def test_a_peer_ends_with_us_in_the_middle_of_a_step(job: Job) -> None:
    us = f"""
import json, os, sys
from pathlib import Path
from tierstream.tools.bench.peers import Job, PeerProcess
job = Job(**json.loads(sys.argv[1]))
command = [sys.executable, "-c", {FAKE.replace("0.01", "60")!r}]
process = PeerProcess("fake", command, os.environ, job, Path("log"))
process._process.stdin.write('{{"steps": 1}}\\n')
process._process.stdin.flush()
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", us, json.dumps(asdict(job))],
        cwd=job.config, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    pid = int(done.stdout)
    limit = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("turns", ["rounds", "blocks"])
def test_a_peer_is_a_case_among_ours(bench: StorageBench, tmp_path: Path, turns: str) -> None:
    args = ["--baseline", "resident", "deepspeed-nvme", "--turns", turns, "--peer-nvme-dir", str(tmp_path)]
    plain = measured(bench, *args)
    names = ["tiered", "resident", "deepspeed-nvme"]
    rates = {entry["run"]: entry["median"] for entry in plain["measurements"]}
    assert list(rates) == names
    assert [row["run"] for row in plain["details"]["speed"]] == names
    for row in plain["details"]["ratios"]:
        for name in names[1:]:
            ratio = row[f"ratio_to_{name.replace('-', '_')}"]
            assert ratio == pytest.approx(rates[row["run"]] / rates[name])
    (peer,) = plain["details"]["peers"]
    assert (peer["run"], peer["first_loss"]) == ("deepspeed-nvme", 3.0)
    assert peer["first_loss_tiered"] == pytest.approx(6.9, abs=0.2)
    assert json.loads(peer["settings"]) == {"rows": 2}
    assert "numpy" in peer["versions"]
    memory = {row["run"]: row["host_peak_bytes"] for row in plain["details"]["memory"]}
    assert memory["deepspeed-nvme"] != memory["tiered"]
    assert os.listdir(tmp_path) == []


def test_a_peer_that_fails_alone_costs_only_its_own_figures(
    bench: StorageBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it has the drive for itself: what our cases had there is gone."""
    (drive := tmp_path / "drive").mkdir()
    code = f"import os, sys; sys.exit('found ' + str(os.listdir({str(drive)!r})))"
    monkeypatch.setattr(peers, "command", lambda name: [sys.executable, "-c", code])
    args = [*TINY, "--nvme-dirs", str(drive), "--dram", "1MiB"]
    args += ["--baseline", "fsdp2-offload", "--turns", "blocks", "--json", "-"]
    status, out, err = bench.run(*args)
    assert (status, err) == (1, "")
    plain = json.loads(out)
    assert [entry["run"] for entry in plain["measurements"]] == ["tiered"]
    said = "4 layers: --baseline fsdp2-offload: its process ended with status 1; it said last: found []"
    assert [note for note in plain["notes"] if note.startswith(said)]
    assert "peers" not in plain["details"]
    said = ["--baseline fsdp2-offload", "it said last: found"]
    bench.refused(*TINY, "--baseline", "fsdp2-offload", said=said)


def test_an_interrupt_during_a_peer_costs_nothing_that_was_measured(
    bench: StorageBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peers.PeerCase, "__enter__", interrupted)
    args = [*TINY, "--baseline", "fsdp2-offload", "--turns", "blocks", "--json", "-"]
    status, out, err = bench.run(*args)
    assert (status, err) == (130, "tierstream: interrupted\n")
    plain = json.loads(out)
    assert [entry["run"] for entry in plain["measurements"]] == ["tiered"]
    assert "interrupted: the rest was not measured" in plain["notes"]


def test_what_is_missing_is_said_before_anything_is_run(
    bench: StorageBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.refused(*TINY, "--baseline", "deepspeed-nvme", said=["deepspeed-nvme", "--peer-nvme-dir"])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    said = ["--baseline deepspeed-cpu", "pip install 'tierstream[peers]'"]
    bench.refused(*TINY, "--baseline", "deepspeed-cpu", said=said)
    monkeypatch.setattr(peers, "check_installed", lambda name: None)
    monkeypatch.setattr(peers, "_NVME_BYTES_PER_PARAMETER", 1 << 40)
    args = ["--baseline", "deepspeed-nvme", "--peer-nvme-dir", str(tmp_path)]
    bench.refused(*TINY, *args, said=[str(tmp_path), "are needed there"])


DEEPSPEED = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(1800),  # it compiles its kernels when it is used for the first time
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=DEEPSPEED if name.startswith("deepspeed") else ())
        for name in peers.PEER_NAMES
    ],
)
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_a_real_peer_trains_the_same_model(
    bench: StorageBench, tmp_path: Path, name: peers.PeerName, dtype: str, close: float
) -> None:
    args = ["--dtype", dtype, "--baseline", name]
    args += ["--peer-nvme-dir", str(tmp_path)] if peers.uses_nvme(name) else []
    (peer,) = measured(bench, *args)["details"]["peers"]
    assert peer["first_loss"] == pytest.approx(peer["first_loss_tiered"], rel=close)
    assert os.listdir(tmp_path) == []
