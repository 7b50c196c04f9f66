"""Which expert's weights lie in which slot of the device. A state machine without threads: `cache` fills its
slots, and the planner's simulator fills them in simulated time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Buffer = TypeVar("_Buffer")


@dataclass(eq=False, slots=True)
class Slot(Generic[_Buffer]):
    """Attributes: buffer: the slot itself. guessed: nobody has wanted its content yet."""

    buffer: _Buffer
    unit: str | None = None
    filled: bool = False
    guessed: bool = False
    last_use: int = 0


class ExpertSlots(Generic[_Buffer]):
    """Slots, least recently used first to go.

    Args:
        is_behind: a unit has missed updates: it is no guess.

    Attributes:
        hits, misses: of experts that were wanted: those that lay in a slot, and those that had to come.
        guesses, right_guesses: experts read ahead, and those of them that were wanted afterwards.
    """

    def __init__(self, buffers: Iterable[_Buffer], is_behind: Callable[[str], bool]) -> None:
        self._is_behind = is_behind
        self._slots = [Slot(buffer) for buffer in buffers]
        self._slot_of = dict[str, Slot[_Buffer]]()
        self._wanted: deque[str] = deque()
        """Those that have no slot yet, in the order in which they will be taken."""
        self._guesses: deque[str] = deque()
        self._pins = Counter[str]()
        """Wanted and not released yet."""
        self._uses = 0
        self.hits = self.misses = self.guesses = self.right_guesses = 0

    def stop_guessing(self) -> None:
        self._guesses.clear()

    @property
    def settled(self) -> bool:
        """No slot is being filled."""
        return all(slot.filled or slot.unit is None for slot in self._slots)

    def forget(self) -> None:
        """The weights in the slots are not right any more."""
        for slot in self._slots:
            slot.unit = None
        self._slot_of.clear()

    def want(self, units: Sequence[str]) -> list[str]:
        """These will be taken, each once. Returns the order in which they must be."""
        self._guesses.clear()  # what comes next is known now
        here = [unit for unit in units if unit in self._slot_of]
        missing = [unit for unit in units if unit not in self._slot_of]
        self.right_guesses += sum(self._slot_of[unit].guessed for unit in here)
        for slot in self._slots:
            slot.guessed = False
        self._pins.update(units)
        self._wanted.extend(missing)
        self.hits += len(here)
        self.misses += len(missing)
        return here + missing

    def expect(self, units: Iterable[str]) -> None:
        """These may be wanted next."""
        self._guesses = deque(unit for unit in units if not self._is_behind(unit))

    def filled(self, units: Sequence[str]) -> list[Slot[_Buffer]] | None:
        """The slots that hold the units' bytes; None: some are not there yet."""
        slots = [slot for unit in units if (slot := self._slot_of.get(unit)) is not None and slot.filled]
        return slots if len(slots) == len(units) else None

    def release(self, unit: str) -> Slot[_Buffer]:
        """The bytes of a unit that was taken are not needed any more; its slot."""
        slot = self._slot_of[unit]
        self._uses += 1
        slot.last_use = self._uses
        self._pins[unit] -= 1
        return slot

    def next(self) -> tuple[str, Slot[_Buffer]] | None:
        """The next unit to fill a slot with, and the slot; None: there is none now."""
        slot = min(
            (slot for slot in self._slots if not self._pins[slot.unit or ""]),
            key=lambda slot: (slot.unit is not None, slot.last_use),
            default=None,
        )
        if slot is not None and self._wanted:
            return self._assigned(self._wanted.popleft(), slot, guessed=False)
        while slot is not None and self._guesses and not slot.guessed:
            unit = self._guesses.popleft()
            if unit not in self._slot_of:
                self.guesses += 1
                return self._assigned(unit, slot, guessed=True)
        return None

    def _assigned(self, unit: str, slot: Slot[_Buffer], *, guessed: bool) -> tuple[str, Slot[_Buffer]]:
        if slot.unit is not None:
            del self._slot_of[slot.unit]
        self._slot_of[unit] = slot
        slot.unit, slot.filled, slot.guessed, slot.last_use = unit, False, guessed, self._uses
        return unit, slot
