"""A model in training: the store, the lanes and the threads put together, one step at a time.

    step:  [update of the step before, unit by unit] -> upload -> forward ... loss ... backward -> gradients
    -> verdict

The verdict of a step is carried out while the next one runs, or, where nothing is clipped or checked, during
its own backward (`engine.update.update`); `flush` carries it out at once, which gives the same bits.
Between two steps passes forward may be made, to evaluate and to write samples: they leave nothing behind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers import DynamicCache

from tierstream.engine.device.device import Device
from tierstream.engine.device.download import Downloader
from tierstream.engine.device.memory import DeviceMemory
from tierstream.engine.device.state import DeviceState
from tierstream.engine.device.upload import StepPlan, Upload, Uploader
from tierstream.engine.interpreter import collect_now_and_then
from tierstream.engine.model.sink_attention import without_sinks_kernel
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.cache import ExpertCache
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.moe.router_bias import BiasUpdate
from tierstream.engine.moe.router_loss import router_losses
from tierstream.engine.moe.use import ExpertUse
from tierstream.engine.plan import Plan
from tierstream.engine.step.activations import ActivationStash
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.gradients import GradientBuffers
from tierstream.engine.step.script import StepScript
from tierstream.engine.step.streams import Use
from tierstream.engine.step.sweep import Sweep
from tierstream.engine.trace.trace import Trace
from tierstream.engine.update.idle import IdleExperts
from tierstream.engine.update.optimizer import OptimizerConfig, Verdict, judge, unconditional
from tierstream.engine.update.update import UpdateDriver
from tierstream.io.errors import TrainingStopped
from tierstream.tiered.layout import Layout, Unit
from tierstream.tiered.store import Intent, Store


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters since the run began, by tier; `since` gives what came between two readings."""

    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    hits: dict[str, int]
    misses: dict[str, int]
    wait_s: dict[str, float]

    def since(self, earlier: Traffic) -> Traffic:
        def minus(name: str) -> dict[str, Any]:
            return {key: value - getattr(earlier, name)[key] for key, value in getattr(self, name).items()}

        return Traffic(*(minus(field.name) for field in dataclasses.fields(self)))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Cross-entropy (mean over the step's trained tokens; NaN if there are none) and what the gradients
    allowed.

    Attributes:
        router_losses: `aux` and `z`, those that are added, without their coefficients.
        z_loss: of the logits, without its coefficient; None: not added.
    """

    loss: float
    verdict: Verdict
    router_losses: Mapping[str, float] = field(default_factory=dict)
    z_loss: float | None = None


class Runtime:
    """Trains a model whose state is in `store`.

    Args:
        model: built by transformers, parameters on `meta`, buffers on the device; its forwards are replaced.
        rows_per_chunk, loss_chunk_tokens, z_loss_coef: see `Sweep`.
        total_updates: length of the learning-rate schedule. applied_updates: updates already in the planes.
        threads: CPU threads of the optimizer's kernel.
        trace: is told what lanes and threads do; given by those who want it recorded.

    Raises:
        ConfigError: `moe` wants of the model's routers what they do not have.
    """

    def __init__(
        self,
        model: Any,
        units: ModelUnits,
        layout: Layout,
        plan: Plan,
        store: Store,
        device: Device,
        config: OptimizerConfig,
        moe: MoeConfig,
        *,
        rows_per_chunk: int,
        loss_chunk_tokens: int,
        z_loss_coef: float = 0.0,
        total_updates: int,
        applied_updates: int = 0,
        threads: int = 1,
        trace: Trace | None = None,
    ) -> None:
        self.model, self.units, self.layout, self.store, self.device = model, units, layout, store, device
        self.trace = trace = trace or Trace()
        self.applied_updates, self._total_updates, self._config = applied_updates, total_updates, config
        memory = plan.device
        self.script = script = StepScript(units, layout, plan, config, moe)
        self._resident = [unit for unit in script.staying if unit.trained]
        streamed, groups = script.streamed, units.groups.table
        self.updates = UpdateDriver(
            store, layout, streamed, script.granules, device, config, groups, threads, trace,
            script.gradient_pages(on_drives=store.on_drives),
        )  # fmt: skip
        self._idle = IdleExperts(
            moe.idle, self.updates, streamed, chain(*units.experts),
            lambda applied: unconditional(config, applied, total_updates), applied_updates,
        )  # fmt: skip
        self.downloader = Downloader(device, store, layout, trace, self.updates.queue.failed)
        self.uploader = Uploader(device, store, layout, memory.slots, trace, memory.resident)
        self._gradients = self._gradient_buffers(memory)
        self._state = DeviceState(
            device, store, layout, script.staying, self.uploader.buffer, config, groups, trace
        )
        kept = plan.boundary_nbytes is None
        self._stash = ActivationStash(device, self.downloader, len(units.layers), trace, on_device=kept)
        self.experts = None if memory.expert_slots is None else self._expert_cache(*memory.expert_slots)
        self._router_losses, self._z_loss_coef = router_losses(moe, model), z_loss_coef
        self._bias_update = BiasUpdate(model, moe.bias_update_rate)
        self._sweep = Sweep(
            model, units, device, self.uploader, self._gradients, self._stash, self.experts, trace, script,
            rows_per_chunk=rows_per_chunk, loss_chunk_tokens=loss_chunk_tokens, z_loss_coef=z_loss_coef,
            router_losses=self._router_losses,
        )  # fmt: skip
        self._uploads = list(map(self._gated, script.uses, script.uploads))
        self._steady_plan = self.uploader.plan(self._uploads, stale=True)
        self.update_order = [page for page, intent in script.steady_uses(()) if intent is Intent.UPDATE]
        self._idle_in_following: set[str] | None = None
        self._idle.expect_all_idle()
        self._follow_idle()
        self._pending: Verdict | None = None
        self._unconditional = unconditional(config, applied_updates, total_updates)  # of the step under way
        self._device_is_stale = True

    def _gradient_buffers(self, memory: DeviceMemory) -> GradientBuffers:
        return GradientBuffers(
            self.device, self.downloader, [unit for unit in self.units.in_forward_order if unit.trained],
            memory.group_of, memory.sums, self.trace, self.updates.queue, closed=self._update_now,
            absent=self._no_gradient, resident=memory.resident,
        )  # fmt: skip

    def _expert_cache(self, slots: int, nbytes: int) -> ExpertCache:
        return ExpertCache(
            self.device, self.store, self.layout, slots, nbytes, self.updates.queue.wait, self.trace,
            catch_up=self._idle.catch_up, is_behind=self._idle.is_behind,
        )  # fmt: skip

    def step(self, batch: Batch) -> StepOutcome:
        """Forward, backward and verdict over `batch`, while the update of the step before is carried out.

        Without a trained token there is nothing to compute: no sweep runs, no counter moves, and a pending
        update stays pending.
        """
        with self.trace.step(self.device.still):
            outcome = self._step(batch)
        collect_now_and_then(outcome.verdict.update)
        return outcome

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """The mean cross-entropy over the trained tokens of all `batches` (NaN if there are none), and their
        number; forward alone, without dropout, after all updates. Nothing of the training changes.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        trained_tokens = 0
        with self.forward_only():
            for batch in batches:
                if batch.trained_tokens:
                    total += self._sweep.evaluate(self._begin_pass(batch.padding), batch)
                    trained_tokens += batch.trained_tokens
        return total.item() / trained_tokens if trained_tokens else math.nan, trained_tokens

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Within, passes forward may be made with the weights that all updates so far give."""
        self._finish_updates()
        self._state.load()
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def new_cache(self) -> Any:
        """For `next_logits`: no keys and values yet."""
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def next_logits(self, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
        """Within `forward_only`; see `Sweep.next_logits`."""
        with without_sinks_kernel(self.model.config):
            return self._sweep.next_logits(self._begin_pass(None), cache, **inputs)

    def flush(self) -> None:
        """Carry out what is left of updates, and bring the store up to date, as for a checkpoint."""
        self._finish_updates()
        self._state.save()

    def _finish_updates(self) -> None:
        self.updates.queue.finish()
        pending, self._pending = self._pending, None
        works = {} if pending is None else self._idle.works(pending)
        works |= self._idle.overdue()
        if works:
            uses = (granule.uses for work in works.values() for granule in work.granules)
            self.store.begin_step([page for page, _ in chain(*uses)], self._following)
            self.updates.begin(works, unlimited=True)
        if pending is not None:
            self._update_resident(pending)
        self.updates.queue.finish()

    def planes_changed(self) -> None:
        """Someone else has written planes of the store since the last `flush`."""
        self._state.invalidate()
        self._idle.restart(self.applied_updates)
        self._device_is_stale = True

    def expert_use(self) -> ExpertUse | None:
        """To count tokens of experts in; None: there are none of their own."""
        experts = {layer: own for layer, own in enumerate(self.units.experts) if own}
        nbytes = sum(self.layout.spec(unit.name, "weight").nbytes for own in experts.values() for unit in own)
        return ExpertUse({layer: len(own) for layer, own in experts.items()}, nbytes) if experts else None

    def expert_tokens(self) -> list[dict[int, int]]:
        """Of each layer with experts, in the latest step: expert -> tokens, of those that had any."""
        return self._sweep.expert_tokens()

    def traffic(self) -> Traffic:
        """What has moved so far. `gpu` counts copies both ways, `dram` page uses, `nvme` I/O."""
        store = self.store.stats
        up, down = self.uploader, self.downloader
        to_device, from_device = self.updates.device_bytes
        to_device, from_device = to_device + up.bytes_up, from_device + down.bytes_down
        hits, misses = up.hits, up.misses
        if self.experts is not None:
            counts = self.experts.counts
            to_device += counts.bytes_up
            hits, misses = hits + counts.hits, misses + counts.misses
        return Traffic(
            bytes_read={"gpu": from_device, "dram": to_device, "nvme": store.nvme_bytes_read},
            bytes_written={"gpu": to_device, "dram": from_device, "nvme": store.nvme_bytes_written},
            hits={"gpu": hits, "dram": store.hits + store.prefetched},
            misses={"gpu": misses, "dram": store.misses},
            wait_s={"page": store.read_wait_s, "frame": store.frame_wait_s},
        )

    def close(self) -> None:
        """Stop all threads, whatever state they are in. The store stays open: it belongs to the caller."""
        self._stash.abort()
        self.uploader.abort()
        if self.experts is not None:
            self.experts.abort()
        self.updates.close()
        self.uploader.close()
        if self.experts is not None:
            self.experts.close()
        self.downloader.close()
        self.device.close()

    def _step(self, batch: Batch) -> StepOutcome:
        self._unconditional = unconditional(self._config, self.applied_updates, self._total_updates)
        if batch.trained_tokens == 0:
            return StepOutcome(math.nan, self._unconditional)
        pending, self._pending = self._pending, None
        self._follow_idle()
        if self._device_is_stale and (pending is not None or self._config.updates_in_backward):
            plan, pages = self._steady_plan, self._following
        else:
            plan = self.uploader.plan(self._uploads, stale=self._device_is_stale)
            pages = self.script.schedules.expected(plan, updating=pending is not None, idle=self._idle.names)
        if self.experts is not None and self._device_is_stale:
            self.experts.forget()
        self._state.load()
        self._bias_update.begin_step(batch.padding)
        self._gradients.begin_step()
        self.store.begin_step(pages, self._following)
        if pending is not None:
            # Where all of the state is in DRAM, nothing updated early can be gone before its upload.
            self.updates.begin(self._idle.works(pending), unlimited=not self.store.on_drives)
            self._update_resident(pending)
        self._idle.begin_step()
        self.updates.queue.want_in_forward_order()
        losses = self._sweep.run(plan, batch, partial(self._routed, plan))
        (loss, z_loss), sums = self._gradients.losses_and_sums_of_squares(losses)
        verdict = self._conclude(sums, loss)
        added = z_loss if self._z_loss_coef else None
        outcome = StepOutcome(loss, verdict, self._router_losses.values(), added)
        if not outcome.verdict.skipped:
            self._bias_update.apply()
        return outcome

    def _begin_pass(self, padding: torch.Tensor | None) -> StepPlan:
        """A pass forward begins, over rows with this padding (None: there is none)."""
        if self.experts is not None and self._device_is_stale:
            self.experts.forget()
        plan = self.uploader.plan(self._uploads[: self.script.forward_uses], stale=self._device_is_stale)
        self._device_is_stale = False
        self._bias_update.begin_step(padding)
        latest = zip(filter(None, self.units.experts), self._sweep.expert_tokens(), strict=True)
        wanted = {own[expert].name for own, tokens in latest for expert in tokens}
        pages = self.script.schedules.forward(plan, wanted)
        self.store.begin_step(pages, pages)
        return plan

    def _conclude(self, sums: Sequence[float], loss: float) -> Verdict:
        """The verdict over the step's gradients, to be carried out later, or already under way."""
        verdict = judge(self._config, sums, self.applied_updates, self._total_updates)
        if self._config.updates_in_backward:
            if verdict.skipped:
                raise TrainingStopped(
                    f"the gradient of update {verdict.update} is not finite (loss {loss}) and was applied, "
                    "since optimizer.check_finite is false: the weights of this run are lost; resume from "
                    "its last checkpoint, with optimizer.check_finite: true"
                )
        else:
            self.updates.queue.finish()  # no upload has waited for the update of an idle expert
            if verdict.skipped:
                self._discard_gradients()
                return verdict
            self._pending = verdict
        self._device_is_stale = True
        self._idle.conclude(verdict)
        self.applied_updates += 1
        return verdict

    def _discard_gradients(self) -> None:
        self._gradients.wait_stored()
        self.store.discard(self.updates.grad_pages())
        for unit in self._resident:
            self._gradients.free(unit)
        self.updates.queue.forget()
        self._device_is_stale = False

    def _update_now(self, unit: Unit) -> None:
        """The gradient of a unit is complete on the device."""
        if not self._config.updates_in_backward:
            return
        if unit in self._resident:
            self._update_on_device(unit, self._unconditional)
        else:
            self.updates.queue.decide({unit.name: self.updates.work(unit.name, self._unconditional)})

    def _no_gradient(self, unit: Unit) -> None:
        """An expert has no tokens in this step."""
        self._idle.absent(unit, self._unconditional if self._config.updates_in_backward else None)

    def _follow_idle(self) -> None:
        """What is expected of the steps that come follows from who was idle in the latest."""
        if self._idle.names != self._idle_in_following:
            self._following = self.script.expected(self._idle.names)
            self._idle_in_following = set(self._idle.names)

    def _routed(self, plan: StepPlan, idle: Sequence[str]) -> None:
        """Forward is over: what was expected of experts gives way to what is known of them."""
        self._idle.names.update(idle)
        self._follow_idle()
        self.store.begin_step(self.script.schedules.after_forward(plan, self._idle.names), self._following)

    def _gated(self, use: Use, upload: Upload) -> Upload:
        """An upload that waits: a boundary until it is stored, a page of weights until it is updated."""
        if use.kind != "activation":
            return replace(upload, gate=partial(self.updates.queue.wait, use.unit))
        assert use.layer is not None
        wait_stored = partial(self._stash.wait_stored, use.layer)
        return replace(upload, gate=lambda page: wait_stored())

    def _update_resident(self, verdict: Verdict) -> None:
        """Enqueued ahead of their forward; streamed units are updated meanwhile."""
        for unit in self._resident:
            self._update_on_device(unit, verdict)

    def _update_on_device(self, unit: Unit, verdict: Verdict) -> None:
        self._state.update(unit, self._gradients.held(unit), verdict)
        self._gradients.free(unit)
