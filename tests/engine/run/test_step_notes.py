from __future__ import annotations

import json
import math
from pathlib import Path

from support.runs import final_planes, make_run, records, train
from support.steps import record

from tierstream.engine.metrics import PlanReport
from tierstream.engine.run.step_notes import StepNotes
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.snapshot import Snapshot

PLAIN = {"clip_factor": 1.0, "clip_norm": 0.5}


def test_an_ordinary_step_needs_no_words() -> None:
    assert list(StepNotes(OptimizerConfig()).of(record(1, **PLAIN), 0)) == []


def test_a_clipped_step_is_explained_once() -> None:
    """C05: which norm it is, the limit, the factor."""
    notes = StepNotes(OptimizerConfig())
    clipped = record(7, grad_norm=2.0, clip_factor=0.25, clip_norm=0.5)
    assert list(notes.of(clipped, 0)) == [
        "step 7: first clipped step: the gradient's norm 2 is above optimizer.clip_norm 0.5, so it was "
        "multiplied with 0.25; norms are always those before clipping"
    ]
    assert list(notes.of(clipped, 0)) == []


def test_every_skipped_step_is_told() -> None:
    """C11: that nothing has changed, how many are too many, and where the samples lie."""
    notes = StepNotes(OptimizerConfig(max_skipped_in_a_row=5))
    names = [f"a.jsonl:{line}" for line in range(1, 11)]
    values = {"skipped": True, "grad_norm": math.nan, "loss": math.inf, "clip_factor": 1.0}
    assert list(notes.of(record(12, **values, sample_ids=names), 2)) == [
        "step 12: the gradient is not finite (norm nan, loss inf): skipped, nothing has changed; 2 in a row "
        f"of at most 5; its samples: {', '.join(names[:8])} and 2 more, all in metrics.jsonl"
    ]
    (line,) = notes.of(record(13, **values, sample_ids=names[:2]), 3)
    assert line.endswith("3 in a row of at most 5; its samples: a.jsonl:1, a.jsonl:2")


def test_a_step_without_a_trained_token_is_explained_once() -> None:
    notes = StepNotes(OptimizerConfig())
    empty = record(3, loss=math.nan, grad_norm=0.0, trained_tokens=0, clip_factor=1.0)
    (line,) = notes.of(empty, 0)
    assert line.startswith("step 3: no token of it is trained on, so it has no loss (nan) and changes")
    assert list(notes.of(empty, 0)) == []


def test_metrics_alone_say_what_was_clipped(tmp_path: Path) -> None:
    """C05: a step with a limit far below the norm, one with a limit far above."""
    tight, wide = make_run(tmp_path / "tight", steps=1), make_run(tmp_path / "wide", steps=1)
    tight.optimizer.clip_norm, wide.optimizer.clip_norm = 0.01, 1e9
    train(tight)
    train(wide)
    (clipped,), (free,) = records(tight), records(wide)
    assert clipped["grad_norm"] == free["grad_norm"] > 0.01
    assert (clipped["clip_norm"], free["clip_norm"], free["clip_factor"]) == (0.01, 1e9, 1.0)
    assert math.isclose(clipped["clip_factor"], 0.01 / clipped["grad_norm"], rel_tol=1e-3)


def test_number_formats_are_planned_stored_and_true(tmp_path: Path) -> None:
    """C07: those printed before the first step, those in the checkpoint, and those of the files."""
    config = make_run(tmp_path, steps=1)
    train(config)
    run_dir = Path(config.run_dir)
    plan = PlanReport.from_json((run_dir / "plan.json").read_text())
    assert (plan.first_step, plan.last_step) == (1, 1)
    assert plan.bound is not None
    assert {"torch", "transformers", "tierstream", "cpu"} <= plan.machine.keys()
    assert plan.started
    snapshot = Snapshot.open(run_dir / "checkpoints" / "step-00000001")
    assert snapshot.state["dtypes"] == plan.dtypes
    assert plan.dtypes["gradient sum"] == "float32"
    stored = {spec.plane: spec.dtype for spec in snapshot.planes.values()}
    assert {"weight", "exp_avg", "exp_avg_sq"} <= stored.keys()
    assert all(plan.dtypes[plane] == dtype for plane, dtype in stored.items())
    assert {array.dtype.itemsize for array in final_planes(config).values()} <= {2, 4}
    assert json.loads((run_dir / "plan.json").read_text())["tokens_per_step"] == 64
