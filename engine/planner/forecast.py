"""What a simulated step comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstream.engine.trace.trace import Span


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step in steady state.

    Attributes:
        step_s: seconds.
        steps_s: of all simulated steps, the first from no page in DRAM. The last is `step_s`, or where steps
            never become alike, the median of the later half.
        tokens_per_s: tokens of a step by its seconds.
        busy_s: resource -> seconds at work: compute, upload, download, update (of the CPU), interpreter, and
            each drive by its directory. Where threads share the CPU's cores, work takes longer.
        idle_s: seconds that the lane `compute` waits, by cause, as `engine.trace.summary` names them.
        nbytes: moved by each link: upload, download, "nvme read", "nvme write"; the first two with what an
            update on the GPU moves.
        spans: of the step, as a trace of it would hold them.
    """

    step_s: float
    steps_s: Sequence[float]
    tokens_per_s: float
    busy_s: Mapping[str, float]
    idle_s: Mapping[str, float]
    nbytes: Mapping[str, int]
    spans: Sequence[Span] = field(repr=False)

    @property
    def resource(self) -> str:
        """What is busy longest: the bound."""
        return max(self.busy_s, key=self.busy_s.__getitem__)
