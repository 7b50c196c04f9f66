"""Simulated time, by hand."""

from __future__ import annotations

import pytest

from tierstream.engine.planner.clock import Bandwidth, Clock, Cores, Credits, Dedicated, Lane, Server, Steps
from tierstream.engine.planner.drive import DriveRates, SimulatedDrive
from tierstream.io.errors import InvariantError
from tierstream.io.transfer import Direction


def test_threads_share_cores_evenly() -> None:
    """2 cores. 1 s of work by 2 threads is alone for 0.5 s, then beside 1 s by 1 thread: both at 2/3 of their
    speed, until the first ends at 1.25 s.
    """
    clock, ends = Clock(), dict[str, float]()
    cores = Cores(clock, 2)

    def work(name: str, begin_s: float, seconds: float, threads: int) -> Steps[None]:
        yield begin_s
        yield cores.threads(threads).serve(seconds)
        ends[name] = clock.now_s

    clock.start(work("wide", 0.0, 1.0, 2))
    clock.start(work("narrow", 0.5, 1.0, 1))
    clock.run_until(lambda: len(ends) == 2)
    assert ends == pytest.approx({"wide": 1.25, "narrow": 1.75})
    assert cores.busy_s == pytest.approx(2 * 1.0 + 1.0)


def test_what_moves_bytes_shares_the_memory() -> None:
    """Memory for 10 bytes a second. An update wants 8 for 1 s and a link 6 for 1 s, from 0.3 s on: 14
    together, so both at 10/14 of their speed. The update ends 0.98 s later, the link's last 0.3 s are alone.
    Work that moves nothing is not slowed down.
    """
    clock, ends = Clock(), dict[str, float]()
    memory = Bandwidth(10.0)
    cores, link = Cores(clock, 4, memory), Cores(clock, 1, memory)

    def work(name: str, server: Server, begin_s: float) -> Steps[None]:
        yield begin_s
        yield server.serve(1.0)
        ends[name] = clock.now_s

    clock.start(work("update", cores.threads(2, 8.0), 0.0))
    clock.start(work("link", link.threads(1, 6.0), 0.3))
    clock.start(work("python", cores.threads(1), 0.3))
    clock.run_until(lambda: len(ends) == 3)
    assert ends == pytest.approx({"update": 0.3 + 0.7 * 1.4, "python": 1.3, "link": 0.3 + 0.7 * 1.4 + 0.3})


def test_who_shares_a_link_moves_no_more_bytes_than_it_has() -> None:
    """Two copies of 1 s each on a link of 6 bytes a second take 2 s; for the update beside them 8 are left.
    """
    clock, ends = Clock(), dict[str, float]()
    memory = Bandwidth(14.0)
    cores, link = Cores(clock, 4, memory), Cores(clock, 1, memory)

    def work(name: str, server: Server, seconds: float) -> Steps[None]:
        yield server.serve(seconds)
        ends[name] = clock.now_s

    for name in ("one", "other"):
        clock.start(work(name, link.threads(1, 6.0), 1.0))
    clock.start(work("update", cores.threads(2, 8.0), 3.0))
    clock.run_until(lambda: len(ends) == 3)
    assert ends == pytest.approx({"one": 2.0, "other": 2.0, "update": 3.0})


def test_a_lane_keeps_its_order_and_waits_for_others() -> None:
    clock = Clock()
    first, second = Lane(clock, Dedicated()), Lane(clock, Dedicated())
    begins = list[float]()
    late = first.enqueue(2.0)
    second.enqueue(1.0, late, lambda begin_s, end_s: begins.append(begin_s))
    done = second.enqueue(1.0, None, lambda begin_s, end_s: begins.append(begin_s))
    clock.run_until(lambda: done.past)
    assert begins == [2.0, 3.0]
    assert (clock.now_s, second.busy_s) == (4.0, 2.0)


def test_who_asks_first_gets_the_credit_first() -> None:
    clock, order = Clock(), list[str]()
    credits = Credits(clock, 1)

    def use(name: str) -> Steps[None]:
        yield from credits.take()
        order.append(name)
        yield 1.0
        credits.give()

    for name in "abc":
        clock.start(use(name))
    clock.run_until(lambda: len(order) == 3)
    assert order == list("abc")
    assert clock.now_s == 2.0


def test_processes_that_wait_for_each_other_are_an_error() -> None:
    clock = Clock()

    def wait() -> Steps[None]:
        yield clock.moment()

    clock.start(wait())
    with pytest.raises(InvariantError, match="wait for each other"):
        clock.run_until(lambda: False)


def test_a_drive_is_slower_while_both_directions_are_busy() -> None:
    """10 and 5 B/s alone, 4 and 2 together. 10 B are written in 5 s, in which 20 of 40 B are read; the rest
    takes 2 s. Latency comes on top.
    """
    clock, ends = Clock(), dict[str, float]()
    rates = DriveRates(directory="d", read=10, write=5, read_mixed=4, write_mixed=2, latency_s=0.5)
    drive = SimulatedDrive(clock, rates)
    drive.move(Direction.READ, 40).then(lambda: ends.update(read=clock.now_s))
    drive.move(Direction.WRITE, 10).then(lambda: ends.update(write=clock.now_s))
    clock.run_until(lambda: len(ends) == 2)
    assert ends == {"write": 5.5, "read": 7.5}
    assert drive.busy_s == 7.0
