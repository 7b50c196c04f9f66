"""What a run tells about itself: a record per step, the plan before it, the sum after it.
Knows nothing of torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierstream.engine.json_lines import Record, each_record
from tierstream.engine.moe.use import ExpertStep


@dataclass(kw_only=True, slots=True)
class StepMetrics(Record):
    """One step, one line of `metrics.jsonl`. Per-tier values are keyed by tier: `gpu`, `dram`, `nvme`."""

    step: int
    """Number of the step, from 1; a resumed run goes on counting."""
    optimizer_step: int
    """Updates applied once this step's own has been, skipped steps not counted: AdamW's `t`."""
    loss: float
    """Mean cross-entropy over the step's trained tokens, in nats; NaN if there are none."""
    grad_norm: float
    """Global L2 norm of the gradients *before* clipping; 0 if no token is trained on, NaN or infinite where a
    gradient is.
    """
    clip_factor: float
    """What the gradients were multiplied with: `clip_norm / grad_norm` where the norm is above; 1: not
    clipped.
    """
    lr: float
    """Learning rate of this step's update."""
    skipped: bool
    """The gradients were not finite: nothing changed. A step without a trained token changes nothing either,
    but is not counted as skipped.
    """
    skipped_total: int
    """Skipped steps of the run so far, this one included."""
    epoch: float
    """Passes over the data done after this step."""
    samples: int
    """Samples that begin in this step."""
    tokens: int
    """Positions of the step: rows times row length, padding included."""
    trained_tokens: int
    """Tokens of the step that count in the loss."""
    step_s: float
    """Wall-clock seconds of the step."""
    tokens_per_s: float
    """`tokens / step_s`."""
    stall_s: dict[str, float] = field(default_factory=dict)
    """Seconds that the computation waited, by cause."""
    tier_wait_s: dict[str, float] = field(default_factory=dict)
    """Seconds that the threads around it (upload, update, download) waited for a page, by cause. They wait
    side by side, and mostly while the computation runs: their sum says how hard a tier works, not what it
    costs.
    """
    bytes_read: dict[str, int] = field(default_factory=dict)
    """Bytes that this step took out of the tier."""
    bytes_written: dict[str, int] = field(default_factory=dict)
    """Bytes that this step put into the tier."""
    cache_hits: dict[str, int] = field(default_factory=dict)
    """Page uses that found their page in the tier."""
    cache_misses: dict[str, int] = field(default_factory=dict)
    """Page uses that had to fetch their page from the tier below."""
    clip_norm: float | None = None
    """`optimizer.clip_norm`, the limit of `grad_norm`; null: nothing is clipped."""
    sample_ids: list[str] | None = None
    """Samples that have tokens in this step, as file:line; with `train.log_samples`, and of skipped steps."""
    experts: ExpertStep | None = None
    """Experts that had tokens and what moved of them; null without experts of their own."""
    host_peak_bytes: int = 0
    """Largest resident set of the process so far."""
    gpu_peak_bytes: int = 0
    """Largest allocation on the device so far."""
    router_aux_loss: float | None = None
    """Load-balancing loss of the routers, before `moe.aux_loss_coef`; with equal loads as many as the experts
    of a token. Not part of `loss`; None: not computed.
    """
    router_z_loss: float | None = None
    """Mean of logsumexp(router logits)^2, before `moe.z_loss_coef`; likewise."""
    z_loss: float | None = None
    """Mean of logsumexp(logits)^2 over the trained tokens, before `train.z_loss_coef`; likewise."""

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """Raises ValueError or TypeError if `line` is no such record."""
        metrics = super(StepMetrics, cls).from_json(line)
        if isinstance(metrics.experts, dict):
            metrics.experts = ExpertStep.from_plain(metrics.experts)
        return metrics


@dataclass(kw_only=True, slots=True)
class EvalMetrics(Record):
    """One evaluation, one line of `evaluations.jsonl`."""

    step: int
    """After which step it was made."""
    loss: float
    """Mean cross-entropy over all trained tokens of the evaluation set, in nats."""
    perplexity: float
    """`exp(loss)`."""
    trained_tokens: int
    """Tokens that count in the loss."""
    seconds: float
    """Wall-clock seconds, with an update that was still to be carried out."""
    tokens_per_s: float
    """Positions of the set, padding included, by `seconds`."""
    best: bool
    """The loss is the lowest so far, by more than `eval.min_delta`."""


