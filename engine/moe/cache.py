"""Weights of experts on the device: a few slots, filled with the experts that have tokens.

Which experts these are is known when a layer has routed its tokens; they are then wanted in an order that is
free, so those that lie in a slot already come first and give it back soonest. Experts that are likely to be
wanted next are read ahead into slots that nobody needs. All that moves is decided by what was wanted; the
bits that are computed do not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from tierstream.engine.device.device import Device, Event
from tierstream.engine.device.memory import expert_group
from tierstream.engine.device.page_copies import PageCopies
from tierstream.engine.model.carve import TORCH_DTYPES
from tierstream.engine.moe.slots import ExpertSlots, Slot
from tierstream.engine.moe.use import CacheCounts
from tierstream.engine.trace.trace import Trace, Track
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Layout, Unit
from tierstream.tiered.store import Store


class ExpertShapes(NamedTuple):
    """What the bytes of a unit are, alike for all experts of a layer.

    Attributes:
        tensors: of each parameter its name in its module, where it begins and ends, and its shape.
        trained: they are leaves of graphs.
    """

    dtype: torch.dtype
    tensors: tuple[tuple[str, int, int, tuple[int, ...]], ...]
    trained: bool

    @classmethod
    def of(cls, unit: Unit) -> ExpertShapes:
        tensors = ((t.name.rpartition(".")[2], t.offset, t.end, tuple(t.shape)) for t in unit.tensors)
        return cls(TORCH_DTYPES[unit.dtype], tuple(tensors), unit.trained)


@dataclass(eq=False, slots=True)
class _Buffer:
    bytes: torch.Tensor
    ready: Event | None = None
    idle: Event | None = None
    _parameters: dict[ExpertShapes, dict[str, torch.Tensor]] = field(default_factory=dict)

    def parameters(self, shapes: ExpertShapes) -> dict[str, torch.Tensor]:
        """Views of the bytes. They are made once: thousands of experts lie here in every step."""
        if shapes not in self._parameters:
            values = self.bytes.view(shapes.dtype)
            self._parameters[shapes] = {
                name: values[start:end].view(shape).detach().requires_grad_(shapes.trained)
                for name, start, end, shape in shapes.tensors
            }
        return self._parameters[shapes]


class ExpertCache:
    """Slots of one size for the weights of experts, least recently used first to go.

    `want` and `take` and `release` are called by the thread that computes.

    Attributes:
        group: how many experts are computed together at most.

    Args:
        slots: how many, each of `nbytes`.
        gate: blocks until the pending update of a page (unit, index) has been applied.
        catch_up: begins, ahead of the gate, with updates that wanted units have missed.
        is_behind: a unit has missed some: it is no guess.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        layout: Layout,
        slots: int,
        nbytes: int,
        gate: Callable[[str, int], None],
        trace: Trace,
        *,
        catch_up: Callable[[Sequence[str]], None],
        is_behind: Callable[[str], bool],
    ) -> None:
        self._device, self._trace, self._gate = device, trace, gate
        self._catch_up = catch_up
        self._copies = PageCopies(
            device, device.lane(), store, layout, trace, waits=Track.EXPERT_UPLOADER, copies=Track.EXPERTS
        )
        self.group = expert_group(slots) if device.multiplies_groups else 1
        self._slots = ExpertSlots([_Buffer(device.buffer(nbytes)) for _ in range(slots)], is_behind)
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="expert uploader", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> CacheCounts:
        """Since the run began."""
        slots = self._slots
        return CacheCounts(slots.hits, slots.misses, slots.guesses, slots.right_guesses, self.bytes_up)

    @property
    def bytes_up(self) -> int:
        """Bytes copied to the device so far."""
        return self._copies.bytes_up

    def forget(self) -> None:
        """The weights in the slots were updated since. Nothing is wanted now."""
        with self._state:
            self._slots.stop_guessing()
            self._state.wait_for(lambda: self._slots.settled)
            self._slots.forget()

    def want(self, units: Sequence[str]) -> list[str]:
        """These will be taken, each once. Returns the order in which they must be."""
        self._catch_up(units)
        with self._state:
            order = self._slots.want(units)
            self._state.notify_all()
        return order

    def expect(self, units: Iterable[str]) -> None:
        """These may be wanted next; read ahead as far as slots are free."""
        with self._state:
            self._slots.expect(units)
            self._state.notify_all()

    def take(self, units: Sequence[str], shapes: ExpertShapes) -> list[dict[str, torch.Tensor]]:
        """The parameters by their names of the next wanted units, at most `group` of them, ready for the
        compute lane.
        """
        with self._trace.stall("experts", units[0]), self._state:
            self._state.wait_for(lambda: self._slots.filled(units) or self._error is not None)
            if self._error is not None:
                raise self._error
            slots = self._slots.filled(units)
        assert slots is not None
        for slot in slots:
            self._device.compute.wait(slot.buffer.ready)
        return [slot.buffer.parameters(shapes) for slot in slots]

    def release(self, units: Sequence[str]) -> None:
        """The compute lane has been given all that reads what was taken."""
        idle = self._device.compute.record()
        with self._state:
            for unit in units:
                self._slots.release(unit).buffer.idle = idle
            self._state.notify_all()

    def abort(self) -> None:
        """After an error elsewhere: end the thread, wake who waits."""
        with self._state:
            self._closed = True
            self._error = self._error or InvariantError("uploads of experts were aborted")
            self._state.notify_all()

    def close(self) -> None:
        self.abort()
        self._thread.join()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                unit, slot = job
                gate = partial(self._gate, unit)
                buffer = slot.buffer
                ready = self._copies.fill(buffer.bytes, buffer.idle, unit, "weight", gate)
                with self._state:
                    buffer.ready, slot.filled = ready, True
                    self._state.notify_all()
        except BaseException as error:
            with self._state:
                self._error = self._error or error
                self._state.notify_all()

    def _next(self) -> tuple[str, Slot[_Buffer]] | None:
        """The next unit to copy, and the slot for it, as soon as there are both; None: closed."""
        with self._trace.wait(Track.EXPERT_UPLOADER, "slot"), self._state:
            while not self._closed:
                if (job := self._slots.next()) is not None:
                    return job
                self._state.wait()
            return None
