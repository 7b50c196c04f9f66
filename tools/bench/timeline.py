"""Traces of the cases of `tierstream bench train`."""

from __future__ import annotations

from tierstream.engine.measure.train_bench import TieredBench, TieredCase
from tierstream.engine.trace.file import trace_json
from tierstream.engine.trace.picture import picture
from tierstream.io.measure import Case
from tierstream.tools.bench.report import TracedCase


def record_case(bench: TieredBench, case: TieredCase, measured: Case, steps: int) -> TracedCase:
    """Runs some steps of a case that has been measured, and records them."""
    spans = bench.record(case, steps)
    title = f"{measured.labels['run']}, {measured.labels['layers']} layers"
    return TracedCase(title, trace_json(spans), picture(spans, title))
