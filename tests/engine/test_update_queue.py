"""Which granule is updated next: order, permission, each exactly once, and nobody sleeps for ever."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstream.engine.granules import Granule
from tierstream.engine.optimizer import Verdict
from tierstream.engine.update_queue import UNITS_AHEAD, UpdateQueue
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Page

#: In forward order, with their granules. A granule has two gradient pages, as with fp32 gradients of bf16
#: weights.
SIZES = {"embed": 2, "layers.0": 1, "layers.1": 3, "layers.2": 1, "head": 2}
UNITS = list(SIZES)
#: Seconds after which a thread that should go on is taken to sleep for ever.
PATIENCE_S = 20.0

pytestmark = pytest.mark.timeout(120)


def gradient_of(unit: str, index: int) -> frozenset[Page]:
    return frozenset(Page(unit, "grad", 2 * index + half) for half in (0, 1))


GRANULES = {
    unit: [Granule(unit, index, (), (), gradient_of(unit, index)) for index in range(count)]
    for unit, count in SIZES.items()
}
ALL = [granule for own in GRANULES.values() for granule in own]
PAGES = sorted((page for granule in ALL for page in granule.gradient), key=str)


@pytest.fixture
def queue() -> Iterator[UpdateQueue]:
    made = UpdateQueue(GRANULES)
    yield made
    made.close()  # a failed test must not leave threads that wait


def verdict(update: int) -> Verdict:
    return Verdict(1.0, 1.0, 0.1, update)


def store(queue: UpdateQueue, *granules: Granule) -> None:
    for granule in granules:
        for page in granule.gradient:
            queue.stored(page)


def taken(queue: UpdateQueue) -> Granule:
    """The next granule, updated at once."""
    found = queue.take()
    assert found is not None
    queue.finished(found[0])
    return found[0]


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """A call that may have to wait, in a thread of its own; it has most likely begun to wait."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    time.sleep(0.02)
    return future


def test_a_deferred_update_goes_in_forward_order_as_far_as_it_may(queue: UpdateQueue) -> None:
    """`wait` for a unit lets the update run on, whatever the order in which gradients were stored."""
    store(queue, *reversed(ALL))
    queue.decide(UNITS, verdict(1), ahead=UNITS_AHEAD)
    allowed = [*GRANULES["embed"], *GRANULES["layers.0"]]
    assert [taken(queue) for _ in allowed] == allowed
    worker = in_thread(queue.take)
    assert not worker.done()
    queue.wait("embed", 0)  # finished already, but the unit two ahead of it may be updated now
    assert worker.result(PATIENCE_S) == (GRANULES["layers.1"][0], verdict(1))
    assert [taken(queue) for _ in range(2)] == GRANULES["layers.1"][1:]
    worker = in_thread(queue.take)
    assert not worker.done()
    upload = in_thread(queue.wait, "layers.1", 0)
    assert worker.result(PATIENCE_S) == (GRANULES["layers.2"][0], verdict(1))
    assert not upload.done()
    queue.finished(GRANULES["layers.1"][0])
    upload.result(PATIENCE_S)


def test_a_worker_may_begin_with_what_is_wanted_last(queue: UpdateQueue) -> None:
    """Among the units that may be updated; forward meets others who began with the first."""
    store(queue, *ALL)
    queue.decide(UNITS, verdict(1), ahead=3)
    granule, _ = queue.take(last_first=True) or pytest.fail("closed")
    assert granule == GRANULES["layers.1"][0]
    assert [taken(queue) for _ in range(3)] == [*GRANULES["embed"], *GRANULES["layers.0"]]
    assert taken(queue) == GRANULES["layers.1"][1]
    queue.finished(granule)


