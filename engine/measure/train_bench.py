"""The executor's speed, measured: the real store, drives and lanes over random weights and tokens.

All settings of one `TieredBench` train one and the same state in turn: one training whose clipping and device
budget change between runs. So its losses can be had again, step for step, by a run with everything on the
device (`resident_losses`), and a state that fills the machine is needed once only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import torch

from tierstream.engine import assemble
from tierstream.engine.bound import Bound, Rates, plan_bound
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.device.device import Device
from tierstream.engine.interpreter import undisturbed
from tierstream.engine.measure.machine import KnownDrive, drives_now
from tierstream.engine.measure.resident import ResidentModel
from tierstream.engine.model.build import build_model
from tierstream.engine.model.carve import units_of_run
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.nvme_dirs import check_nvme_dirs
from tierstream.engine.plan import Plan
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.runtime import Runtime, Traffic
from tierstream.engine.trace.trace import Span, Trace
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.engine.weights.fill import FirstValues
from tierstream.io import memory
from tierstream.io.errors import BudgetError
from tierstream.io.measure import Case, Labels, Sample, timed
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import Layout

#: A device budget that holds every layer.
EVERYTHING = ByteSize(1 << 50)
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What may change while the state stays: `tiers.gpu`, and of the optimizer what its planes do not depend
    on, and `clip_norm`.
    """

    gpu: ByteSize | None = None
    clip_norm: float | None = None
    check_finite: bool = True
    placement: Literal["auto", "cpu", "gpu", "both"] = "auto"

    def optimizer(self, base: OptimizerConfig) -> OptimizerConfig:
        return replace(
            base, clip_norm=self.clip_norm, check_finite=self.check_finite, placement=self.placement
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of a case: some steps in steady state.

    Attributes:
        losses, grad_norms: of every step.
        traffic: bytes moved, page uses and the threads' waits of all of them.
        stall_s: what the computation waited for, by cause, in all of them.
        gpu_peak_bytes: the most device memory that the case had, without what other cases hold; None: CPU.
        host_peak_bytes: the most host memory that the process had.
    """

    losses: list[float]
    grad_norms: list[float]
    seconds: float
    traffic: Traffic | None
    stall_s: dict[str, float]
    gpu_peak_bytes: int | None
    host_peak_bytes: int


class GpuMemory:
    """Device memory of one of several cases that hold some at the same time.

    Args:
        cases: all of them, which this one joins.
    """

    def __init__(self, device: torch.device, cases: list[GpuMemory]) -> None:
        self._device = device if device.type == "cuda" else None
        self._held, self._cases = 0, cases
        cases.append(self)

    def building(self, build: Callable[[], _Result]) -> _Result:
        """Calls it; what it allocates and keeps belongs to this case."""
        before = self._allocated()
        built = build()
        self._held += self._allocated() - before
        return built

    def running(self, run: Callable[[], _Result]) -> tuple[_Result, int | None]:
        """Calls it; also gives the case's peak in bytes meanwhile, with what each would have on its own, as
        workspaces of libraries, whoever came to need them first.
        """
        if self._device is None:
            return run(), None
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        of_others = sum(case._held for case in self._cases if case is not self)
        return result, torch.cuda.max_memory_allocated(self._device) - of_others

    def _allocated(self) -> int:
        return 0 if self._device is None else torch.cuda.memory_allocated(self._device)


@dataclass
class TieredCase:
    """One setting of a bench: its runtime, and what was measured of it, run after run."""

    setting: Setting
    plan: Plan
    runtime: Runtime
    memory: GpuMemory
    records: list[RunRecord] = field(default_factory=list)


class TieredBench:
    """A state in its tiers with random weights, and a runtime over it for each setting.

    Use as a context manager: the end closes all of it. Files on the drives go with the directories that
    `config.tiers.nvme_dirs` names; remove these.

    Args:
        config: what a `Setting` names is replaced by that of the settings.
        known: of `tiers.nvme_dirs`, in order.
        batch: trained on at every step.

    Raises:
        BudgetError, StorageError: a tier that cannot hold what it must.
    """

    def __init__(
        self, config: RunConfig, settings: Sequence[Setting], known: list[KnownDrive], batch: Batch
    ) -> None:
        self.config, self._batch = config, batch
        self.history: list[tuple[Setting, float]] = []
        """Setting and loss of every step, in order."""
        self.memories = list[GpuMemory]()
        self._last: TieredCase | None = None
        self._rested = False
        self._trace = Trace()
        with ExitStack() as parts:
            self._open(settings, known, parts)
            self.parts = parts.pop_all()
            """Closed at the end, last first."""

    def _open(self, settings: Sequence[Setting], known: list[KnownDrive], parts: ExitStack) -> None:
        config = self.config
        device = Device(config.train.device)
        parts.callback(device.close)
        model, _ = build_model(config, parts)
        units = units_of_run(model, config.moe, config.optimizer)
        planned = [self._plan(setting, units, device) for setting in settings]
        plans = [plan for plan, _ in planned]
        # Units that stay on the device leave planes out: one layout has all that any setting needs.
        widest, self.layout = max(planned, key=lambda pair: len(pair[1].planes))
        check_nvme_dirs(config.tiers.nvme_dirs or [])
        assemble.check_space(config, widest, Path(config.run_dir))
        paths = assemble.check_paths(config)
        self.drives = assemble.open_drives(config, self.layout, {}, known, paths)
        if self.drives is not None:
            parts.callback(self.drives.close)
        self.store = assemble.build_store(
            config, self.layout, widest, self.drives, device, debug=False, trace=self._trace
        )
        parts.callback(self.store.close)
        FirstValues(config, model, units, None, None).fill(self.layout, self.store, device)
        self.cases = [self._case(setting, plan, parts) for setting, plan in zip(settings, plans, strict=True)]
        parts.enter_context(undisturbed())

    def _plan(self, setting: Setting, units: ModelUnits, device: Device) -> tuple[Plan, Layout]:
        tiers = replace(self.config.tiers, gpu=setting.gpu)
        sized = replace(self.config, tiers=tiers, optimizer=setting.optimizer(self.config.optimizer))
        return assemble.plan_run(sized, units, device)

    def _case(self, setting: Setting, plan: Plan, parts: ExitStack) -> TieredCase:
        """Every runtime has a model (without weights), lanes and device buffers of its own."""
        config = replace(self.config, optimizer=setting.optimizer(self.config.optimizer))
        device = Device(config.train.device)
        parts.callback(device.close)
        model, _ = build_model(config, parts)
        materialise_buffers(model, None, device.torch_device)
        memory = GpuMemory(device.torch_device, self.memories)

        units = units_of_run(model, config.moe, config.optimizer)

        def build() -> Runtime:
            return assemble.build_runtime(
                config, model, units, self.layout, plan, self.store, device, total_updates=1,
                trace=self._trace,
            )  # fmt: skip

        runtime = memory.building(build)
        parts.callback(runtime.close)
        return TieredCase(setting, plan, runtime, memory)

    def __enter__(self) -> TieredBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.parts.close()

    def case(self, case: TieredCase, steps: int, labels: Labels) -> Case:
        """Something that `measure` runs: some steps, counted in tokens."""
        return Case(labels, "tokens", lambda: self.run(case, steps))

    def run(self, case: TieredCase, steps: int) -> Sample:
        """Some steps, in steady state: each carries out the update of the one before it. Recorded in the
        case.
        """
        if self._last is not case or self._rested:
            # After another setting's flush there is nothing to update, and after a rest the store is further
            # than it else would be: such a step does not count.
            self.step(case)
        memory.reset_peak_rss()
        runtime = case.runtime
        before = runtime.traffic()
        runtime.trace.take_stalls()
        norms: list[float] = []

        def train() -> Sample:
            tokens = steps * case.plan.tokens_per_step
            return timed(tokens, lambda: norms.extend(self.step(case) for _ in range(steps)))

        sample, peak = case.memory.running(train)
        record = RunRecord(
            losses=[loss for _, loss in self.history[-steps:]],
            grad_norms=norms,
            seconds=sample.seconds,
            traffic=runtime.traffic().since(before),
            stall_s=runtime.trace.take_stalls(),
            gpu_peak_bytes=peak,
            host_peak_bytes=memory.peak_rss_bytes(),
        )
        case.records.append(record)
        return sample

    def record(self, case: TieredCase, steps: int) -> list[Span]:
        """Trace of some steps, in steady state."""
        if self._last is not case:
            self.step(case)
        self._trace.start(1)
        for _ in range(steps):
            self.step(case)
        return self._trace.stop()

    def step(self, case: TieredCase) -> float:
        """One step of the training under this setting; returns the gradient norm."""
        self._rested = False
        if self._last is not None and self._last is not case:
            self._last.runtime.flush()
            case.runtime.applied_updates = self._last.runtime.applied_updates
            case.runtime.planes_changed()
        self._last = case
        outcome = case.runtime.step(self._batch)
        self.history.append((case.setting, outcome.loss))
        return outcome.verdict.grad_norm

    def drives_now(self, known: Sequence[KnownDrive]) -> list[KnownDrive]:
        """`machine.drives_now`, once the store has done ahead of the next step what it can."""
        self.store.settle()
        self._rested = self.drives is not None
        return drives_now(self.config.tiers, known)

    def bound(self, case: TieredCase, rates: Rates) -> Bound:
        """The least time that one of its steps can take here."""
        script = case.runtime.script
        return plan_bound(rates, case.plan, self.layout, script, on_drives=self.drives is not None)


class ResidentCase:
    """The plain training that a bench's cases are judged against, with the same weights.

    Raises:
        BudgetError: the device has no room for its weights and gradients.
    """

    name = "resident"

    def __init__(self, bench: TieredBench, batch: Batch) -> None:
        config, self._batch = bench.config, batch
        device = bench.cases[0].runtime.device.torch_device
        self.memory, self.records = GpuMemory(device, bench.memories), list[RunRecord]()
        need_bytes = 2 * sum(s.nbytes for s in bench.layout.planes.values() if s.plane == "weight")
        check_device_memory(device, need_bytes, "weights and gradients of the resident baseline")
        self.model = self.memory.building(
            lambda: ResidentModel(config, bench.store.read_range, device, bench.parts)
        )

    def case(self, steps: int, labels: Labels) -> Case:
        """Something that `measure` runs: some steps, counted in tokens."""
        return Case(labels, "tokens", lambda: self.run(steps))

    def run(self, steps: int) -> Sample:
        """Some steps; recorded."""
        memory.reset_peak_rss()
        losses: list[float] = []

        def train() -> Sample:
            tokens = steps * self._batch.input_ids.numel()
            return timed(tokens, lambda: losses.extend(self.model.step(self._batch) for _ in range(steps)))

        sample, peak = self.memory.running(train)
        record = RunRecord(
            losses=losses,
            grad_norms=[self.model.grad_norm()],
            seconds=sample.seconds,
            traffic=None,
            stall_s={},
            gpu_peak_bytes=peak,
            host_peak_bytes=memory.peak_rss_bytes(),
        )
        self.records.append(record)
        return sample


def random_batch(
    vocabulary: int, rows: int, seq_len: int, device: torch.device | str, seed: int = 0
) -> Batch:
    """Rows of random tokens, each position trained on its successor."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (rows, seq_len + 1), generator=generator).to(device)
    positions = torch.arange(seq_len, device=device).repeat(rows, 1)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, rows * seq_len)