@dataclass(kw_only=True, slots=True)
class Sample(Record):
    """What the model wrote after a prompt, one line of `samples.jsonl`."""

    step: int
    """After which step."""
    prompt: str
    """As `sample.prompts` has it."""
    text: str
    """What follows the prompt, without special tokens."""
    tokens: int
    """Of it, special ones included."""
    seconds: float
    """Wall-clock seconds, of all prompts of this step together."""


@dataclass(kw_only=True, slots=True)
class TierTotals:
    """Traffic of one tier over a run."""

    bytes_read: int = 0
    """Taken out of it."""
    bytes_written: int = 0
    """Put into it."""
    hits: int = 0
    """Page uses that found their page in it."""
    misses: int = 0
    """Page uses that had to fetch their page from the tier below."""


@dataclass(kw_only=True, slots=True)
class DriveTotals:
    """What a run moved to and from one of its drives, first values of the state included."""

    path: str
    """The way that bytes took (`posix-direct`, `kvikio-compat`, ...), with the reason."""
    bytes_read: int
    """By this process."""
    bytes_written: int
    """Likewise."""
    bytes_checked: int
    """Of those read: compared with checksums, and right."""
    bytes_buffered: int
    """Moved through the page cache."""


@dataclass(kw_only=True, slots=True)
class TracedStep:
    """One step of the trace, from the spans of the device's lane `compute`."""

    step: int
    """Its number."""
    step_s: float
    """Wall-clock seconds."""
    busy_s: float
    """Of those: the lane computed."""
    idle_s: dict[str, float]
    """The rest, by cause (see `tierstream.engine.trace.summary`), longest first."""


@dataclass(kw_only=True, slots=True)
class RunSummary:
    """The sum of the steps that this process ran; `result.json`."""

    first_step: int | None = None
    """The first step that this process ran; None: none."""
    last_step: int | None = None
    """The last one."""
    loss: float | None = None
    """Loss of the last step that trained on any token."""
    best_loss: float | None = None
    """The lowest loss of an evaluation of the whole run; None: it was not evaluated."""
    best_step: int | None = None
    """The step after which it was."""
    tokens: int = 0
    """Positions of the steps, padding included."""
    trained_tokens: int = 0
    """Tokens that counted in the loss."""
    skipped_steps: int = 0
    """Steps whose gradients were not finite."""
    step_s: float = 0.0
    """Wall-clock seconds within steps."""
    stall_s: dict[str, float] = field(default_factory=dict)
    """Seconds that the computation waited, by cause."""
    tier_wait_s: dict[str, float] = field(default_factory=dict)
    """Seconds that threads waited for pages, by cause; they wait side by side."""
    tiers: dict[str, TierTotals] = field(default_factory=dict)
    """Tier -> its traffic."""
    drives: dict[str, DriveTotals] = field(default_factory=dict)
    """Directory of `tiers.nvme_dirs` -> its traffic."""
    traced: list[TracedStep] = field(default_factory=list)
    """What the device waited for in the steps of `trace.json`."""
    trace: str | None = None
    """Path of `trace.json`; None: no step was traced."""
    host_peak_bytes: int = 0
    """Largest resident set of the process."""
    gpu_peak_bytes: int = 0
    """Largest allocation on the device."""
    stopped: str | None = None
    """Why the run ended before its last step; None: it did not."""
    checkpoint: str | None = None
    """The newest complete checkpoint."""
    failed_checkpoints: int = 0
    """Checkpoints that could not be written; training went on."""

    def add(self, metrics: StepMetrics) -> None:
        """Count one more step."""
        self.first_step = metrics.step if self.first_step is None else self.first_step
        self.last_step = metrics.step
        self.loss = metrics.loss if metrics.trained_tokens else self.loss
        self.tokens += metrics.tokens
        self.trained_tokens += metrics.trained_tokens
        self.skipped_steps += metrics.skipped
        self.step_s += metrics.step_s
        self.stall_s = dict(Counter(self.stall_s) + Counter(metrics.stall_s))
        self.tier_wait_s = dict(Counter(self.tier_wait_s) + Counter(metrics.tier_wait_s))
        self.host_peak_bytes = max(self.host_peak_bytes, metrics.host_peak_bytes)
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, metrics.gpu_peak_bytes)
        for name, per_tier in (
            ("bytes_read", metrics.bytes_read),
            ("bytes_written", metrics.bytes_written),
            ("hits", metrics.cache_hits),
            ("misses", metrics.cache_misses),
        ):
            for tier, count in per_tier.items():
                totals = self.tiers.setdefault(tier, TierTotals())
                setattr(totals, name, getattr(totals, name) + count)


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """What one tier is to hold."""

    tier: str
    """`gpu`, `dram` or `nvme`."""
    holds: str
    """What, for people."""
    used_bytes: int
    """That it takes."""
    limit_bytes: int | None = None
    """That it may take; None: no limit but the space that is free."""


@dataclass(frozen=True, kw_only=True)
class DrivePlan:
    """How one of `tiers.nvme_dirs` is worked on. Rates in bytes per second; None: not measured."""

    directory: str
    """As the run file names it."""
    path: str
    """How bytes get there (`posix-direct`, `kvikio-compat`, ...), with the reason."""
    threads: int
    """That read and write."""
    task_bytes: int
    """That one of them moves at once."""
    queue_depth: int
    """Requests under way at once."""
    share: float
    """Of the state's bytes, where space allows."""
    read: float | None
    """Bytes per second, when it is only read."""
    write: float | None
    """Likewise."""
    mixed: float | None
    """Reads and writes side by side, both counted."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What is known before step 0; `plan.json`, of the process that ran last."""

    parameters: int
    """Of the model."""
    tokens_per_step: int
    """Positions of a full step, padding included."""
    first_step: int
    """The first step that this process will run."""
    last_step: int
    """Of the whole run."""
    dtypes: Mapping[str, str]
    """Plane -> dtype: weight, master, moments, gradient sum."""
    tiers: tuple[TierPlan, ...]
    """From the fastest down."""
    frozen_parameters: int = 0
    """Those of the parameters that are not trained."""
    logits_bytes: int = 0
    """Logits, their gradient and what lies between, of one chunk of tokens: beside the bytes of `gpu`, for a
    part of each step."""
    extras_bytes: int = 0
    """What layers are given beside the hidden states (inputs of their own, keys and values that they share),
    and its gradients: beside the bytes of `gpu`, from forward to backward."""
    bound_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each resource needs for one step: the largest is the bound. Empty: not measured."""
    drives: tuple[DrivePlan, ...] = ()
    """Empty: all state is in DRAM."""
    written_bytes_per_step: int = 0
    """What the drives must take in the steady state, at least: they wear by it."""
    sample_tokens: int = 0
    """Tokens of the samples of one time, at most: passes forward, each for all prompts. 0: no samples."""
    sample_bytes_per_token: int = 0
    """Weights that go to the device for one of them, at most."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """What the run runs on, versions too: name of a part -> what it is."""
    started: str = ""
    """When this process began with its first step: ISO 8601, UTC."""

    @property
    def bound(self) -> tuple[str, float] | None:
        """The resource that sets the bound, and its seconds per step."""
        return max(self.bound_s.items(), key=lambda item: item[1], default=None)

    @classmethod
    def from_json(cls, text: str) -> PlanReport:
        """Of `plan.json`. Raises ValueError, KeyError or TypeError if `text` is no such record."""
        plain = json.loads(text)
        tiers = tuple(TierPlan(**tier) for tier in plain.pop("tiers"))
        drives = tuple(DrivePlan(**drive) for drive in plain.pop("drives"))
        return cls(tiers=tiers, drives=drives, **plain)


def read_metrics(path: Path) -> list[StepMetrics]:
    """All complete lines of a `metrics.jsonl`. Raises as `each_record`."""
    return list(each_step(path))


def each_step(path: Path) -> Iterator[StepMetrics]:
    """`read_metrics`, one after the other."""
    return each_record(path, StepMetrics)
