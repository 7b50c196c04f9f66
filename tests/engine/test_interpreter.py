"""Within `undisturbed` garbage waits; blocks in each other keep what the outer one set."""

from __future__ import annotations

import gc
import sys
import weakref

from tierstream.engine.interpreter import undisturbed


class _Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def state() -> tuple[int, bool, float]:
    """Python forgets a microsecond of the interval each time that it is set."""
    return gc.get_freeze_count(), gc.isenabled(), round(sys.getswitchinterval(), 5)


def test_nested_blocks_leave_the_outer_one_as_it_is() -> None:
    before = state()
    with undisturbed():
        outer = state()
        assert gc.get_freeze_count() > 1000
        assert not gc.isenabled()
        with undisturbed():
            node = weakref.ref(_Node())
            assert not gc.isenabled()
        assert state() == outer
        assert node() is not None
        gc.collect()
        assert node() is None
    assert state() == before


def test_garbage_of_an_inner_block_can_be_collected_after_it() -> None:
    """A model that was built before it and dropped after it, as a benchmark does."""
    with undisturbed():
        kept = _Node()
        node = weakref.ref(kept)
        with undisturbed():
            pass
        del kept
        gc.collect()
        assert node() is None
