"""The directory of a run: what lies where, and whose it is.

    run_dir/
        config.yaml      every setting, defaults included; `tierstream train` reads it back
        run_id           tells this run's checkpoints from others
        plan.json        the `PlanReport` of the process that ran last, written before its first step
        trackers.json    names of the run where `log` shows it
        tensorboard/     event files, with `log.tensorboard`
        metrics.jsonl    one `StepMetrics` a line
        evaluations.jsonl  one `EvalMetrics` a line, if the run is evaluated
        samples.jsonl    one `Sample` a line, if there are prompts
        result.json      the `RunSummary`, written when the run ends
        trace.json       spans of `train.trace_steps` steps, if any
        trace.png        a picture of one of them
        experts.png      how many tokens went to each expert
        checkpoints/     step-00000100/, ...
        data/            what was prepared from the training data

Knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tierstream.engine.config_file import dump
from tierstream.engine.metrics import PlanReport, RunSummary
from tierstream.io import durable
from tierstream.io.drives import DirectoryLock
from tierstream.io.errors import ConfigError, storage_errors


class RunDirectory:
    """The directory of one run. As a context manager it is locked against other processes.

    Args:
        path: created if missing.
        resume: the run goes on from a checkpoint, so what is there is its own.

    Raises:
        ConfigError: it is no directory; on entering: it holds another run's results, and `resume` is off.
        StorageError: it cannot be created; on entering: another process holds it.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.plan_path = self.path / "plan.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.evaluations_path = self.path / "evaluations.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.result_path = self.path / "result.json"
        self.trace_path = self.path / "trace.json"
        self.trace_picture_path = self.path / "trace.png"
        self.expert_picture_path = self.path / "experts.png"
        self.checkpoints = self.path / "checkpoints"
        self.data = self.path / "data"
        self._lock: DirectoryLock | None = None
        for directory in (self.path, self.checkpoints, self.data):
            durable.make_directories(directory)
            if not directory.is_dir():
                raise ConfigError(f"run_dir is {self.path}, but {directory} is not a directory")
        self._resume = resume

    def _refuse_overwriting(self) -> None:
        results = (self.metrics_path, self.result_path)
        found = [file.name for file in results if file.exists() and file.stat().st_size]
        found += sorted(f"{self.checkpoints.name}/{entry.name}" for entry in self.checkpoints.iterdir())[:1]
        if found:
            raise ConfigError(
                f"run_dir {self.path} already holds a run ({', '.join(found)}); choose another run_dir, or "
                "set checkpoint.resume to auto to go on with this one"
            )

    def __enter__(self) -> RunDirectory:
        with ExitStack() as parts:
            self._lock = lock = DirectoryLock(self.path)
            parts.callback(lock.release)
            if not self._resume:
                with storage_errors("reading", self.path):
                    self._refuse_overwriting()
            parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def write_config(self, config: Any) -> None:
        """`config` (the tree of dataclasses) to `config.yaml`. Raises StorageError."""
        durable.write_file(self.config_path, dump(config).encode())

    def write_plan(self, plan: PlanReport) -> None:
        """`plan` to `plan.json`, whole or not at all. Raises StorageError."""
        self._write_json(self.plan_path, plan)

    def write_result(self, summary: RunSummary) -> None:
        """`summary` to `result.json`, whole or not at all. Raises StorageError."""
        self._write_json(self.result_path, summary)

    def _write_json(self, path: Path, record: PlanReport | RunSummary) -> None:
        text = json.dumps(dataclasses.asdict(record), indent=2)
        durable.write_file(path, (text + "\n").encode())
