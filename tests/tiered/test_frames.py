"""States of a page in a frame: illegal transitions, and what a freed frame holds."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_bench import Bench
from support.stores import PAGE_BYTES, layout_of, uniform_layout

from tierstream.io.errors import InvariantError
from tierstream.tiered.frames import Entry, State
from tierstream.tiered.layout import Page
from tierstream.tiered.lease import Intent


def test_illegal_transitions_are_bugs() -> None:
    layout = uniform_layout(2)
    frame = np.zeros(PAGE_BYTES, np.uint8)

    def entry() -> Entry:
        made = Entry(Page("unit", "weight", 0), layout)
        made.bind(frame, filling=False)
        made.stored = True
        return made

    free = Entry(Page("unit", "weight", 1), layout)
    for action in (free.view, free.unbind, free.start_fill, free.end_fill, free.end_write):
        with pytest.raises(InvariantError, match="it is free"):
            action()
    leased = entry()
    leased.lease(alone=True)
    assert leased.state is State.LEASED
    for illegal in (
        leased.unbind,
        leased.start_fill,
        lambda: leased.lease(alone=False),
        lambda: leased.lease(alone=True),
        lambda: leased.start_write(victim=False),
        lambda: leased.unlease(alone=False),
        lambda: leased.bind(frame, filling=False),
    ):
        with pytest.raises(InvariantError, match="it is leased"):
            illegal()
    writing = entry()
    writing.start_write(victim=True)
    writing.lease(alone=False)
    with pytest.raises(InvariantError, match="writing=True"):
        writing.lease(alone=True)
    with pytest.raises(InvariantError, match="writing=True"):
        writing.start_write(victim=True)
    writing.unlease(alone=False)
    with pytest.raises(InvariantError, match="it is writing"):
        writing.unbind()
    writing.end_write()
    assert writing.state is State.READY
    filling = entry()
    filling.start_fill()
    assert filling.state is State.FILLING
    with pytest.raises(InvariantError, match="it is filling"):
        filling.unbind()


def test_freed_frames_are_poisoned() -> None:
    layout = layout_of(
        ("u", "weight", "bfloat16", PAGE_BYTES, True), ("u", "grad", "float32", PAGE_BYTES // 4, False)
    )
    it = Bench(layout, 1)
    (grad,) = layout.pages("u", "grad")
    it.use(grad, Intent.OVERWRITE)
    frame = it.cache.entry(grad).view()
    frame.fill(1)
    it.use(grad, Intent.CONSUME)
    assert np.isnan(frame.view(np.float32)).all()
