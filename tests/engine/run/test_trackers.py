"""Trackers are told every step once, over kills and resumes, and never end a run. TensorBoard is real; wandb
and trackio are stand-ins that remember their calls.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.runs import dump, make_run, records, train
from support.steps import record

from tierstream.engine.config import RunConfig
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import EvalMetrics, PlanReport, Sample, StepMetrics
from tierstream.engine.run.callbacks import Callback, Callbacks
from tierstream.engine.run.scalars import step_scalars
from tierstream.engine.run.trackers import open_trackers
from tierstream.io.errors import ConfigError

Fake = dict[str, Any]
EVALUATION = EvalMetrics(
    step=2, loss=2.5, perplexity=12.2, trained_tokens=10, seconds=1.0, tokens_per_s=10.0, best=True
)
SAMPLE = Sample(step=2, prompt="The tide", text=" is out", tokens=3, seconds=0.5)


def plan(first_step: int) -> PlanReport:
    return PlanReport(
        parameters=1, tokens_per_step=1, first_step=first_step, last_step=9, dtypes={}, tiers=(),
        bound_s={"compute": 0.25},
    )  # fmt: skip


class Events(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, text: str) -> None:
        self.texts.append(text)


def run_steps(config: RunConfig, first: int, last: int, *, close: bool = True) -> list[str]:
    """What `Trainer` does with trackers, without the training. Returns the events."""
    events, trackers = Events(), open_trackers(config)
    callbacks, path = Callbacks([events, *trackers]), Path(config.run_dir) / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    callbacks.on_plan(plan(first))
    with RecordWriter(path, StepMetrics, last_step=first - 1) as writer:
        for step in range(first, last + 1):
            writer.write(record(step))
            callbacks.on_step(record(step))
    for tracker in trackers if close else []:
        tracker.close()
    return events.texts


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """wandb and trackio: the arguments of `init`, and of each run what it was sent."""
    made: dict[str, Fake] = {}
    for name in ("wandb", "trackio"):
        fake = made[name] = {"inits": [], "steps": {}, "finished": 0, "offline": False}
        fake["fail"] = lambda step: None
        module: Any = ModuleType(name)
        module.Settings = lambda **settings: settings
        module.init = _init(fake)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def _init(fake: Fake) -> Callable[..., object]:
    def init(**arguments: Any) -> object:
        fake["inits"].append(arguments)
        steps = fake["steps"].setdefault(arguments.get("id") or arguments["name"], [])

        def log(values: dict[str, float], *, step: int) -> None:
            fake["fail"](step)
            steps.append((step, values))

        def finish() -> None:
            fake["finished"] += 1

        following = max((step for step, _ in steps), default=-1) + 1
        return SimpleNamespace(log=log, finish=finish, offline=fake["offline"], step=following)

    return init


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = make_run(tmp_path)
    made.log.wandb, made.log.trackio = "boats", "ships"
    return made


def shown(fake: Fake) -> list[int]:
    (steps,) = fake["steps"].values()
    return [step for step, _ in steps]


def test_scalars_have_units_and_keep_what_is_no_number() -> None:
    values = step_scalars(record(4, loss=math.nan, grad_norm=math.inf, router_aux_loss=1.5), 0.25)
    assert math.isnan(values["train/loss_nats"])
    assert math.isnan(values["train/perplexity"])
    assert values["train/grad_norm"] == math.inf
    assert values["train/bound_percent"] == 50
    assert values["tier/dram_hit_percent"] == 75
    assert values["tier/nvme_read_bytes"] == 4096
    assert values["stall/weights_s"] == 0.125
    assert values["router/aux_loss"] == 1.5
    assert step_scalars(record(1, loss=1e6), None)["train/perplexity"] == math.inf


def test_a_run_is_told_once_over_its_resumes(services: dict[str, Fake], config: RunConfig) -> None:
    """Steps after the checkpoint run twice; the project sees them once, and the run under one name."""
    assert run_steps(config, 1, 5, close=False) == []
    assert run_steps(config, 4, 7) == []
    for name, project in (("wandb", "boats"), ("trackio", "ships")):
        fake = services[name]
        assert shown(fake) == [1, 2, 3, 4, 5, 6, 7]
        first, second = fake["inits"]
        assert first == second
        assert (first["project"], first["resume"]) == (project, "allow")
        assert first["name"].startswith("run-")
        assert first["config"]["optimizer"]["lr"] == 1e-2
        assert fake["finished"] == 1


def test_evaluations_and_samples_are_told_with_their_step(
    services: dict[str, Fake], config: RunConfig
) -> None:
    """Those of the past too, between the steps where they were made."""
    config.log.wandb = config.log.trackio = None
    run_steps(config, 1, 3)
    folder = Path(config.run_dir)
    (folder / "evaluations.jsonl").write_text(f"{EVALUATION.to_json()}\n")
    (folder / "samples.jsonl").write_text(f"{SAMPLE.to_json()}\n")
    config.log.wandb, config.log.trackio = "boats", "ships"
    trackers = open_trackers(config)
    callbacks = Callbacks(trackers)
    callbacks.on_plan(plan(4))
    callbacks.on_evaluation(replace(EVALUATION, step=4, loss=math.nan))
    callbacks.on_sample(replace(SAMPLE, step=4))
    for fake in services.values():
        (steps,) = fake["steps"].values()
        assert [step for step, _ in steps] == [1, 2, 2, 2, 3, 4, 4]
        assert steps[2][1]["eval/loss_nats"] == 2.5
        assert steps[3][1] == steps[6][1] == {"sample/The tide": " is out"}
        assert math.isnan(steps[5][1]["eval/loss_nats"])


def test_a_run_that_had_no_tracker_before_shows_its_whole_past(
    services: dict[str, Fake], config: RunConfig
) -> None:
    config.log.wandb = config.log.trackio = None
    run_steps(config, 1, 5)
    config.log.wandb, config.log.trackio = "boats", "ships"
    run_steps(config, 4, 6)
    assert shown(services["wandb"]) == shown(services["trackio"]) == [1, 2, 3, 4, 5, 6]


def test_offline_every_process_writes_its_own_steps(services: dict[str, Fake], config: RunConfig) -> None:
    services["wandb"]["offline"] = True
    run_steps(config, 1, 3)
    run_steps(config, 3, 4)
    assert shown(services["wandb"]) == [1, 2, 3, 3, 4]


def test_a_name_is_the_run_s_own(services: dict[str, Fake], config: RunConfig) -> None:
    config.log.name = "Endeavour"
    run_steps(config, 1, 1)
    assert services["wandb"]["inits"][0]["name"] == services["trackio"]["inits"][0]["name"] == "Endeavour"


def test_a_failing_tracker_is_dropped_with_one_warning(services: dict[str, Fake], config: RunConfig) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise OSError("no route\nto host")

    services["wandb"]["fail"] = fail
    assert run_steps(config, 1, 4) == [
        "warning: wandb is told no more of this run, which goes on: OSError: no route to host"
    ]
    assert shown(services["wandb"]) == [1]
    assert shown(services["trackio"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_told_before_anything_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierstream.engine.trainer import Trainer

    monkeypatch.setitem(sys.modules, name, None)
    config = make_run(tmp_path)
    setattr(config.log, name, "boats")
    with pytest.raises(ConfigError, match=rf"log\.{name} is set, but .* pip install 'tierstream\[{name}\]'"):
        Trainer(config)


def tensorboard(config: RunConfig) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader shows: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(Path(config.run_dir) / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


_KILLED = """
import os, sys
from tierstream import Callback, RunConfig, Trainer
class Kill(Callback):
    def on_step(self, metrics):
        if metrics.step == 5:
            os._exit(9)
