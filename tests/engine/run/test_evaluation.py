"""Evaluations of whole runs: when, what is written, who is told, and what a resume makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.runs import final_planes, make_run, records, train

from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import EvalMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.run.eval_config import EvalConfig
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import DataError
from tierstream.tools.live import ConsoleCallback


def evaluated(folder: Path, *, steps: int = 5, **keys: Any) -> RunConfig:
    config = make_run(folder, steps=steps)
    text = folder / "unseen.txt"
    text.write_text("every page of the plane holds one small tier\n" * 20)
    config.eval = EvalConfig(files=[str(text)], **keys)
    return config


def evaluations(config: RunConfig) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (Path(config.run_dir) / "evaluations.jsonl").read_text().splitlines()
    ]


def without_time(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.items() if key not in ("seconds", "tokens_per_s")}
        for each in found
    ]


class Told(Callback):
    def __init__(self) -> None:
        self.evaluations: list[EvalMetrics] = []
        self.events: list[str] = []

    def on_evaluation(self, metrics: EvalMetrics) -> None:
        self.evaluations.append(metrics)

    def on_event(self, text: str) -> None:
        self.events.append(text)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Evaluated after steps 2, 4 and 5, with a checkpoint after each step."""
    config = evaluated(tmp_path_factory.mktemp("unbroken"), every_steps=2)
    config.checkpoint.every_steps, config.checkpoint.keep = 1, 5
    train(config)
    return config


def test_records_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, told = evaluated(tmp_path, every_steps=2, rows_per_step=3), Told()
    with ConsoleCallback() as console:
        summary = Trainer(config, [told, console]).run()
    found = evaluations(config)
    assert [each["step"] for each in found] == [2, 4, 5]
    assert [EvalMetrics(**each) for each in found] == told.evaluations
    lowest = math.inf
    for each in found:
        assert each["perplexity"] == math.exp(each["loss"])
        assert each["best"] == (each["loss"] < lowest)
        assert each["trained_tokens"] > 0
        assert each["seconds"] > 0
        lowest = min(lowest, each["loss"])
    best = min(found, key=lambda each: each["loss"])
    assert (summary.best_loss, summary.best_step) == (best["loss"], best["step"])
    out = capsys.readouterr().out
    assert f"evaluation after step 2: loss {found[0]['loss']:#.5g}, the best" in out
    assert f"best evaluation: loss {best['loss']:.4f} after step {best['step']}" in out
    assert any(line.startswith("evaluation: ") and "samples on" in line for line in told.events)


def test_training_is_that_of_a_run_without(tmp_path: Path, unbroken: RunConfig) -> None:
    plain = make_run(tmp_path, steps=5)
    train(plain)
    assert not (Path(plain.run_dir) / "evaluations.jsonl").exists()
    found, expected = records(unbroken), records(plain)
    assert [each["loss"] for each in found] == [each["loss"] for each in expected]
    assert [each["grad_norm"] for each in found] == [each["grad_norm"] for each in expected]
    for mine, theirs in zip(final_planes(unbroken).values(), final_planes(plain).values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    moved = [each["bytes_written"]["gpu"] for each in found]
    assert moved[2] <= moved[1], "what an evaluation moves is not counted for the step after it"


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_resumed_run_evaluates_as_if_it_had_not_ended(
    tmp_path: Path, unbroken: RunConfig, step: int
) -> None:
    config = evaluated(tmp_path, every_steps=2)
    config.checkpoint.resume = f"{unbroken.run_dir}/checkpoints/step-{step:08d}"
    summary = train(config)
    rest = [each for each in evaluations(unbroken) if each["step"] > step]
    assert without_time(evaluations(config)) == without_time(rest)
    best = min(evaluations(unbroken), key=lambda each: each["loss"])
    assert (summary.best_loss, summary.best_step) == (best["loss"], best["step"])


def test_records_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    config = evaluated(tmp_path, every_steps=1, steps=3)
    config.checkpoint.every_steps, config.checkpoint.at_end = 2, False
    train(config)
    before = evaluations(config)
    config.checkpoint.resume = "auto"
    train(config)
    assert without_time(evaluations(config)) == without_time(before)


def test_a_run_that_gets_no_better_ends(tmp_path: Path) -> None:
    config = evaluated(tmp_path, every_steps=1, steps=8, patience=2, min_delta=100.0)
    summary = train(config)
    assert [each["best"] for each in evaluations(config)] == [True, False, False]
    assert summary.last_step == 3
    assert summary.stopped is not None
    assert "2 evaluations in a row (eval.patience)" in summary.stopped
    config.checkpoint.resume = "auto"
    assert train(config).last_step is None, "it had ended"
    config.eval.patience = 4
    assert train(config).last_step == 5


def test_another_set_has_another_best(tmp_path: Path, unbroken: RunConfig) -> None:
    config, told = evaluated(tmp_path, every_steps=2), Told()
    assert config.eval.files is not None
    Path(config.eval.files[0]).write_text("the tier streams\n" * 30)
    config.checkpoint.resume = f"{unbroken.run_dir}/checkpoints/step-00000004"
    Trainer(config, [told]).run()
    assert "evaluation: the set is another than before, so what was best is forgotten" in told.events
    assert evaluations(config)[0]["best"]


def test_a_share_of_the_samples_is_kept_from_training(tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=4)
    lines = [f"sample {i}: the tier holds {i} pages of plane {i % 7}" for i in range(40)]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines) + "\n")
    config.data.files, config.eval = [str(file)], EvalConfig(share=0.25)
    config.train.steps, config.train.epochs, config.train.log_samples = None, 1.0, True
    told = Told()
    Trainer(config, [told]).run()
    trained_on = {name for record in records(config) for name in record["sample_ids"]}
    assert len(trained_on) == 30
    (metrics,) = told.evaluations
    assert metrics.step == len(records(config))
    assert any("30 of 40 samples" in line for line in told.events)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    config = evaluated(tmp_path, every_steps=1, steps=3)
    config.checkpoint.keep_best = True
    summary = train(config)
    assert (Path(config.run_dir) / "checkpoints" / "best").exists()
    assert summary.best_step is not None


def test_files_that_are_not_there_are_told_before_anything_is_tokenised(tmp_path: Path) -> None:
    config = evaluated(tmp_path)
    config.eval.files = [str(tmp_path / "none.txt")]
    with pytest.raises(DataError, match=r"evaluation: eval\.files: '.*none\.txt' matches no file"):
        train(config)
    assert not (Path(config.run_dir) / "data" / "tokenizer").exists()


def test_nothing_to_evaluate_on_is_refused(tmp_path: Path) -> None:
    config = evaluated(tmp_path)
    assert config.eval.files is not None
    Path(config.eval.files[0]).write_text("")
    with pytest.raises(DataError, match=r"evaluation: eval\.files: the 1 files .* hold no text"):
        train(config)
