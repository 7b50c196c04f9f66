"""A trace as a file that ui.perfetto.dev and chrome://tracing open.

The format is the JSON Array of Google's "Trace Event Format"
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), in its object form:
complete events (`X`) for what happens one after the other, async events (`b`, `e`) for pages, of which
several move at once, counters (`C`) for their bytes under way, and metadata (`M`) for names and order of the
tracks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierstream.engine.trace.trace import Span, Track
from tierstream.io import durable

_PROCESS = 1
_THREADS = {track: number for number, track in enumerate(Track, start=1)}

Event = dict[str, Any]


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write `spans` to `path`, whole or not at all. Raises StorageError."""
    durable.write_file(path, trace_json(spans))


def trace_json(spans: Sequence[Span]) -> bytes:
    """The content of a trace file; times count from the first span."""
    in_order = sorted(spans, key=lambda span: span.begin_s)
    events = [*_metadata(), *_events(in_order)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()


def _metadata() -> Iterator[Event]:
    yield _event("M", "process_name", args={"name": "tierstream"})
    for track, thread in _THREADS.items():
        yield _event("M", "thread_name", thread, args={"name": track.value})
        yield _event("M", "thread_sort_index", thread, args={"sort_index": thread})


def _events(spans: Sequence[Span]) -> Iterator[Event]:
    def ts(time_s: float) -> float:
        """Microseconds since the first span began."""
        return round(1e6 * (time_s - spans[0].begin_s), 3)

    under_way: dict[Track, list[tuple[float, int]]] = {}
    for number, span in enumerate(spans):
        thread = _THREADS[span.track]
        start, end = ts(span.begin_s), ts(span.end_s)
        if span.page is None:
            labels = {"cat": "wait" if span.waiting else "work", "args": {"unit": span.unit}}
            yield _event("X", span.name, thread, ts=start, dur=round(end - start, 3), **labels)
            continue
        page = span.page
        args = {"unit": page.unit, "plane": page.plane, "page": page.index, "bytes": span.nbytes}
        same = {"cat": span.track.value, "id": number}  # what pairs the two
        yield _event("b", span.name, thread, ts=start, args=args, **same)
        yield _event("e", span.name, thread, ts=end, **same)
        under_way.setdefault(span.track, []).extend([(start, span.nbytes), (end, -span.nbytes)])
    for track, changes in under_way.items():
        nbytes = 0
        for time, change in sorted(changes):
            nbytes += change
            yield _event("C", f"{track.value}, bytes under way", ts=time, args={"bytes": nbytes})


def _event(phase: str, name: str, thread: int = 0, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": thread, **more}