Trainer(RunConfig.from_file(sys.argv[1]), [Kill()]).run()
"""


def test_tensorboard_shows_every_step_of_a_killed_and_resumed_run_once(tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=6)
    config.log.tensorboard, config.checkpoint.every_steps = True, 3
    file = dump(config, tmp_path / "run.yaml")
    done = subprocess.run([sys.executable, "-c", _KILLED, str(file)], env=os.environ, capture_output=True)
    assert done.returncode == 9, done.stderr
    assert [step for step, _ in tensorboard(config)["train/loss_nats"]] == [1, 2, 3, 4]
    config.checkpoint.resume = "auto"
    train(config)
    found = tensorboard(config)
    for tag, key in (("train/loss_nats", "loss"), ("train/grad_norm", "grad_norm"), ("train/lr", "lr")):
        assert [step for step, _ in found[tag]] == [1, 2, 3, 4, 5, 6]
        values = [value for _, value in found[tag]]
        assert values == pytest.approx([made[key] for made in records(config)], rel=1e-6)
    assert all(len(values) == 6 for values in found.values())


def test_tensorboard_of_a_run_that_goes_on_within_a_second_comes_last(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config.log.tensorboard = True
    directory = Path(config.run_dir) / "tensorboard"
    directory.mkdir(parents=True)
    while time.time() % 1 > 0.5:
        time.sleep(0.01)
    earlier = directory / f"events.out.tfevents.{int(time.time())}.zzz.1.0"
    earlier.touch()
    (tracker,) = open_trackers(config)
    Callbacks([tracker]).on_plan(plan(1))
    tracker.close()
    assert [path == earlier for path in sorted(directory.iterdir())] == [True, False]


def test_tensorboard_keeps_what_is_no_number(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config.log.tensorboard = True
    trackers = open_trackers(config)
    Callbacks(trackers).on_plan(plan(1))
    trackers[0].on_step(record(1, loss=math.nan, grad_norm=math.inf))
    trackers[0].on_evaluation(EVALUATION)
    trackers[0].on_sample(SAMPLE)
    trackers[0].close()
    found = tensorboard(config)
    assert found["eval/loss_nats"] == [(2, 2.5)]
    assert math.isnan(found["train/loss_nats"][0][1])
    assert found["train/grad_norm"][0][1] == math.inf
