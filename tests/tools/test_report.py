"""`tierstream report`: one file that needs no other, whose figures are those of metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.html_page import Page
from support.runs import make_run, train
from support.steps import record

from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import StepMetrics, read_metrics
from tierstream.engine.moe.use import CacheCounts, ExpertStep
from tierstream.tools import cli
from tierstream.tools.history import BUCKETS, read_history
from tierstream.tools.report import report

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    def run_here(*args: str) -> tuple[int, str, str]:
        return cli.main(args), *capsys.readouterr()

    return run_here


def write_run(folder: Path, steps: list[StepMetrics]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("run_dir: somewhere\n")
    with RecordWriter(folder / "metrics.jsonl", StepMetrics, last_step=0) as writer:
        for metrics in steps:
            writer.write(metrics)
    return folder


def page_of(run_dir: Path) -> Page:
    html = report(run_dir).html().decode()
    assert "<script" not in html
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    page = Page(html)
    assert page.open == []
    return page


def test_a_real_run_and_its_figures(run: Command, tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=5)
    config.train.trace_steps = 2
    train(config)
    run_dir, out = Path(config.run_dir), tmp_path / "sent" / "page.html"
    out.parent.mkdir()
    assert run("report", str(run_dir), "--out", str(out)) == (0, f"report: {out}\n", "")
    page = Page(out.read_text())
    rows = {row[0]: row for row in reversed(page.rows)}
    steps = read_metrics(run_dir / "metrics.jsonl")
    for metrics in steps:
        row = rows[str(metrics.step)]
        assert row[1:5] == [
            f"{value:.6g}" for value in (metrics.loss, metrics.grad_norm, metrics.clip_factor, metrics.lr)
        ]
        assert row[5] == str(metrics.trained_tokens)
    assert rows["tokens"][1] == f"{sum(metrics.tokens for metrics in steps):,}"
    assert rows["least loss, nats"][1] == f"{min(metrics.loss for metrics in steps):.6g}"
    assert float(rows["time in steps, s"][1]) == pytest.approx(sum(m.step_s for m in steps), rel=1e-5)
    assert rows["clipped steps"][1].startswith(f"{sum(m.clip_factor < 1 for m in steps)} (")
    assert rows["of the speed that is possible"][1].endswith("(set by compute)")
    assert (run_dir / "config.yaml").read_text() in page.text
    assert (run_dir / "trace.png").read_bytes() in page.images
    assert "step-00000005" in page.text
    assert "transformers" in page.text
    assert run("report", str(run_dir))[:2] == (0, f"report: {run_dir / 'report.html'}\n")


def test_a_run_that_was_killed_in_its_first_steps(tmp_path: Path) -> None:
    """No result, no plan, one step, a torn line."""
    run_dir = write_run(tmp_path / "run", [record(1)])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "los')
    page = page_of(run_dir)
    assert "The run is still going on, or it was killed" in page.text
    assert ["steps", "1 to 1"] in page.rows


def test_losses_that_are_no_numbers_and_skipped_steps(tmp_path: Path) -> None:
    spoilt = {"loss": math.nan, "grad_norm": math.inf, "clip_factor": 1.0, "skipped": True}
    steps = [record(step, **(spoilt if step in (3, 7) else {})) for step in range(1, 10)]
    steps[4] = record(5, loss=-math.inf, skipped=False)
    page = page_of(write_run(tmp_path / "run", steps))
    assert "2 steps were skipped" in page.text
    assert ["skipped steps", "2"] in page.rows
    assert [row[:4] for row in page.rows if row[0] == "7"] == [["7", "nan", "inf", "1.0"[:1]]] * 2


def test_a_run_without_any_number(tmp_path: Path) -> None:
    nothing = {"loss": math.nan, "grad_norm": math.nan, "skipped": True, "stall_s": {}, "clip_factor": 1.0}
    page = page_of(write_run(tmp_path / "run", [record(step, **nothing) for step in range(1, 4)]))
    assert ["least loss, nats", "nan"] in page.rows


def test_experts_and_losses_of_routers_are_drawn(tmp_path: Path) -> None:
    experts = ExpertStep(6, 8, CacheCounts(3, 1, 0, 0, 4096), 1024)
    dense = write_run(tmp_path / "dense", [record(step) for step in range(1, 4)])
    sparse = write_run(
        tmp_path / "sparse", [record(step, experts=experts, router_aux_loss=1.5) for step in range(1, 4)]
    )
    assert len(page_of(sparse).images) == len(page_of(dense).images) + 2


def test_evaluations_and_samples_are_shown(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [record(step) for step in range(1, 5)])
    (run_dir / "evaluations.jsonl").write_text('{"step": 2, "loss": 3.25}\n{"step": 4, "loss": NaN}\n')
    (run_dir / "samples.jsonl").write_text(json.dumps({"step": 4, "text": "once <upon> a time"}) + "\n")
    page = page_of(run_dir)
    assert ["2", "3.25"] in page.rows
    assert ["best evaluation, nats", "3.25 after step 2"] in page.rows
    assert ["4", "nan"] in page.rows
    assert "once <upon> a time" in page.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "{0} is no run directory: it holds no config.yaml"),
        ({"config.yaml": ""}, "{0} holds no step yet (no metrics.jsonl); try again when one has ended"),
        ({"config.yaml": "", "metrics.jsonl": ""}, "{0}/metrics.jsonl holds no step yet; try again when one "
         "has ended"),
        ({"config.yaml": "", "metrics.jsonl": '{"step": 1'}, "{0}/metrics.jsonl holds no step yet; try again "
         "when one has ended"),
        ({"config.yaml": "", "metrics.jsonl": f"{record(1).to_json()}\nhello\n{record(3).to_json()}\n"},
         "{0}/metrics.jsonl:2: is not the record of a step; move the file away"),
    ],
)  # fmt: skip
def test_what_is_no_run_gets_one_message(
    run: Command, tmp_path: Path, files: dict[str, str], message: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name, text in files.items():
        (run_dir / name).write_text(text)
    assert run("report", str(run_dir)) == (2, "", f"tierstream: error: {message.format(run_dir)}\n")
    assert not (run_dir / "report.html").exists()


def test_many_steps_keep_their_spikes_and_sums(tmp_path: Path) -> None:
    """More steps than buckets, and than one block of the file."""
    count, spikes = 45_000, {17: 1e6, 30_001: -5.0}
    path = write_run(tmp_path / "run", []) / "metrics.jsonl"
    plain = json.loads(record(1).to_json())
    with path.open("w") as file:
        for step in range(1, count + 1):
            plain |= {"step": step, "loss": spikes.get(step, 2.0 + step % 7), "grad_norm": float(step)}
            file.write(json.dumps(plain) + "\n")
    assert path.stat().st_size > 1 << 24
    history = read_history(path, bound_s=0.25)
    loss = history.bands["loss"]
    assert (history.count, len(history.steps)) == (count, BUCKETS)
    assert (np.nanmax(loss.high), np.nanmin(loss.low)) == (1e6, -5.0)
    others = sum(2.0 + step % 7 for step in range(1, count + 1) if step not in spikes)
    assert loss.total.sum() == pytest.approx(others + 1e6 - 5.0)
    assert history.totals["tokens"] == 128 * count
    assert [shown["step"] for shown in history.shown][:: len(history.shown) - 1] == [1, count]
    assert np.all(history.bands["grad_norm"].low == history.steps)
    assert set(history.bands["bound_percent"].high) == {50.0}
