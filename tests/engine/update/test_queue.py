"""Which granule is updated next: order, permission, each exactly once, and nobody sleeps for ever."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.update_queue import ALL, GRANULES, PAGES, PATIENCE_S, UNITS, idle_works, store, verdicts, works

from tierstream.engine.update.granules import Granule
from tierstream.engine.update.order import UNITS_AHEAD
from tierstream.engine.update.queue import UpdateQueue
from tierstream.io.errors import InvariantError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def queue() -> Iterator[UpdateQueue]:
    made = UpdateQueue(UNITS)
    yield made
    made.close()  # a failed test must not leave threads that wait


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
    queue.decide(works(UNITS, 1), ahead=UNITS_AHEAD)
    allowed = [*GRANULES["embed"], *GRANULES["layers.0"]]
    assert [taken(queue) for _ in allowed] == allowed
    worker = in_thread(queue.take)
    assert not worker.done()
    queue.wait("embed", 0)  # finished already, but the unit two ahead of it may be updated now
    assert worker.result(PATIENCE_S) == (GRANULES["layers.1"][0], verdicts(1))
    assert [taken(queue) for _ in range(2)] == GRANULES["layers.1"][1:]
    worker = in_thread(queue.take)
    assert not worker.done()
    upload = in_thread(queue.wait, "layers.1", 0)
    assert worker.result(PATIENCE_S) == (GRANULES["layers.2"][0], verdicts(1))
    assert not upload.done()
    queue.finished(GRANULES["layers.1"][0])
    upload.result(PATIENCE_S)


def test_a_worker_may_begin_with_what_is_wanted_last(queue: UpdateQueue) -> None:
    """Among the units that may be updated; forward meets others who began with the first."""
    store(queue, *ALL)
    queue.decide(works(UNITS, 1), ahead=3)
    granule, _ = queue.take(last_first=True) or pytest.fail("closed")
    assert granule == GRANULES["layers.1"][0]
    assert [taken(queue) for _ in range(3)] == [*GRANULES["embed"], *GRANULES["layers.0"]]
    assert taken(queue) == GRANULES["layers.1"][1]
    queue.finished(granule)


def test_what_somebody_waits_for_goes_before_all_and_is_not_held_back(queue: UpdateQueue) -> None:
    """Updates without a gradient wait for no page; each of their granules comes once, with all verdicts."""
    store(queue, *ALL)
    queue.decide(works(UNITS[:2], 3), ahead=0)
    queue.decide_first(idle_works(["layers.2"], 1, 2, 3))
    queue.decide_first(idle_works(["layers.1"], 3))
    upload = in_thread(queue.wait, "layers.1", 2)
    found = [queue.take() for _ in range(4)]
    assert all(granule.gradient == frozenset() for granule, _ in found)
    order = [(granule.unit, granule.index, own) for granule, own in found]
    assert order == [("layers.2", 0, verdicts(1, 2, 3)), *(("layers.1", i, verdicts(3)) for i in range(3))]
    assert not upload.done()
    for granule, _ in found:
        queue.finished(granule)
    upload.result(PATIENCE_S)
    assert taken(queue) == GRANULES["embed"][0]  # that wait lets it run ahead


def test_one_unit_is_waited_for_alone(queue: UpdateQueue) -> None:
    store(queue, *GRANULES["layers.2"])
    queue.decide(works(UNITS, 1), ahead=0)
    finish = in_thread(queue.finish, ["layers.2"])
    assert [taken(queue) for _ in GRANULES["layers.2"]] == GRANULES["layers.2"]
    finish.result(PATIENCE_S)
    queue.finish(["layers.2"])
    with pytest.raises(InvariantError, match="embed began before"):
        queue.decide_first(idle_works(["embed"], 2))


def test_a_flush_is_not_held_back(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.decide(works(UNITS, 1))
    assert [taken(queue) for _ in ALL] == ALL
    queue.finish()


def test_finish_lets_a_deferred_update_run_to_its_end(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.decide(works(UNITS, 1), ahead=0)
    finish = in_thread(queue.finish)
    assert [taken(queue) for _ in ALL] == ALL
    finish.result(PATIENCE_S)


def test_during_backward_units_come_as_they_are_decided_and_the_rest_in_forward_order(
    queue: UpdateQueue,
) -> None:
    store(queue, *ALL)
    for unit in reversed(UNITS):
        queue.decide(works([unit], 1))
    head, last = GRANULES["head"], GRANULES["layers.2"]
    assert [taken(queue) for _ in (*head, *last)] == [*head, *last]
    queue.want_in_forward_order()
    left = [granule for granule in ALL if granule.unit not in ("head", "layers.2")]
    assert [taken(queue) for _ in left] == left


def test_a_granule_waits_for_all_of_its_gradient_and_holds_nobody_up(queue: UpdateQueue) -> None:
    queue.decide(works(["layers.1"], 1))
    first, second, third = GRANULES["layers.1"]
    worker = in_thread(queue.take)
    one, other = first.gradient
    queue.stored(one)
    store(queue, third)
    assert worker.result(PATIENCE_S) == (third, verdicts(1))
    worker = in_thread(queue.take)
    assert not worker.done()
    queue.stored(other)
    assert worker.result(PATIENCE_S) == (first, verdicts(1))
    store(queue, second)
    assert taken(queue) == second


def test_all_who_can_go_on_are_woken(queue: UpdateQueue) -> None:
    """Three workers by one verdict; each upload by its own granule, in whatever order they are finished."""
    store(queue, *GRANULES["layers.1"])
    workers = [in_thread(queue.take) for _ in range(3)]
    queue.decide(works(["layers.1"], 1))
    assert {worker.result(PATIENCE_S) for worker in workers} == {
        (g, verdicts(1)) for g in GRANULES["layers.1"]
    }
    uploads = [in_thread(queue.wait, "layers.1", granule.index) for granule in GRANULES["layers.1"]]
    for granule in reversed(GRANULES["layers.1"]):
        assert not uploads[granule.index].done()
        queue.finished(granule)
        uploads[granule.index].result(PATIENCE_S)


def test_gradients_of_a_skipped_step_are_forgotten(queue: UpdateQueue) -> None:
    store(queue, *ALL)
    queue.forget()
    queue.decide(works(UNITS, 1))
    worker = in_thread(queue.take)
    assert not worker.done()
    store(queue, GRANULES["head"][1])
    assert worker.result(PATIENCE_S) == (GRANULES["head"][1], verdicts(1))


def test_a_unit_cannot_be_decided_while_its_update_is_under_way(queue: UpdateQueue) -> None:
    store(queue, *GRANULES["layers.0"])
    queue.decide(works(["layers.0"], 1))
    with pytest.raises(InvariantError, match=r"layers\.0 began before"):
        queue.decide(works(["layers.0"], 2))
    (granule, found) = queue.take() or pytest.fail("closed")
    with pytest.raises(InvariantError, match=r"layers\.0 began before"):
        queue.decide(works(["layers.0"], 2))
    assert found == verdicts(1)
    queue.finished(granule)
    queue.decide(works(["layers.0"], 2))


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_an_end_wakes_everybody_and_is_told_to_whoever_comes_later(queue: UpdateQueue, end: str) -> None:
    """Workers end in silence; who waits for them gets the first error."""
    queue.decide(works(UNITS, 1))
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
            updated[found[0], found[1][0].update] += 1
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
                queue.decide(works([unit], step))
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
                queue.decide(works(UNITS, step), ahead=UNITS_AHEAD)
            else:
                queue.want_in_forward_order()
        in_thread(queue.finish).result(PATIENCE_S)
    for future in (*working, *stored):
        future.result()
    assert updated == {(granule, step): 1 for granule in ALL for step in range(1, steps + 1)}
