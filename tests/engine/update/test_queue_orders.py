"""Every order of calls of an update queue, beside a model of it."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.update_queue import ALL, GRANULES, PAGES, PATIENCE_S, UNITS, idle_works, store, works

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.optimizer import Verdict
from tierstream.engine.update.order import UNITS_AHEAD, Work
from tierstream.engine.update.queue import UpdateQueue
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Page

pytestmark = pytest.mark.timeout(120)

#: Pages of gradients that may be in DRAM: two granules.
MOST = 4


class QueueMachine(RuleBasedStateMachine):
    """Every order of calls, beside a model of the queue. Calls that may block run in threads: `settle` waits
    for those that the model says must return, and sees that no other has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool = UpdateQueue(UNITS, MOST), ThreadPoolExecutor(64)
        self.stored: set[Page] = set()
        self.pending: list[str] = []
        self.first: list[str] = []
        self.untaken: dict[str, list[Granule]] = {unit: [] for unit in UNITS}
        self.unfinished: set[tuple[str, int]] = set()
        self.verdicts: dict[str, tuple[Verdict, ...]] = {}
        self.allowed, self.updates = len(UNITS), 0
        self.working: list[Granule] = []
        self.takes: list[Future[tuple[Granule, tuple[Verdict, ...]] | None]] = []
        self.waits: list[tuple[set[tuple[str, int]], Future[None]]] = []
        self.admits: list[Future[None]] = []
        self.admitted = 0

    @rule(page=st.sampled_from(PAGES))
    def store_page(self, page: Page) -> None:
        self.queue.stored(page)
        self.stored.add(page)

    @rule(unit=st.sampled_from(UNITS))
    def store_gradient(self, unit: str) -> None:
        store(self.queue, *GRANULES[unit])
        self.stored |= {page for page in PAGES if page.unit == unit}

    @rule()
    def forget(self) -> None:
        self.queue.forget()
        self.stored.clear()
        self.admitted = 0

    @precondition(lambda self: len(self.admits) < 3)
    @rule()
    def admit(self) -> None:
        self.admits.append(self.pool.submit(self.queue.admit))

    @precondition(lambda self: not self.unfinished)
    @rule(ahead=st.sampled_from([None, 0, 1, UNITS_AHEAD]), idle=st.sets(st.sampled_from(UNITS)))
    def decide_all(self, ahead: int | None, idle: set[str]) -> None:
        self._decide({unit: self._work(unit, idle=unit in idle) for unit in UNITS}, self.pending, ahead=ahead)
        self.allowed = len(UNITS) if ahead is None else ahead

    @rule(unit=st.sampled_from(UNITS), idle=st.booleans())
    def decide_one(self, unit: str, idle: bool) -> None:
        if self._decide({unit: self._work(unit, idle=idle)}, self.pending):
            self.allowed = len(UNITS)

    @rule(units=st.lists(st.sampled_from(UNITS), unique=True, min_size=1), count=st.integers(1, 3))
    def decide_first(self, units: list[str], count: int) -> None:
        free = [unit for unit in units if not any(unit == other for other, _ in self.unfinished)]
        self._decide({unit: self._work(unit, count, idle=True) for unit in free or units}, self.first)

    def _work(self, unit: str, count: int = 1, *, idle: bool) -> Work:
        self.updates += count
        updates = range(self.updates - count + 1, self.updates + 1)
        return (idle_works if idle else works)([unit], *updates)[unit]

    def _decide(self, decided: dict[str, Work], to: list[str], **ahead: int | None) -> bool:
        decide = self.queue.decide_first if to is self.first else self.queue.decide
        if any(unit in decided for unit, _ in self.unfinished):
            with pytest.raises(InvariantError, match="began before"):
                decide(decided)
            return False
        decide(decided, **ahead)
        to += decided
        for unit, work in decided.items():
            self.untaken[unit], self.verdicts[unit] = list(work.granules), work.verdicts
            self.unfinished |= {(unit, granule.index) for granule in work.granules}
        return True

    @rule()
    def want_in_forward_order(self) -> None:
        self.queue.want_in_forward_order()
        self.pending.sort(key=UNITS.index)

    @precondition(lambda self: len(self.takes) < 3)
    @rule()
    def take(self) -> None:
        self.takes.append(self.pool.submit(self.queue.take))

    @precondition(lambda self: self.working)
    @rule(choice=st.integers(0, 1000))
    def finish_one(self, choice: int) -> None:
        granule = self.working.pop(choice % len(self.working))
        self.queue.finished(granule)
        self.unfinished.discard((granule.unit, granule.index))
        self.admitted -= len(granule.gradient)

    @rule(granule=st.sampled_from(ALL))
    def wait(self, granule: Granule) -> None:
        which = granule.unit, granule.index
        self.waits.append(({which}, self.pool.submit(self.queue.wait, *which)))
        self.allowed = max(self.allowed, UNITS.index(granule.unit) + 1 + UNITS_AHEAD)

    @precondition(lambda self: self.unfinished)
    @rule()
    def wait_for_all(self) -> None:
        self.waits.append(({(g.unit, g.index) for g in ALL}, self.pool.submit(self.queue.finish)))
        self.allowed = len(UNITS)

    @rule(unit=st.sampled_from(UNITS))
    def wait_for_one(self, unit: str) -> None:
        own = {(unit, granule.index) for granule in GRANULES[unit]}
        self.waits.append((own, self.pool.submit(self.queue.finish, [unit])))
        if own & self.unfinished:
            self.allowed = len(UNITS)

    @invariant()
    def settle(self) -> None:
        expected = set()
        while len(expected) < len(self.takes) and (granule := self._next()) is not None:
            self.stored -= granule.gradient
            self.untaken[granule.unit].remove(granule)
            if not self.untaken[granule.unit]:
                (self.first if granule.unit in self.first else self.pending).remove(granule.unit)
            self.working.append(granule)
            expected.add((granule, self.verdicts[granule.unit]))
        found = set()
        while len(found) < len(expected):
            done, _ = wait_for_futures(self.takes, PATIENCE_S, FIRST_COMPLETED)
            assert done, "a worker sleeps although there is a granule"
            found |= {future.result() for future in done}
            self.takes = [future for future in self.takes if future not in done]
        assert found == expected
        assert not any(future.done() for future in self.takes)
        for granules, future in self.waits:
            if not granules & self.unfinished:
                future.result(PATIENCE_S)
            else:
                assert not future.done()
        self.waits = [entry for entry in self.waits if not entry[1].done()]
        self._settle_admits()

    def _settle_admits(self) -> None:
        """As many go on as there is room for."""
        while self.admits and self.admitted < MOST:
            done, left = wait_for_futures(self.admits, PATIENCE_S, FIRST_COMPLETED)
            assert done, "a gradient waits although there is room"
            assert all(future.exception() is None for future in done)
            self.admitted += len(done)
            self.admits = list(left)
        assert self.admitted <= MOST
        assert not any(future.done() for future in self.admits)

    def _next(self) -> Granule | None:
        allowed = [unit for unit in self.pending if UNITS.index(unit) < self.allowed]
        whole = (g for unit in self.first + allowed for g in self.untaken[unit] if g.gradient <= self.stored)
        return next(whole, None)

    def teardown(self) -> None:
        self.queue.close()
        assert [future.result(PATIENCE_S) for future in self.takes] == [None] * len(self.takes)
        for admit in self.admits:
            admit.result(PATIENCE_S)
        for _, future in self.waits:
            with pytest.raises(InvariantError, match="aborted"):
                future.result(PATIENCE_S)
        self.pool.shutdown()


QueueMachine.TestCase.settings = settings(stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase
