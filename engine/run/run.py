"""The parts of a run, opened in order; one step with its record; and how the run ends."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tierstream.engine import assemble, checkpoint
from tierstream.engine.checkpoint import Damaged
from tierstream.engine.config import RunConfig
from tierstream.engine.config_tree import to_plain
from tierstream.engine.data.chat import given_template
from tierstream.engine.data.holdout import hold_out
from tierstream.engine.data.prepare import check_packing, open_data, position_warning
from tierstream.engine.data.rows import Batch as PackedBatch
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.shards import TokenStore
from tierstream.engine.data.stream import StreamedRows, open_stream
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import explain_profile, known_drives, load_profile
from tierstream.engine.metrics import RunSummary, StepMetrics
from tierstream.engine.model.build import build_model
from tierstream.engine.model.carve import units_of_run
from tierstream.engine.moe.picture import expert_picture
from tierstream.engine.moe.router_bias import saved_biases
from tierstream.engine.moe.router_loss import explain_router_losses
from tierstream.engine.moe.use import NO_COUNTS, ExpertStep
from tierstream.engine.nvme_dirs import check_nvme_dirs
from tierstream.engine.page_size import page_warning
from tierstream.engine.parity.gate import pass_gate
from tierstream.engine.plan_report import describe_plan
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.run.directory import RunDirectory
from tierstream.engine.run.evaluation import check_eval_files, open_eval_rows
from tierstream.engine.run.interludes import Interludes
from tierstream.engine.run.placing import placed
from tierstream.engine.run.saving import Saver
from tierstream.engine.run.step_notes import StepNotes
from tierstream.engine.run.trace import RunTrace
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import Runtime, StepOutcome
from tierstream.engine.trace.trace import Trace
from tierstream.engine.update.optimizer import check_schedule
from tierstream.engine.weights.fill import FirstValues
from tierstream.io import durable, memory
from tierstream.io.errors import TierstreamError, TrainingStopped


class Run:
    """The parts of a run in training, and how far it has come.

    Attributes:
        step: steps done; data and loss know nothing else.
        total_steps: of the whole run.
        failure: why the run cannot go on; raised by `finish`.
    """

    def __init__(
        self,
        config: RunConfig,
        callbacks: Callbacks,
        directory: RunDirectory,
        rows: Rows | StreamedRows,
        runtime: Runtime,
        tier: assemble.Drives | None,
        interludes: Interludes,
        state: dict[str, Any],
        damaged: Damaged,
    ) -> None:
        self.config, self.callbacks, self.directory = config, callbacks, directory
        self.rows, self.runtime, self._tier, self._interludes = rows, runtime, tier, interludes
        self._experts, self._cache_before = runtime.expert_use(), NO_COUNTS
        self._identity = {key: state[key] for key in ("run_id", "settings", "dtypes", "chat_template")}
        self.step = int(state["step"])
        self.total_steps = _total_steps(config, rows)
        self._skipped_total: int = state["skipped_total"]
        self._skipped_in_a_row: int = state["skipped_in_a_row"]
        self.failure: TierstreamError | None = None
        self.summary = RunSummary()
        self._notes = StepNotes(config.optimizer)
        spared = [path.name for path in damaged]
        self._saver = Saver(config.checkpoint, directory.checkpoints, runtime, callbacks, damaged=spared)
        self._trace = RunTrace(config.train.trace_steps, runtime.trace, directory, callbacks, self.step)
        self._before = runtime.traffic()

    @classmethod
    def open(cls, config: RunConfig, callbacks: Callbacks, parts: ExitStack, damaged: Damaged) -> Run:
        """All before step 0, closed by `parts`. Raises DamagedPageError: the checkpoint is one more."""
        check_nvme_dirs(config.tiers.nvme_dirs or [])
        run_dir = Path(config.run_dir)
        verdict = pass_gate(config.model, callbacks.on_event)
        model, hf_config = build_model(config, parts)
        check_packing(config.data, config.model.attention, verdict)
        identity = _RunIdentity(run_dir)
        resume, kept = config.checkpoint.resume, run_dir / "checkpoints"
        snapshot = checkpoint.find_resume(resume, kept, identity.read(), callbacks.on_event, damaged)
        directory = parts.enter_context(RunDirectory(run_dir, resume=resume != "none"))
        state = _first_state() if snapshot is None else dict(snapshot.state)
        settings = _settings(config, hf_config)
        if snapshot is not None:
            checkpoint.check_same_run(state["settings"], settings, config.checkpoint.allow_changed)
        directory.write_config(config)
        identity.write(state["run_id"])
        units = units_of_run(model, config.moe, config.optimizer)
        device = Device(config.train.device)
        profile, vocabulary = load_profile(config.tiers), hf_config.get_text_config().vocab_size
        config, plan, layout = placed(config, profile, device, units, vocabulary, callbacks.on_event)
        # Whatever is cheap to know comes before the data: tokenising a corpus takes hours.
        start = FirstValues(config, model, units, snapshot, assemble.plan_weights(config, model))
        assemble.check_space(config, plan, run_dir)
        paths = assemble.check_paths(config)
        rows, eval_rows = _open_rows(config, directory, hf_config, callbacks, state.get("data_cursor"), parts)
        checkpoint.check_same_data(state.get("data_fingerprint"), rows.fingerprint)
        check_schedule(config.optimizer, _total_steps(config, rows))
        for line in explain_profile(config.tiers, profile):
            callbacks.on_event(line)
        known = known_drives(config.tiers, profile)
        tier = assemble.open_drives(config, layout, {"run_id": state["run_id"]}, known, paths, start.identity)
        if tier is not None:
            parts.callback(tier.close)
        trace = Trace()
        store = assemble.build_store(config, layout, plan, tier, device, config.train.debug, trace)
        parts.callback(store.close)
        for reason in filter(None, (page_warning(config.tiers, plan), store.pageable_reason)):
            callbacks.on_event(f"warning: {reason}")
        origin = start.fill(layout, store, device, tier.directory if tier else None, callbacks)
        runtime = assemble.build_runtime(
            config, model, units, layout, plan, store, device, total_updates=_total_steps(config, rows),
            applied_updates=state["applied_updates"], trace=trace,
        )  # fmt: skip
        parts.callback(runtime.close)
        for line in (f"state: {origin}", *explain_router_losses(config.moe, model), *units.describe()):
            callbacks.on_event(line)
        interludes = Interludes(config, rows, eval_rows, runtime, callbacks, directory, state, parts)
        first, total = int(state["step"]), _total_steps(config, rows)
        report = describe_plan(config, units, layout, plan, runtime, tier, device, profile, first, total)
        state |= {
            "settings": settings,
            "dtypes": dict(report.dtypes),
            "chat_template": given_template(config.data),  # its file may be gone when the model is exported
        }
        run = cls(config, callbacks, directory, rows, runtime, tier, interludes, state, damaged)
        parts.enter_context(run._saver)
        directory.write_plan(report)
        callbacks.on_plan(report)
        return run

    @property
    def goes_on(self) -> bool:
        """Whether there is a next step."""
        stopped = self.failure is not None or self.callbacks.control.stop_reason is not None
        return self.step < self.total_steps and not stopped

    def train_step(self) -> StepMetrics:
        """One step, and its record."""
        config = self.config
        self._trace.begin_step(self.step)
        begin = time.perf_counter()
        packed = self.rows.batch(self.step)
        batch = Batch.of(packed, self.runtime.device.torch_device)
        # Random numbers (dropout) are a function of (seed, step): a resumed run needs no generator state.
        torch.manual_seed(config.train.seed_of_step(self.step))
        outcome = self.runtime.step(batch)
        self.step += 1
        if batch.trained_tokens:  # a step without any says nothing of the gradients
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if outcome.verdict.skipped else 0
        self._skipped_total += outcome.verdict.skipped
        record = self._record(outcome, packed, time.perf_counter() - begin)
        self.summary.add(record)
        return record

    def after_step(self, record: StepMetrics) -> None:
        """What is due once the record of a step is written."""
        for line in self._notes.of(record, self._skipped_in_a_row):
            self.callbacks.on_event(line)
        self._check_skips()
        last = self.step == self.total_steps
        if self.failure is None and self._interludes.after_step(self.step, last=last):
            self._leave_out()
        self._saver.after_step(self.step, self._state)

    def _leave_out(self) -> None:
        """What was moved and waited for since the step is not of the next one."""
        self.runtime.trace.take_stalls()
        self._before = self.runtime.traffic()
        if self.runtime.experts is not None:
            self._cache_before = self.runtime.experts.counts

    def finish(self) -> None:
        """Save the last step, and write down what is known at the end. Raises `failure`."""
        stopped, settings = self.failure is not None or self.step < self.total_steps, self.config.checkpoint
        has_run = self.summary.last_step is not None  # else nothing was left to do, and the result stands
        save = has_run and (settings.at_end or (stopped and settings.on_the_way))
        self._saver.finish(self.step, self._state, save=save)
        self.runtime.flush()
        self._trace.end(self.summary)
        self._draw_experts()
        self.summary.checkpoint = str(self._saver.newest) if self._saver.newest else None
        self.summary.failed_checkpoints = self._saver.failed
        self.summary.drives = self._tier.totals() if self._tier else {}
        if (evaluator := self._interludes.evaluator) is not None:
            self.summary.best_loss, self.summary.best_step = evaluator.best_loss, evaluator.best_step
        if stopped:
            self.summary.stopped = str(self.failure or self.callbacks.control.stop_reason)
        if has_run:
            self.directory.write_result(self.summary)
        self.failure = self.failure or self._saver.error
        if self.failure is not None:
            raise self.failure

    def _check_skips(self) -> None:
        """After too many skipped steps in a row the run ends; what was learnt before is saved."""
        if self._skipped_in_a_row >= self.config.optimizer.max_skipped_in_a_row:
            self.failure = TrainingStopped(
                f"{self._skipped_in_a_row} steps in a row, the last of them step {self.step}, had a gradient "
                f"that is not finite ({self._skipped_total} skipped in all); weights and optimizer are those "
                f"after {self.runtime.applied_updates} updates. Lower optimizer.lr or look at the data of "
                "these steps (sample_ids in metrics.jsonl); optimizer.max_skipped_in_a_row sets the limit"
            )

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the planes."""
        evaluator = self._interludes.evaluator
        return self._identity | {
            "step": self.step,
            "applied_updates": self.runtime.applied_updates,
            "skipped_total": self._skipped_total,
            "skipped_in_a_row": self._skipped_in_a_row,
            "data_fingerprint": self.rows.fingerprint,
            "data_cursor": self.rows.cursor(self.step),
            "router_biases": saved_biases(self.runtime.model),
            "evaluation": None if evaluator is None else evaluator.state,
        }

    def _draw_experts(self) -> None:
        """Say which experts had tokens, and write down a picture of it."""
        use, path = self._experts, self.directory.expert_picture_path
        if use is not None and use.count:
            durable.write_file(path, expert_picture(use, f"{use.count} steps"))
            self.callbacks.on_event(f"{use.describe()}; tokens of each: {path}")

    def _expert_step(self) -> ExpertStep | None:
        """Of the step that has just ended."""
        cache = self.runtime.experts
        if self._experts is None or cache is None:
            return None
        moved, self._cache_before = cache.counts.since(self._cache_before), cache.counts
        return self._experts.add(self.runtime.expert_tokens(), moved)

    def _record(self, outcome: StepOutcome, packed: PackedBatch, seconds: float) -> StepMetrics:
        now, before = self.runtime.traffic(), self._before
        self._before = now
        verdict = outcome.verdict
        moved = now.since(before)
        names_wanted = self.config.train.log_samples or verdict.skipped
        return StepMetrics(
            step=self.step,
            optimizer_step=self.runtime.applied_updates,
            loss=outcome.loss,
            router_aux_loss=outcome.router_losses.get("aux"),
            router_z_loss=outcome.router_losses.get("z"),
            z_loss=outcome.z_loss,
            grad_norm=verdict.grad_norm,
            clip_factor=verdict.clip_factor,
            clip_norm=self.config.optimizer.clip_norm,
            lr=verdict.lr,
            skipped=verdict.skipped,
            skipped_total=self._skipped_total,
            epoch=self.rows.epochs(self.step),
            samples=packed.samples,
            sample_ids=self.rows.where(self.step - 1) if names_wanted else None,
            tokens=packed.input_ids.size,
            trained_tokens=packed.trained_tokens,
            step_s=seconds,
            tokens_per_s=packed.input_ids.size / seconds,
            stall_s=self.runtime.trace.take_stalls(),
            tier_wait_s=moved.wait_s,
            bytes_read=moved.bytes_read,
            bytes_written=moved.bytes_written,
            cache_hits=moved.hits,
            cache_misses=moved.misses,
            experts=self._expert_step() if packed.trained_tokens else None,
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


def _open_rows(
    config: RunConfig,
    directory: RunDirectory,
    hf_config: Any,
    callbacks: Callbacks,
    cursor: dict[str, Any] | None,
    parts: ExitStack,
) -> tuple[Rows | StreamedRows, Rows | None]:
    """The rows to train on, and those to evaluate on."""
    settings = config.data, config.model, directory.data
    rows_per_step, seed = config.train.rows_per_step, config.train.seed
    rows: Rows | StreamedRows
    held: list[TokenStore] = []
    check_eval_files(config.eval)
    if (warning := position_warning(config.data, hf_config)) is not None:
        callbacks.on_event(f"warning: {warning}")
    vocab_size = hf_config.vocab_size
    if config.data.streaming:
        rows = open_stream(
            *settings, vocab_size=vocab_size, rows_per_step=rows_per_step, seed=seed, cursor=cursor
        )
        parts.callback(rows.close)
        origins = []
    else:
        stores = open_data(*settings, vocab_size=vocab_size, on_progress=callbacks.on_progress)
        if config.eval.share is not None:
            stores, held = hold_out(stores, config.eval.share, seed)
        rows = Rows(stores, config.data, rows_per_step=rows_per_step, seed=seed)
        origins = [store.origin for store in stores]
    for line in (*origins, *rows.describe()):
        callbacks.on_event(f"data: {line}")
    if isinstance(rows, Rows) and (warning := rows.padding_warning()) is not None:
        callbacks.on_event(f"warning: {warning}")
    eval_rows = open_eval_rows(
        config, directory.data, held, vocab_size=vocab_size, on_progress=callbacks.on_progress
    )
    for line in [] if eval_rows is None else eval_rows.describe():
        callbacks.on_event(f"evaluation: {line}")
    return rows, eval_rows


def _total_steps(config: RunConfig, rows: Rows | StreamedRows) -> int:
    steps, epochs = config.train.steps, config.train.epochs
    if steps is not None:
        return steps
    assert isinstance(rows, Rows)  # with data.streaming the configuration asks for steps
    return rows.total_steps(1 if epochs is None else epochs)


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
