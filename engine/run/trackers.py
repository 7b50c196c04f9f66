"""A run shown by TensorBoard, Weights & Biases or Trackio.

No tracker may end a run: what it raises once the run has begun becomes a warning, and the tracker is dropped.
A resumed run goes on in the place where the run before it was shown: steps that run again are neither doubled
nor lost. What that place is called is kept in `run_dir/trackers.json`.

wandb and trackio need the network or a server of their own; tests talk to stand-ins for them.
"""

from __future__ import annotations

import heapq
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tierstream.engine.config_tree import to_plain
from tierstream.engine.json_lines import each_record
from tierstream.engine.metrics import EvalMetrics, PlanReport, Sample, StepMetrics, each_step
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.run.scalars import eval_scalars, step_scalars
from tierstream.io import durable
from tierstream.io.errors import ConfigError

if TYPE_CHECKING:
    from tierstream.engine.config import RunConfig

#: What a service is told of.
Told: TypeAlias = "StepMetrics | EvalMetrics | Sample"


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Who is shown the run, beside the screen and metrics.jsonl."""

    tensorboard: bool = False
    """Write run_dir/tensorboard for TensorBoard; needs tierstream[tensorboard]."""
    wandb: str | None = None
    """Project in Weights & Biases; needs tierstream[wandb]. WANDB_MODE=offline is respected."""
    trackio: str | None = None
    """Project in Trackio; needs tierstream[trackio]."""
    name: str | None = None
    """Name of the run in wandb and trackio; null: that of run_dir, and some digits."""


class Service(ABC):
    """One tracker, made for one run. Its construction imports its package and does nothing else."""

    @abstractmethod
    def open(self, config: RunConfig, plan: PlanReport) -> int:
        """Begin, or go on with what a process before this one began. Returns the newest step that is there
        already and will not be sent again.
        """

    @abstractmethod
    def send(self, values: Mapping[str, float | str], step: int) -> None:
        """More of a step, which is not before that of the last call."""

    @abstractmethod
    def close(self) -> None: ...


class Tracker(Callback):
    """Tells one service of a run."""

    def __init__(self, name: str, service: Service, config: RunConfig) -> None:
        self._name, self._config = name, config
        self._service: Service | None = service  # None: dropped, or closed
        self._newest_step = 0
        self._bound_s: float | None = None

    def on_plan(self, plan: PlanReport) -> None:
        self._bound_s = plan.bound[1] if plan.bound is not None else None
        self._attempt(lambda service: self._open(service, plan))

    def on_step(self, metrics: StepMetrics) -> None:
        self._attempt(lambda service: self._send(service, metrics))

    def on_evaluation(self, metrics: EvalMetrics) -> None:
        self._attempt(lambda service: self._send(service, metrics))

    def on_sample(self, sample: Sample) -> None:
        self._attempt(lambda service: self._send(service, sample))

    def close(self) -> None:
        """End it, if it is not yet."""
        self._attempt(lambda service: service.close())
        self._service = None

    def _open(self, service: Service, plan: PlanReport) -> None:
        self._newest_step = service.open(self._config, plan)
        if self._newest_step + 1 < plan.first_step:
            for record in _past(Path(self._config.run_dir)):
                if record.step < plan.first_step:
                    self._send(service, record)

    def _send(self, service: Service, record: Told) -> None:
        if record.step <= self._newest_step:
            return
        if isinstance(record, StepMetrics):
            values: Mapping[str, float | str] = step_scalars(record, self._bound_s)
        elif isinstance(record, EvalMetrics):
            values = eval_scalars(record)
        else:
            values = {f"sample/{record.prompt[:40]}": record.text}
        service.send(values, record.step)

    def _attempt(self, action: Callable[[Service], None]) -> None:
        """Whatever happens in there, the run goes on."""
        if self._service is None:
            return
        try:
            action(self._service)
        except Exception as error:
            self._service = None
            what = " ".join(f"{type(error).__name__}: {error}".split())
            self.control.tell(f"warning: {self._name} is told no more of this run, which goes on: {what}")


def _past(run_dir: Path) -> Iterator[Told]:
    """What the processes before this one have written, in the order in which they did."""
    files = (("metrics.jsonl", StepMetrics), ("evaluations.jsonl", EvalMetrics), ("samples.jsonl", Sample))
    streams = [each_record(run_dir / name, kind) for name, kind in files if (run_dir / name).exists()]
    return heapq.merge(*streams, key=lambda record: record.step)


def open_trackers(config: RunConfig) -> list[Tracker]:
    """Those that `log` wants.

    Raises:
        ConfigError: a package is missing.
    """
    log = config.log
    wanted: dict[str, Callable[[], Service]] = {}
    if log.tensorboard:
        wanted["tensorboard"] = TensorBoard
    if log.wandb is not None:
        wanted["wandb"] = WeightsAndBiases
    if log.trackio is not None:
        wanted["trackio"] = Trackio
    return [Tracker(name, _made(name, make), config) for name, make in wanted.items()]


def _made(name: str, make: Callable[[], Service]) -> Service:
    try:
        return make()
    except ImportError as error:
        off = "false" if name == "tensorboard" else "null"
        raise ConfigError(
            f"log.{name} is set, but its package cannot be imported ({error}); install it with "
            f"pip install 'tierstream[{name}]', or set log.{name} to {off}"
        ) from error


class TensorBoard(Service):
    """Event files in run_dir/tensorboard. A resumed run has the reader forget the steps that run again."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._writer: Any = None

    def open(self, config: RunConfig, plan: PlanReport) -> int:
        directory = Path(config.run_dir) / "tensorboard"
        # Readers take files in the order of their names, which begin with the second: that of a run which
        # goes on within the second of the one before it could come first, and its steps be forgotten.
        seconds = (path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*.*"))
        before = max((int(second) for second in seconds if second.isdecimal()), default=0)
        time.sleep(min(1.0, max(0.0, before + 1 - time.time())))
        self._writer = self._make(str(directory), purge_step=plan.first_step)
        return plan.first_step - 1

    def send(self, values: Mapping[str, float | str], step: int) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)
        self._writer.flush()  # a killed run has shown all steps of its checkpoint

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Service):
    """A run of wandb; its server keeps the first of two values of a step."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def open(self, config: RunConfig, plan: PlanReport) -> int:
        identity, _ = _identity(config, f"wandb: {config.log.wandb}")
        self._run = self._wandb.init(
            project=config.log.wandb, id=identity, name=config.log.name or _own_name(config, identity),
            dir=config.run_dir, config=to_plain(config), resume="allow",
            settings=self._wandb.Settings(console="off"),  # the screen is the run's own
        )  # fmt: skip
        # Offline nobody knows what the server has.
        return plan.first_step - 1 if self._run.offline else self._run.step - 1

    def send(self, values: Mapping[str, float | str], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackio(Service):
    """A run of Trackio, which knows it by its name. What was sent is known from metrics.jsonl: up to the last
    record of the process before this one.
    """

    def __init__(self) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = None

    def open(self, config: RunConfig, plan: PlanReport) -> int:
        identity, is_new = _identity(config, f"trackio: {config.log.trackio}")
        name = config.log.name or _own_name(config, identity)
        self._run = self._trackio.init(
            project=config.log.trackio, name=name, config=to_plain(config), resume="allow"
        )
        before = Path(config.run_dir) / "metrics.jsonl"
        if is_new or not before.exists():
            return 0
        return max((metrics.step for metrics in each_step(before)), default=0)

    def send(self, values: Mapping[str, float | str], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _identity(config: RunConfig, place: str) -> tuple[str, bool]:
    """What the run is called in `place`, and whether it is new there."""
    path = Path(config.run_dir) / "trackers.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    is_new = place not in known
    if is_new:
        known[place] = uuid.uuid4().hex[:12]
        durable.write_file(path, (json.dumps(known, indent=2) + "\n").encode())
    return known[place], is_new


def _own_name(config: RunConfig, identity: str) -> str:
    return f"{Path(config.run_dir).resolve().name}-{identity[:6]}"
