"""What the lane `compute` waited for in each traced step: its idle time, split by cause.

Every instant at which the lane is idle gets one cause, the first that holds:

    gradients, activations, experts,
    verdict                           the host that feeds the lane stalls for it
    activations                       the boundary that the lane needs next is not on the device yet; it is
                                      uploaded ahead of the weights
    weights: ...                      the weights of what the lane computes next are not on the device yet;
                                      the uploader waits for their update (which computes, or itself waits for
                                      pages), for a page, for a slot; or else bytes are being copied
    host                              nothing is missing but the kernels: Python is at work

This holds for a CUDA stream, which waits on the device while the host runs ahead, and for the CPU, where the
host's stalls are the lane's idle time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tierstream.engine.metrics import TracedStep
from tierstream.engine.model.units import EMBED, activation_unit
from tierstream.engine.trace.trace import Span, Track

#: Why the uploader waits -> cause of the lane's idle time.
_UPLOADER_CAUSES = {"page": "weights: page", "slot": "weights: slot"}


class Gap(NamedTuple):
    """Time in which the lane `compute` was idle, on the clock of the spans."""

    cause: str
    begin_s: float
    end_s: float


def summarise(spans: Sequence[Span]) -> list[TracedStep]:
    """Busy and idle seconds of every traced step, in order."""
    return [_sum_up(step, gaps) for step, gaps in find_gaps(spans)]


def find_gaps(spans: Sequence[Span]) -> list[tuple[Span, list[Gap]]]:
    """The traced steps, in order, each with its gaps, in order too: all of its idle time."""
    tracks = {track: _Track([span for span in spans if span.track is track]) for track in Track}
    return [(step, list(_gaps(step, tracks))) for step in tracks[Track.STEPS].spans]


class _Track:
    """Spans of a track that do not overlap, in order of time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.begin_s)
        self._begins = [span.begin_s for span in self.spans]

    def between(self, begin_s: float, end_s: float) -> list[Span]:
        """Those that overlap the interval."""
        first = max(0, bisect_right(self._begins, begin_s) - 1)
        found = self.spans[first : bisect_left(self._begins, end_s)]
        return [span for span in found if span.end_s > begin_s]


def _sum_up(step: Span, gaps: Sequence[Gap]) -> TracedStep:
    idle_s: dict[str, float] = defaultdict(float)
    for gap in gaps:
        idle_s[gap.cause] += gap.end_s - gap.begin_s
    step_s = step.end_s - step.begin_s
    return TracedStep(
        step=int(step.unit),
        step_s=step_s,
        busy_s=step_s - sum(idle_s.values()),
        idle_s=dict(sorted(idle_s.items(), key=lambda item: -item[1])),
    )


def _gaps(step: Span, tracks: dict[Track, _Track]) -> Iterator[Gap]:
    uploads: dict[str, list[Span]] = defaultdict(list)
    for upload in tracks[Track.UPLOAD].between(step.begin_s, step.end_s):
        uploads[upload.unit].append(upload)
    work = tracks[Track.COMPUTE].between(step.begin_s, step.end_s)
    ends = [step.begin_s, *(span.end_s for span in work)]
    for begin_s, coming in zip(ends, [*work, None], strict=True):
        end_s = step.end_s if coming is None else coming.begin_s
        yield from _split(begin_s, end_s, [] if coming is None else _needed(coming, uploads), tracks)


def _needed(coming: Span, uploads: dict[str, list[Span]]) -> list[Span]:
    """The last upload, before `coming` was enqueued, of its weights and of the boundary that it reads."""
    assert coming.enqueued_s is not None
    units = [coming.unit]
    if coming.what == "backward" and coming.unit != EMBED:
        units.append(activation_unit(int(coming.unit.rpartition(".")[2])))
    found = []
    for unit in units:
        earlier = [u for u in uploads[unit] if u.enqueued_s and u.enqueued_s[1] <= coming.enqueued_s[0]]
        found += earlier[-1:]
    return found


def _split(
    begin_s: float, end_s: float, needed: Sequence[Span], tracks: dict[Track, _Track]
) -> Iterator[Gap]:
    """An idle interval, cut where its cause changes."""
    if end_s <= begin_s:
        return
    waits = {
        track: [span for span in tracks[track].between(begin_s, end_s) if span.waiting]
        for track in (Track.HOST, Track.UPLOADER, Track.UPDATER)
    }
    cuts = {begin_s, end_s}
    for span in [*needed, *(span for found in waits.values() for span in found)]:
        cuts.update(time_s for time_s in (span.begin_s, span.end_s) if begin_s < time_s < end_s)
    for start, end in pairwise(sorted(cuts)):
        at = {
            track: next((span for span in found if span.begin_s <= start and end <= span.end_s), None)
            for track, found in waits.items()
        }
        yield Gap(_cause(start, needed, at), start, end)


def _cause(time_s: float, needed: Sequence[Span], at: dict[Track, Span | None]) -> str:
    host, uploader, updater = at[Track.HOST], at[Track.UPLOADER], at[Track.UPDATER]
    if host is not None and host.what in ("gradients", "activations", "experts", "verdict"):
        return host.what
    missing = [upload for upload in needed if upload.end_s > time_s]
    if any(upload.what == "activation" for upload in missing):
        return "activations"
    if not missing and (host is None or host.what != "weights"):
        return "host"
    # What the uploader does for later uploads has delayed nothing here.
    enqueued_s = max((upload.enqueued_s[1] for upload in missing if upload.enqueued_s), default=math.inf)
    if uploader is None or uploader.begin_s >= enqueued_s:
        return "weights: copy"
    if uploader.what == "update":
        return "weights: page of the update" if updater and updater.what == "page" else "weights: update"
    return _UPLOADER_CAUSES.get(uploader.what, "weights: copy")
