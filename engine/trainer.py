"""A run from its configuration to its last checkpoint. `Trainer.run` tells the story; `_Run` holds its
parts.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tierstream.engine import assemble, checkpoint
from tierstream.engine.config import RunConfig
from tierstream.engine.config_tree import to_plain
from tierstream.engine.data.prepare import check_packing, open_rows
from tierstream.engine.data.rows import PackedRows
from tierstream.engine.device import Device
from tierstream.engine.expert_picture import expert_picture
from tierstream.engine.expert_use import NO_COUNTS, ExpertStep
from tierstream.engine.interpreter import undisturbed
from tierstream.engine.machine import explain_profile, known_drives, load_profile
from tierstream.engine.metrics import MetricsWriter, Observer, RunDirectory, RunSummary, StepMetrics
from tierstream.engine.plan import page_warning
from tierstream.engine.plan_report import describe_plan
from tierstream.engine.router_bias import saved_biases
from tierstream.engine.router_loss import explain_router_losses
from tierstream.engine.runtime import Runtime, StepOutcome
from tierstream.engine.sweep import Batch
from tierstream.engine.trace import Trace, Track
from tierstream.engine.trace_file import write_trace
from tierstream.engine.trace_picture import picture
from tierstream.engine.trace_summary import summarise
from tierstream.engine.units import find_units
from tierstream.io import durable, memory
from tierstream.io.errors import TrainingStopped

#: Steps of a process before those that are traced: the first ones find empty tiers and cold kernels.
_WARM_UP_STEPS = 2


class Trainer:
    """Trains one model as a configuration says.

    Args:
        observer: is told the plan, every step and the end.

    Raises (from `run`):
        TierstreamError: what the user can mend, said before step 0 wherever it can be known then.
    """

    def __init__(self, config: RunConfig, observer: Observer | None = None) -> None:
        self.config = config
        self.observer = observer or Observer()

    def run(self) -> RunSummary:
        """Check, plan, fill the tiers, train, save."""
        config = self.config
        assemble.set_determinism(config)
        with ExitStack() as parts:
            run = _Run.open(config, self.observer, parts)
            parts.enter_context(undisturbed())
            metrics = parts.enter_context(MetricsWriter(run.directory.metrics_path, last_step=run.step))
            while run.step < config.train.steps:
                record = run.train_step()
                metrics.write(record)
                run.summary.add(record)
                self.observer.on_step(record)
                run.check_skips()
                every = config.checkpoint.every_steps
                last = run.step == config.train.steps
                if (every is not None and run.step % every == 0) or (last and config.checkpoint.at_end):
                    run.save()
            run.end_trace()
            run.draw_experts()
            run.runtime.flush()
            run.summary.drives = run.tier.totals() if run.tier else {}
            if run.summary.last_step is not None:  # else nothing was left to do, and the result stands
                run.directory.write_result(run.summary)
        self.observer.on_end(run.summary)
        return run.summary


class _Run:
    """The parts of a run in training, and how far it has come. `step` counts steps done; data and loss know
    nothing else.
    """

    def __init__(
        self,
        config: RunConfig,
        observer: Observer,
        directory: RunDirectory,
        rows: PackedRows,
        runtime: Runtime,
        tier: assemble.Drives | None,
        state: dict[str, Any],
    ) -> None:
        self.config, self.observer, self.directory = config, observer, directory
        self.rows, self.runtime, self.tier = rows, runtime, tier
        self._experts, self._cache_before = runtime.expert_use(), NO_COUNTS
        self.run_id: str = state["run_id"]
        self.settings: dict[str, Any] = state["settings"]
        self.step = self._first_step = int(state["step"])
        self.skipped_total: int = state["skipped_total"]
        self.skipped_in_a_row: int = state["skipped_in_a_row"]
        self.summary = RunSummary()
        self._before = runtime.traffic()

    @classmethod
    def open(cls, config: RunConfig, observer: Observer, parts: ExitStack) -> _Run:
        """Everything before step 0; what is opened is closed by `parts`, last first."""
        run_dir = Path(config.run_dir)
        model, hf_config = assemble.build_model(config, parts)
        check_packing(config.data, hf_config)
        identity = _RunIdentity(run_dir)
        snapshot = checkpoint.find_resume(config.checkpoint.resume, run_dir / "checkpoints", identity.read())
        directory = parts.enter_context(RunDirectory(run_dir, resume=config.checkpoint.resume != "none"))
        state = _first_state() if snapshot is None else dict(snapshot.state)
        settings = _settings(config, hf_config)
        if snapshot is not None:
            checkpoint.check_same_run(state["settings"], settings, config.checkpoint.allow_changed)
        directory.write_config(config)
        identity.write(state["run_id"])
        units = find_units(model, experts_apart=config.moe.experts_apart)
        device = Device(config.train.device)
        plan, layout = assemble.plan_run(config, units, hf_config, device)
        # Whatever is cheap to know comes before the data: tokenising a corpus takes hours.
        weights = assemble.plan_weights(config, model)
        profile = load_profile(config.tiers)
        assemble.check_space(config, plan, run_dir)
        paths = assemble.check_paths(config)
        rows = open_rows(
            config.data, config.model, directory.data, vocab_size=hf_config.vocab_size, seed=config.train.seed
        )
        checkpoint.check_same_data(state.get("data_fingerprint"), rows.fingerprint)
        for line in explain_profile(config.tiers, profile):
            observer.on_event(line)
        known = known_drives(config.tiers, profile)
        tier = assemble.open_drives(config, layout, {"run_id": state["run_id"]}, known, paths)
        if tier is not None:
            parts.callback(tier.close)
        trace = Trace()
        store = assemble.build_store(config, layout, plan, tier, device, config.train.debug, trace)
        parts.callback(store.close)
        for reason in filter(None, (page_warning(config.tiers, plan), store.pageable_reason)):
            observer.on_event(f"warning: {reason}")
        origin = assemble.fill_state(config, model, units, layout, store, snapshot, weights, device)
        runtime = assemble.build_runtime(
            config, model, units, layout, plan, store, device, state["applied_updates"], trace
        )
        parts.callback(runtime.close)
        observer.on_event(f"data: {rows.store.origin}")
        observer.on_event(f"state: {origin}")
        left = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in units.not_decayed()})
        for line in explain_router_losses(config.moe, model):
            observer.on_event(line)
        observer.on_event(f"weight decay: {len(units.decayed())} tensors; not on {', '.join(left) or 'any'}")
        run = cls(config, observer, directory, rows, runtime, tier, state | {"settings": settings})
        observer.on_plan(describe_plan(config, units, layout, plan, runtime, tier, device, profile, run.step))
        return run

    def train_step(self) -> StepMetrics:
        """One step, and its record."""
        config = self.config
        self._start_or_end_trace()
        begin = time.perf_counter()
        packed = self.rows.batch(self.step, config.train.rows_per_step)
        device = self.runtime.device.torch_device
        ids, labels, positions = (
            torch.from_numpy(array).to(device)
            for array in (packed.input_ids, packed.labels, packed.position_ids)
        )
        padding = None if packed.padding is None else torch.from_numpy(packed.padding).to(device)
        batch = Batch(ids, labels, positions, packed.trained_tokens, padding)
        # Random numbers (dropout) are a function of (seed, step): a resumed run needs no generator state.
        torch.manual_seed((config.train.seed * 1_000_003 + self.step) % 2**63)
        outcome = self.runtime.step(batch)
        self.step += 1
        if batch.trained_tokens:  # a step without any says nothing of the gradients
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if outcome.verdict.skipped else 0
        self.skipped_total += outcome.verdict.skipped
        return self._record(outcome, batch, time.perf_counter() - begin)

    def check_skips(self) -> None:
        """Raises TrainingStopped after too many skipped steps in a row; what was learnt before is saved."""
        if self.skipped_in_a_row >= self.config.optimizer.max_skipped_in_a_row:
            self.summary.stopped = (
                f"{self.skipped_in_a_row} steps in a row, the last of them step {self.step}, had a gradient "
                f"that is not finite ({self.skipped_total} skipped in all); weights and optimizer are those "
                f"after {self.runtime.applied_updates} updates"
            )
            if self.config.checkpoint.at_end or self.config.checkpoint.every_steps is not None:
                self.save()
            self.end_trace()
            self.summary.drives = self.tier.totals() if self.tier else {}
            self.directory.write_result(self.summary)
            raise TrainingStopped(
                f"{self.summary.stopped}. Lower optimizer.lr or look at the data of these steps; "
                "optimizer.max_skipped_in_a_row sets the limit"
            )

    def save(self) -> None:
        """Write a checkpoint of the steps done so far."""
        begin = time.perf_counter()
        self.runtime.flush()
        state = {
            "run_id": self.run_id,
            "step": self.step,
            "applied_updates": self.runtime.applied_updates,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
            "data_fingerprint": self.rows.fingerprint,
            "router_biases": saved_biases(self.runtime.model),
            "settings": self.settings,
        }
        with self.runtime.trace.span(Track.HOST, "checkpoint"):
            path = checkpoint.save(
                self.runtime.store, self.directory.checkpoints, self.step, state, self.config.checkpoint.keep
            )
        self.summary.checkpoint = str(path)
        self.observer.on_event(f"checkpoint {path} ({time.perf_counter() - begin:.1f} s)")

    def _start_or_end_trace(self) -> None:
        """Record `train.trace_steps` steps, from the third of this process on."""
        done, wanted = self.step - self._first_step, self.config.train.trace_steps
        if wanted and done == _WARM_UP_STEPS:
            self.runtime.trace.start(self.step + 1)
        elif wanted and done == _WARM_UP_STEPS + wanted:
            self.end_trace()

    def end_trace(self) -> None:
        """Write down what was recorded, if anything and not yet; the last step may come before all that was
        asked for.
        """
        trace = self.runtime.trace
        if not trace.recording:
            if self.config.train.trace_steps and self.summary.trace is None:
                self.observer.on_event(
                    f"warning: no trace was written: the first {_WARM_UP_STEPS} steps are not traced, and "
                    "no others were left to run"
                )
            return
        spans = trace.stop()
        write_trace(spans, self.directory.trace_path)
        durable.write_file(self.directory.trace_picture_path, picture(spans))
        self.summary.traced = summarise(spans)
        self.summary.trace = str(self.directory.trace_path)
        first, last = self.summary.traced[0].step, self.summary.traced[-1].step
        wanted, more = self.config.train.trace_steps, ""
        if len(self.summary.traced) < wanted:
            more = f", not {wanted}: the first {_WARM_UP_STEPS} are not traced, and no others were left"
        self.observer.on_event(
            f"trace of steps {first} to {last}{more}: {self.summary.trace}, a picture of one: "
            f"{self.directory.trace_picture_path}"
        )

    def draw_experts(self) -> None:
        """Say which experts had tokens, and write down a picture of it."""
        use, path = self._experts, self.directory.expert_picture_path
        if use is not None and use.count:
            durable.write_file(path, expert_picture(use, f"{use.count} steps"))
            self.observer.on_event(f"{use.describe()}; tokens of each: {path}")

    def _expert_step(self) -> ExpertStep | None:
        """Of the step that has just ended."""
        cache = self.runtime.experts
        if self._experts is None or cache is None:
            return None
        moved, self._cache_before = cache.counts.since(self._cache_before), cache.counts
        return self._experts.add(self.runtime.expert_tokens(), moved)

    def _record(self, outcome: StepOutcome, batch: Batch, seconds: float) -> StepMetrics:
        now, before = self.runtime.traffic(), self._before
        self._before = now
        verdict = outcome.verdict
        moved = now.since(before)
        return StepMetrics(
            step=self.step,
            optimizer_step=self.runtime.applied_updates,
            loss=outcome.loss,
            router_aux_loss=outcome.router_losses.get("aux"),
            router_z_loss=outcome.router_losses.get("z"),
            grad_norm=verdict.grad_norm,
            clip_factor=verdict.clip_factor,
            lr=verdict.lr,
            skipped=verdict.skipped,
            skipped_total=self.skipped_total,
            tokens=batch.input_ids.numel(),
            trained_tokens=batch.trained_tokens,
            step_s=seconds,
            tokens_per_s=batch.input_ids.numel() / seconds,
            stall_s=self.runtime.trace.take_stalls(),
            tier_wait_s=moved.wait_s,
            bytes_read=moved.bytes_read,
            bytes_written=moved.bytes_written,
            cache_hits=moved.hits,
            cache_misses=moved.misses,
            experts=self._expert_step() if batch.trained_tokens else None,
            host_peak_bytes=memory.peak_rss_bytes(),
            gpu_peak_bytes=self.runtime.device.peak_bytes(),
        )


class _RunIdentity:
    """`run_id` in the run directory: tells this run's checkpoints from others that lie beside them."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "run_id"

    def read(self) -> str | None:
        return self._path.read_text().strip() if self._path.is_file() else None

    def write(self, run_id: str) -> None:
        durable.write_file(self._path, f"{run_id}\n".encode())


def _first_state() -> dict[str, Any]:
    return {
        "run_id": uuid.uuid4().hex,
        "step": 0,
        "applied_updates": 0,
        "skipped_total": 0,
        "skipped_in_a_row": 0,
    }


def _settings(config: RunConfig, hf_config: Any) -> dict[str, Any]:
    """The run file and the model's architecture, as JSON values: what a resume compares."""
    architecture = json.loads(hf_config.to_json_string(use_diff=False))
    for key in ("transformers_version", "_name_or_path"):
        architecture.pop(key, None)
    return json.loads(json.dumps(to_plain(config) | {"architecture": architecture}))