def resident_losses(
    config: RunConfig, steps: Sequence[Setting], known: list[KnownDrive], batch: Batch
) -> list[float]:
    """Losses of the same training from its begin, with as much state on the device as it holds, and all layer
    inputs.

    Args:
        steps: the setting of each step, in order; its device budget does not matter.

    Raises:
        BudgetError: the device has no room for that.
    """
    everything = replace(config, tiers=replace(config.tiers, activations="gpu"))
    clips = {step.clip_norm for step in steps}
    budget = _most_of_the_device(config.train.device, cases=len(clips))
    kinds = {clip: Setting(gpu=budget, clip_norm=clip, placement="cpu") for clip in clips}
    with TieredBench(everything, list(kinds.values()), known, batch) as bench:
        cases = {case.setting.clip_norm: case for case in bench.cases}
        for step in steps:
            bench.step(cases[step.clip_norm])
        return [loss for _, loss in bench.history]


def _most_of_the_device(name: str, *, cases: int) -> ByteSize:
    """A device budget for each of some cases; room is left for activations and for kernels."""
    if torch.device(name).type != "cuda":
        return EVERYTHING
    free_bytes, _ = torch.cuda.mem_get_info(name)
    return ByteSize(int(0.8 * free_bytes) // cases)


def check_device_memory(device: torch.device, need_bytes: int, what: str) -> None:
    """Raises BudgetError: the GPU has not so much memory left."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if need_bytes > free_bytes:
        raise BudgetError(
            f"{what} need {format_bytes(need_bytes)} of device memory, and {format_bytes(free_bytes)} are "
            "free beside the rest; choose a smaller shape or fewer layers, or leave that part out"
        )


def release_device_memory() -> None:
    """Gives back what closed benches held on the GPU: their models refer to themselves in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
