"""How far a long preparation has come."""

from __future__ import annotations

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
