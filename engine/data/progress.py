"""How far a long preparation has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Told now and then while something takes longer than a breath.

    Attributes:
        what: is under way, as "tokenising corpus.jsonl"; while it stays the same, `done` only grows.
        done, total: of it, in `unit`; total None: not known.
        unit: "bytes", or what is counted.
    """

    what: str
    done: int
    total: int | None
    unit: str = "bytes"


OnProgress = Callable[[Progress], object]


def not_told(progress: Progress) -> None:
    """For those who do not want to know."""


class Sum:
    """Tells of what was done, a part at a time, as of how much is done in all.

    Args:
        what, total: as of `Progress`. done: before the first part.
    """

    def __init__(self, on_progress: OnProgress, what: str, total: int, done: int = 0) -> None:
        self._on_progress, self._what, self._total, self._done = on_progress, what, total, done

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(Progress(self._what, self._done, self._total))
