"""What a trace costs: nothing when it is off, and few events when it is on."""

from __future__ import annotations

import contextlib
import timeit
from dataclasses import astuple
from pathlib import Path

import pytest
from support.rig import Setup, batches, rig, tiny_config

from tierstream.engine.device.device import HostLane
from tierstream.engine.trace.trace import Trace, Track

#: Events of a step: so many for each unit (its computation, copies, and who waits for it), and so many for
#: each use of a page (who waits for it, who works on it, and its transfers).
EVENTS_PER_UNIT, EVENTS_PER_PAGE_USE = 16, 4


def test_a_trace_that_is_off_keeps_nothing_and_stamps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a lane was stamped")

    monkeypatch.setattr(HostLane, "stamp", forbidden)
    setup = Setup()
    with rig(setup.but(nvme=tmp_path / "drive", dram=24 * setup.page)) as run:
        run.train(batches(2))
        assert run.trace.spans == []
        assert run.trace.take_stalls().keys() == {"weights", "gradients", "activations", "verdict"}
        assert run.trace.take_stalls() == {}


def test_a_span_that_is_off_costs_about_a_context_that_does_nothing() -> None:
    names = {"trace": Trace(), "track": Track.UPDATER, "nothing": contextlib.nullcontext}
    blocks = ("with trace.span(track, 'adamw', 'layers.0'): pass", "with nothing(): pass")
    off_s, nothing_s = (min(timeit.repeat(b, globals=names, number=5000, repeat=9)) for b in blocks)
    assert off_s < 5 * nothing_s


@pytest.mark.parametrize(("layers", "page"), [(2, 8192), (2, 16384), (6, 8192)])
def test_events_are_bounded_by_units_and_page_uses(tmp_path: Path, layers: int, page: int) -> None:
    setup = Setup(config=tiny_config(layers=layers), page=page)
    with rig(setup.but(nvme=tmp_path / "drive", dram=30 * page, trace=True)) as run:
        run.train(batches(2))
        run.trace.stop()
        before = astuple(run.store.stats)[:4]
        run.trace.start(3)
        run.train(batches(3)[2:])
        uses = sum(astuple(run.store.stats)[:4]) - sum(before)  # hits, prefetched, misses, fresh
        events = len(run.trace.stop())
        assert uses < events < EVENTS_PER_UNIT * len(run.units.in_forward_order) + EVENTS_PER_PAGE_USE * uses