def test_a_flush_is_not_held_back(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.decide(UNITS, verdict(1))
    assert [taken(queue) for _ in ALL] == ALL
    queue.finish()


def test_finish_lets_a_deferred_update_run_to_its_end(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.decide(UNITS, verdict(1), ahead=0)
    finish = in_thread(queue.finish)
    assert [taken(queue) for _ in ALL] == ALL
    finish.result(PATIENCE_S)


def test_during_backward_units_come_as_they_are_decided_and_the_rest_in_forward_order(
    queue: UpdateQueue,
) -> None:
    store(queue, *ALL)
    for unit in reversed(UNITS):
        queue.decide([unit], verdict(1))
    head, last = GRANULES["head"], GRANULES["layers.2"]
    assert [taken(queue) for _ in (*head, *last)] == [*head, *last]
    queue.want_in_forward_order()
    left = [granule for granule in ALL if granule.unit not in ("head", "layers.2")]
    assert [taken(queue) for _ in left] == left


def test_a_granule_waits_for_all_of_its_gradient_and_holds_nobody_up(queue: UpdateQueue) -> None:
    queue.decide(["layers.1"], verdict(1))
    first, second, third = GRANULES["layers.1"]
    worker = in_thread(queue.take)
    one, other = first.gradient
    queue.stored(one)
    store(queue, third)
    assert worker.result(PATIENCE_S) == (third, verdict(1))
    worker = in_thread(queue.take)
    assert not worker.done()
    queue.stored(other)
    assert worker.result(PATIENCE_S) == (first, verdict(1))
    store(queue, second)
    assert taken(queue) == second


def test_all_who_can_go_on_are_woken(queue: UpdateQueue) -> None:
    """Three workers by one verdict; each upload by its own granule, in whatever order they are finished."""
    store(queue, *GRANULES["layers.1"])
    workers = [in_thread(queue.take) for _ in range(3)]
    queue.decide(["layers.1"], verdict(1))
    assert {worker.result(PATIENCE_S) for worker in workers} == {
        (g, verdict(1)) for g in GRANULES["layers.1"]
    }
    uploads = [in_thread(queue.wait, "layers.1", granule.index) for granule in GRANULES["layers.1"]]
    for granule in reversed(GRANULES["layers.1"]):
        assert not uploads[granule.index].done()
        queue.finished(granule)
        uploads[granule.index].result(PATIENCE_S)


def test_gradients_of_a_skipped_step_are_forgotten(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.forget()
    queue.decide(UNITS, verdict(1))
    worker = in_thread(queue.take)
    assert not worker.done()
    store(queue, GRANULES["head"][1])
    assert worker.result(PATIENCE_S) == (GRANULES["head"][1], verdict(1))


def test_a_unit_cannot_be_decided_while_its_update_is_under_way(queue: UpdateQueue) -> None:
    store(queue, *GRANULES["layers.0"])
    queue.decide(["layers.0"], verdict(1))
    with pytest.raises(InvariantError, match=r"layers\.0 began before"):
        queue.decide(["layers.0"], verdict(2))
    (granule, found) = queue.take() or pytest.fail("closed")
    with pytest.raises(InvariantError, match=r"layers\.0 began before"):
        queue.decide(["layers.0"], verdict(2))
    assert found == verdict(1)
    queue.finished(granule)
    queue.decide(["layers.0"], verdict(2))


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_an_end_wakes_everybody_and_is_told_to_whoever_comes_later(queue: UpdateQueue, end: str) -> None:
    """Workers end in silence; who waits for them gets the first error."""
    queue.decide(UNITS, verdict(1))
    workers = [in_thread(queue.take) for _ in range(3)]
    waiting = [in_thread(queue.wait, unit, 0) for unit in UNITS] + [in_thread(queue.finish)]
    if end == "failed":
        queue.failed(OSError("the drive is gone"))
        queue.failed(OSError("so is this one"))
    else:
        queue.close()
    assert [worker.result(PATIENCE_S) for worker in workers] == [None] * 3
    kind = OSError if end == "failed" else InvariantError
    said = "the drive is gone" if end == "failed" else "aborted"
    for future in [*waiting, in_thread(queue.wait, "embed", 0), in_thread(queue.finish)]:
        with pytest.raises(kind, match=said):
            future.result(PATIENCE_S)
    assert queue.take() is None


@pytest.mark.parametrize("seed", range(8))
def test_no_wake_up_is_lost(queue: UpdateQueue, seed: int) -> None:
    """Workers, a downloader and an uploader with random delays over several steps, deferred and in backward:
    all come to their end, each granule is updated once a step, and no upload comes before its update.
    """
    chance, early, steps = random.Random(seed), bool(seed % 2), 6
    updated: Counter[tuple[Granule, int]] = Counter()

    def delay() -> None:
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.003)

    def work() -> None:
        while (found := queue.take()) is not None:
            delay()
            updated[found[0], found[1].update] += 1
            queue.finished(found[0])

    def upload(update: int) -> None:
        for granule in ALL:
            delay()
            queue.wait(granule.unit, granule.index)
            assert update == 0 or updated[granule, update] == 1

    def backward() -> list[Future[None]]:
        sent = []
        for unit in reversed(UNITS):
            delay()
            if early:
                queue.decide([unit], verdict(step))
            sent.append(downloader.submit(download, unit))
        return sent

    def download(unit: str) -> None:
        pages = [page for page in PAGES if page.unit == unit]
        chance.shuffle(pages)
        for page in pages:
            delay()
            queue.stored(page)

    with (
        ThreadPoolExecutor(3) as workers,
        ThreadPoolExecutor(1) as downloader,
        ThreadPoolExecutor(1) as uploader,
        contextlib.closing(queue),
    ):
        working = [workers.submit(work) for _ in range(3)]
        for step in range(1, steps + 1):
            uploader.submit(upload, step - 1).result(PATIENCE_S)
            stored = backward()
            if not early:
                queue.decide(UNITS, verdict(step), ahead=UNITS_AHEAD)
            else:
                queue.want_in_forward_order()
        in_thread(queue.finish).result(PATIENCE_S)
    for future in (*working, *stored):
        future.result()
    assert updated == {(granule, step): 1 for granule in ALL for step in range(1, steps + 1)}


class QueueMachine(RuleBasedStateMachine):
    """Every order of calls, beside a model of the queue. Calls that may block run in threads: `settle` waits
    for those that the model says must return, and sees that no other has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool = UpdateQueue(GRANULES), ThreadPoolExecutor(64)
        self.stored: set[Page] = set()
        self.pending: list[str] = []
        self.untaken: dict[str, list[Granule]] = {unit: [] for unit in UNITS}
        self.unfinished: set[Granule] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.allowed, self.updates = len(UNITS), 0
        self.working: list[Granule] = []
        self.takes: list[Future[tuple[Granule, Verdict] | None]] = []
        self.waits: list[tuple[set[Granule], Future[None]]] = []

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

    @precondition(lambda self: not self.unfinished)
    @rule(ahead=st.sampled_from([None, 0, 1, UNITS_AHEAD]))
    def decide_all(self, ahead: int | None) -> None:
        self._decide(UNITS, ahead)

    @rule(unit=st.sampled_from(UNITS))
    def decide_one(self, unit: str) -> None:
        if any(granule.unit == unit for granule in self.unfinished):
            with pytest.raises(InvariantError):
                self.queue.decide([unit], verdict(-1))
        else:
            self._decide([unit], None)

    def _decide(self, units: list[str], ahead: int | None) -> None:
        self.updates += 1
        self.queue.decide(units, verdict(self.updates), ahead=ahead)
        self.pending += units
        for unit in units:
            self.untaken[unit] = list(GRANULES[unit])
            self.unfinished |= set(GRANULES[unit])
            self.verdicts[unit] = verdict(self.updates)
        self.allowed = len(UNITS) if ahead is None else ahead

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
        self.unfinished.discard(granule)

    @rule(granule=st.sampled_from(ALL))
    def wait(self, granule: Granule) -> None:
        self.waits.append(({granule}, self.pool.submit(self.queue.wait, granule.unit, granule.index)))
        self.allowed = max(self.allowed, UNITS.index(granule.unit) + 1 + UNITS_AHEAD)

    @precondition(lambda self: self.unfinished)
    @rule()
    def wait_for_all(self) -> None:
        self.waits.append((set(ALL), self.pool.submit(self.queue.finish)))
        self.allowed = len(UNITS)

    @invariant()
    def settle(self) -> None:
        expected = set()
        while len(expected) < len(self.takes) and (granule := self._next()) is not None:
            self.stored -= granule.gradient
            self.untaken[granule.unit].remove(granule)
            if not self.untaken[granule.unit]:
                self.pending.remove(granule.unit)
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

    def _next(self) -> Granule | None:
        allowed = [unit for unit in self.pending if UNITS.index(unit) < self.allowed]
        whole = (g for unit in allowed for g in self.untaken[unit] if g.gradient <= self.stored)
        return next(whole, None)

    def teardown(self) -> None:
        self.queue.close()
        assert [future.result(PATIENCE_S) for future in self.takes] == [None] * len(self.takes)
        for _, future in self.waits:
            with pytest.raises(InvariantError, match="aborted"):
                future.result(PATIENCE_S)
        self.pool.shutdown()


QueueMachine.TestCase.settings = settings(stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase
