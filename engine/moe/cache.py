"""Weights of experts on the device: a few slots, filled with the experts that have tokens.

Which experts these are is known when a layer has routed its tokens; they are then wanted in an order that is
free, so those that lie in a slot already come first and give it back soonest. Experts that are likely to be
wanted next are read ahead into slots that nobody needs. All that moves is decided by what was wanted; the
bits that are computed do not depend on it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tierstream.engine.device.device import Device, Event
from tierstream.engine.device.page_copies import PageCopies
from tierstream.engine.moe.use import CacheCounts
from tierstream.engine.trace.trace import Trace, Track
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Layout
from tierstream.tiered.store import Store


@dataclass(eq=False, slots=True)
class _Slot:
    buffer: torch.Tensor
    unit: str | None = None
    filled: bool = False
    guessed: bool = False
    """Nobody has wanted its content yet."""
    last_use: int = 0
    ready: Event | None = None
    idle: Event | None = None


class ExpertCache:
    """Slots of one size for the weights of experts, least recently used first to go.

    `want` and `take` and `release` are called by the thread that computes.

    Args:
        slots: how many, each of `nbytes`.
        gate: blocks until the pending update of a page (unit, index) has been applied.
        catch_up: begins, ahead of the gate, with updates that wanted units have missed.
        is_behind: a unit has missed some: it is no guess.

    Attributes:
        hits, misses: of experts that were wanted: those that lay in a slot, and those that had to come.
        guesses, right_guesses: experts read ahead, and those of them that were wanted afterwards.
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
        self._catch_up, self._is_behind = catch_up, is_behind
        self._copies = PageCopies(
            device, device.lane(), store, layout, trace, waits=Track.EXPERT_UPLOADER, copies=Track.EXPERTS
        )
        self._slots = [_Slot(device.buffer(nbytes)) for _ in range(slots)]
        self._wanted: deque[str] = deque()
        """Those that have no slot yet, in the order in which they will be taken."""
        self._guesses: deque[str] = deque()
        self._pins = Counter[str]()
        """Wanted and not released yet."""
        self._uses = 0
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self.hits = self.misses = self.guesses = self.right_guesses = 0
        self._thread = threading.Thread(target=self._work, name="expert uploader", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> CacheCounts:
        """Since the run began."""
        return CacheCounts(self.hits, self.misses, self.guesses, self.right_guesses, self.bytes_up)

    @property
    def bytes_up(self) -> int:
        """Bytes copied to the device so far."""
        return self._copies.bytes_up

    def forget(self) -> None:
        """The weights in the slots were updated since. Nothing is wanted now."""
        with self._state:
            self._guesses.clear()
            self._state.wait_for(lambda: all(slot.filled or slot.unit is None for slot in self._slots))
            for slot in self._slots:
                slot.unit = None

    def want(self, units: Sequence[str]) -> list[str]:
        """These will be taken, each once. Returns the order in which they must be."""
        self._catch_up(units)
        with self._state:
            self._guesses.clear()  # what comes next is known now
            held = {slot.unit: slot for slot in self._slots if slot.unit is not None}
            here = [unit for unit in units if unit in held]
            missing = [unit for unit in units if unit not in held]
            self.right_guesses += sum(held[unit].guessed for unit in here)
            for slot in self._slots:
                slot.guessed = False
            self._pins.update(units)
            self._wanted.extend(missing)
            self.hits += len(here)
            self.misses += len(missing)
            self._state.notify_all()
        return here + missing

    def expect(self, units: Iterable[str]) -> None:
        """These may be wanted next; read ahead as far as slots are free."""
        with self._state:
            self._guesses = deque(unit for unit in units if not self._is_behind(unit))
            self._state.notify_all()

    def take(self, unit: str) -> torch.Tensor:
        """The bytes of a wanted unit, ready for the compute lane."""
        with self._trace.stall("experts", unit), self._state:
            self._state.wait_for(lambda: self._slot_of(unit) is not None or self._error is not None)
            if self._error is not None:
                raise self._error
            slot = self._slot_of(unit)
        assert slot is not None
        self._device.compute.wait(slot.ready)
        return slot.buffer

    def release(self, unit: str) -> None:
        """The compute lane has been given all that reads what was taken."""
        idle = self._device.compute.record()
        with self._state:
            slot = self._slot_of(unit)
            assert slot is not None
            self._uses += 1
            slot.idle, slot.last_use = idle, self._uses
            self._pins[unit] -= 1
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

    def _slot_of(self, unit: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.unit == unit and slot.filled), None)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                unit, slot = job
                gate = partial(self._gate, unit)
                ready = self._copies.fill(slot.buffer, slot.idle, unit, "weight", gate)
                with self._state:
                    slot.ready, slot.filled = ready, True
                    self._state.notify_all()
        except BaseException as error:
            with self._state:
                self._error = self._error or error
                self._state.notify_all()

    def _next(self) -> tuple[str, _Slot] | None:
        """The next unit to copy, and the slot for it, as soon as there are both; None: closed."""
        with self._trace.wait(Track.EXPERT_UPLOADER, "slot"), self._state:
            while not self._closed:
                slot = min(
                    (slot for slot in self._slots if not self._pins[slot.unit or ""]),
                    key=lambda slot: (slot.unit is not None, slot.last_use),
                    default=None,
                )
                if slot is not None and self._wanted:
                    return self._assigned(self._wanted.popleft(), slot, guessed=False)
                while slot is not None and self._guesses and not slot.guessed:
                    unit = self._guesses.popleft()
                    if all(other.unit != unit for other in self._slots):
                        self.guesses += 1
                        return self._assigned(unit, slot, guessed=True)
                self._state.wait()
            return None

    def _assigned(self, unit: str, slot: _Slot, *, guessed: bool) -> tuple[str, _Slot]:
        slot.unit, slot.filled, slot.guessed, slot.last_use = unit, False, guessed, self._uses
        return unit, slot
