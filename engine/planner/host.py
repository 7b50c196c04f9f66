"""The thread that launches layers, in simulated time: `engine.step.runtime` and the parts of its sweep, with
their waits and what they enqueue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tierstream.engine.device.memory import WAITING_TENSORS
from tierstream.engine.model.units import activation_unit
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.clock import Credits, Moment, Steps
from tierstream.engine.planner.hardware import Hardware
from tierstream.engine.planner.lanes import Downloads, ExpertUploads, Uploads
from tierstream.engine.planner.times import LayerTimes
from tierstream.engine.planner.updates import Updates
from tierstream.engine.step.streams import Use, head_uses
from tierstream.engine.trace.trace import Span, Track
from tierstream.tiered.layout import Unit


class Gradients:
    """Sums on the device, each free again when its content is in DRAM; see `engine.step.gradients`."""

    def __init__(
        self,
        hardware: Hardware,
        case: Case,
        downloads: Downloads,
        updates: Updates,
        compute: Callable[[str, str], Moment],
    ) -> None:
        self._hardware, self._downloads, self._updates = hardware, downloads, updates
        self._compute = compute
        memory = case.plan.device
        self._group_of, self._resident = memory.group_of, memory.resident
        self._free = {name: Credits(hardware.clock, count) for name, (count, _) in memory.sums.items()}
        self._open: set[str] = set()
        self._early = case.script.updates_in_backward

    def open(self, unit: str) -> Steps[None]:
        if unit in self._open:
            return
        since_s = self._hardware.clock.now_s
        yield from self._free[self._group_of[unit]].take()
        self._hardware.notes.waited(Track.HOST, "gradients", unit, since_s)
        self._open.add(unit)

    def close(self, unit: str) -> None:
        self._open.remove(unit)
        if unit in self._resident:
            if self._early:
                self._compute("adamw", unit)
                self.free(unit)
            return
        if self._early:
            self._updates.begin({unit: self._updates.work(unit)}, unlimited=True)
        ready = self._hardware.compute.mark()
        _, done = self._downloads.submit(unit, "grad", ready, self._updates.stored, self._updates.admit)
        done.then(self._free[self._group_of[unit]].give)

    def free(self, unit: str) -> None:
        """That of a unit that stays was used."""
        self._free[self._group_of[unit]].give()


class Host:
    """Makes one step after another.

    Args:
        times: of the compute lane.
        experts: (step, layer) -> those that have tokens.
    """

    def __init__(
        self,
        hardware: Hardware,
        case: Case,
        times: LayerTimes,
        experts: Callable[[int, int], Sequence[int]],
    ) -> None:
        self._hardware, self._case, self._times = hardware, case, times
        self._script, self._units = case.script, case.units
        self._experts_of = experts
        self._mode = case.config.moe.idle
        self._updates = Updates(hardware, case)
        self._downloads = Downloads(hardware, case.layout)
        self._gradients = Gradients(hardware, case, self._downloads, self._updates, self._compute)
        self._uploads = Uploads(hardware, case.layout, self._gate)
        slots = case.plan.device.expert_slots
        self._cache = None if slots is None else ExpertUploads(
            hardware, case.layout, self._gate, slots[0], case.expert_group, self._is_behind
        )  # fmt: skip
        self._room = Credits(hardware.clock, WAITING_TENSORS)
        self._stored: dict[str, Moment] = {}
        self._names = {unit.name for own in case.units.experts for unit in own}
        self._missed = Counter[str]()
        self._idle: set[str] = set(self._names)
        self._hit: dict[int, list[str]] = {}
        self._pending = False
        self._index = {use: index for index, use in enumerate(self._script.uses)}

    def step(self, step: int) -> Steps[None]:
        """One step, until its verdict is known."""
        hardware, script, clock = self._hardware, self._script, self._hardware.clock
        begin_s = clock.now_s
        following = script.expected(self._idle)
        updating = self._pending or script.updates_in_backward
        uses = following
        if not updating:
            uses = script.schedules.expected(script.steady_plan, updating=False, idle=self._idle)
        if self._cache is not None:
            self._cache.forget()
        hardware.store.begin_step(uses, following)
        self._begin_updates()
        latest, self._hit = self._hit, {}
        self._stored = {use.unit: clock.moment() for use in script.uses if use.kind == "activation"}
        self._updates.order.want_in_forward_order()
        self._uploads.begin(script.steady_plan)
        yield from self._forward(step, latest)
        if self._names:
            self._idle = self._names - {name for own in self._hit.values() for name in own}
            left = script.schedules.after_forward(script.steady_plan, self._idle)
            hardware.store.begin_step(left, script.expected(self._idle))
        yield from self._head()
        yield from self._backward()
        yield from self._end()
        hardware.notes.worked(Track.STEPS, "step", str(step), begin_s)

    def _begin_updates(self) -> None:
        """Those of the step before, where they are deferred."""
        if self._pending:
            works = {}
            for unit in self._script.streamed:
                if not unit.trained:
                    continue
                if unit.name not in self._idle:
                    works[unit.name] = self._updates.work(unit.name)
                elif self._mode == "dense":
                    works[unit.name] = self._updates.idle_work(unit.name, 1)
            self._updates.begin(works, unlimited=not self._hardware.drives)
            for unit in self._script.staying:
                if unit.trained:
                    self._compute("adamw", unit.name)
                    self._gradients.free(unit.name)

    def _forward(self, step: int, latest: dict[int, list[str]]) -> Steps[None]:
        for unit in self._units.begin:
            use = Use("table" if unit in (self._units.embed, *self._units.tables) else "around", unit.name)
            ready = yield from self._take(use)
            if use.kind == "table":
                yield from self._computed("forward", unit.name, [ready])
                self._release(use)
        for index, layer in enumerate(self._units.layers):
            yield from self._stash(index)
            uses = self._layer_uses("forward", index)
            needed = yield from self._take_all(uses)
            dense_s, experts_s = self._split("forward", index)
            hits = self._hits(step, index)
            yield from self._computed("forward", layer.name, needed, dense_s)
            if hits:
                yield from self._routed()
                yield from self._run_experts(hits, experts_s, "forward")
                following = self._after(index)
                if self._cache is not None and following in latest:
                    self._cache.expect(latest[following])
            for use in uses:
                self._release(use)

    def _head(self) -> Steps[None]:
        uses = head_uses(self._units)
        for unit in (self._units.head, *self._units.beside_head):
            if unit.trained:
                yield from self._gradients.open(unit.name)
        ready = yield from self._take_all(uses)
        yield from self._computed("head", self._units.head.name, ready)
        for use in uses:
            self._release(use)
        for unit in self._units.end:
            if unit.trained:
                self._gradients.close(unit.name)

    def _backward(self) -> Steps[None]:
        for index in reversed(range(self._units.backward_from, len(self._units.layers))):
            layer = self._units.layers[index]
            uses = self._layer_uses("backward", index)
            stashed = activation_unit(index)
            staged = [Use("activation", stashed, index)] if stashed in self._stored else []
            ready = yield from self._take_all([*staged, *uses])
            own = [unit.name for unit in (layer, *self._units.beside[index]) if unit.trained]
            for name in own:
                yield from self._gradients.open(name)
            dense_s, experts_s = self._split("backward", index)
            hits = self._hit.get(index, [])
            yield from self._computed("backward", layer.name, ready, dense_s * (0.5 if hits else 1.0))
            if hits:
                trained = self._units.experts[index][0].trained
                yield from self._run_experts(hits, experts_s, "backward", trained=trained)
                before = self._before(index)
                if self._cache is not None and before in self._hit:
                    self._cache.expect(self._hit[before])
                yield from self._computed("backward", layer.name, [], dense_s * 0.5)
            for use in (*uses, *staged):
                self._release(use)
            for name in own:
                self._gradients.close(name)

    def _end(self) -> Steps[None]:
        hardware = self._hardware
        for unit in (*reversed(self._units.tables), self._units.embed):
            if unit.trained:
                yield from self._gradients.open(unit.name)
                yield from self._computed("backward", unit.name, [])
                self._gradients.close(unit.name)
        for unit in self._units.around:
            if unit.trained:
                yield from self._gradients.open(unit.name)
                self._gradients.close(unit.name)
            self._release(Use("around", unit.name))
        since_s = hardware.clock.now_s
        yield hardware.compute.mark()
        hardware.notes.waited(Track.HOST, "verdict", "", since_s)
        if self._script.updates_in_backward:
            if self._mode == "dense":
                works = {name: self._updates.idle_work(name, 1) for name in sorted(self._idle)}
                yield from self._updates.finish(list(works))
                self._updates.begin(works, unlimited=True)
        else:
            yield from self._updates.finish()
            self._pending = True
        if self._mode == "lazy":
            self._missed.update(self._idle)

    # Parts

    def _gate(self, unit: str, plane: str, page: int) -> Steps[None]:
        if plane == "activation":
            yield self._stored[unit]
        else:
            yield from self._updates.wait(unit, page)

    def _take(self, use: Use) -> Steps[Moment]:
        cause = "activations" if use.kind == "activation" else "weights"
        return (yield from self._uploads.take(self._index[use], use.unit, cause))

    def _take_all(self, uses: Iterable[Use]) -> Steps[list[Moment]]:
        taken = []
        for use in uses:
            taken.append((yield from self._take(use)))
        return taken

    def _release(self, use: Use) -> None:
        self._uploads.release(self._index[use])

    def _layer_uses(self, kind: str, index: int) -> list[Use]:
        own = (self._units.layers[index], *self._units.beside[index])
        return [Use(kind, unit.name, index) for unit in own]

    def _compute(self, what: str, unit: str, seconds: float | None = None) -> Moment:
        """Enqueue a unit's computation."""
        hardware, notes = self._hardware, self._hardware.notes
        seconds = self._times.compute_s(what, unit) if seconds is None else seconds
        enqueued_s = hardware.clock.now_s, hardware.clock.now_s

        def watch(begin_s: float, end_s: float) -> None:
            if notes.recording:
                notes.spans.append(Span(Track.COMPUTE, what, unit, begin_s, end_s, enqueued_s=enqueued_s))

        return hardware.compute.enqueue(seconds, watch=watch)

    def _computed(
        self, what: str, unit: str, ready: Iterable[Moment], seconds: float | None = None
    ) -> Steps[None]:
        """Enqueue it behind what it needs; the CPU computes it at once."""
        for moment in ready:
            if not moment.past:
                self._hardware.compute.enqueue(0.0, moment)
        done = self._compute(what, unit, seconds)
        if self._hardware.in_host:
            yield done

    def _stash(self, index: int) -> Steps[None]:
        """The input of a layer goes to the store."""
        unit = activation_unit(index)
        if unit not in self._stored:
            return
        since_s = self._hardware.clock.now_s
        yield from self._room.take()
        self._hardware.notes.waited(Track.HOST, "activations", unit, since_s)
        enqueued, done = self._downloads.submit(unit, "activation", self._hardware.compute.mark())
        enqueued.then(self._stored[unit].set)
        done.then(self._room.give)

    # Experts

    def _split(self, what: str, index: int) -> tuple[float, float]:
        """Seconds of a layer without its experts, and of all of these."""
        total = self._times.compute_s(what, self._units.layers[index].name)
        experts = sum(unit.numel for unit in self._units.experts[index])
        if not experts:
            return total, 0.0
        active = experts - self._units.passed_by[index]
        dense = sum(unit.numel for unit in (self._units.layers[index], *self._units.beside[index]))
        share = active / (active + dense)
        return (1 - share) * total, share * total

    def _hits(self, step: int, index: int) -> list[str]:
        """Experts of a layer that have tokens, whose missed updates now go first."""
        own: Sequence[Unit] = self._units.experts[index]
        if not own:
            return []
        self._hit[index] = hits = [own[expert].name for expert in self._experts_of(step, index)]
        behind = {name: self._missed.pop(name) for name in hits if self._missed[name]}
        if behind:
            self._updates.begin_first({n: self._updates.idle_work(n, m) for n, m in behind.items()})
        return hits

    def _is_behind(self, name: str) -> bool:
        return self._missed[name] > 0

    def _routed(self) -> Steps[None]:
        """Who has tokens is known when the device has come so far."""
        yield self._hardware.compute.mark()

    def _run_experts(
        self, hits: Sequence[str], seconds: float, what: str, *, trained: bool = False
    ) -> Steps[None]:
        assert self._cache is not None
        order = self._cache.want(hits)
        for first in range(0, len(order), self._cache.group):
            names = order[first : first + self._cache.group]
            ready = yield from self._cache.take(names)
            yield from self._computed(what, names[0], ready, len(names) * seconds / len(hits))
            for name in names if trained else ():
                yield from self._gradients.open(name)
                self._gradients.close(name)
            self._cache.release(names)

    def _after(self, index: int) -> int:
        return next((i for i in range(index + 1, len(self._units.layers)) if self._units.experts[i]), -1)

    def _before(self, index: int) -> int:
        return next((i for i in range(index - 1, -1, -1) if self._units.experts[i]), -1)
