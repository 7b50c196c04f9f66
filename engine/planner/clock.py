"""Simulated time: processes that sleep and wait, and resources that serve them. No torch.

A process is a generator. It yields seconds to sleep, or a `Moment` to wait for; what it calls that may wait
is a generator too, with `yield from`. Everything happens in one thread, and equal times keep the order in
which they were asked for, so a simulation gives the same numbers every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, TypeAlias, TypeVar

from tierstream.io.errors import InvariantError

_Result = TypeVar("_Result")


class Moment:
    """Something that happens once: until then it can be waited for."""

    __slots__ = ("_clock", "_waiting", "past")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []
        self.past = False

    def set(self) -> None:
        """It happens now."""
        if not self.past:
            self.past = True
            waiting, self._waiting = self._waiting, []
            self._clock.soon.extend(waiting)

    def then(self, call: Callable[[], None]) -> None:
        """Call it when it has happened."""
        if self.past:
            self._clock.soon.append(call)
        else:
            self._waiting.append(call)


#: What a process waits for: seconds, or a moment.
Wait: TypeAlias = float | Moment
#: A part of a process, with what it gives back.
Steps: TypeAlias = Generator[Wait, None, _Result]


class Clock:
    """The time, in seconds, and what is to happen at which time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def moment(self) -> Moment:
        return Moment(self)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heappush(self._later, (self.now_s + seconds, next(self._numbers), call))

    def start(self, process: Steps[None]) -> None:
        """Run a process, from now on."""

        def go_on() -> None:
            for wait in process:
                if isinstance(wait, Moment):
                    if not wait.past:
                        wait.then(go_on)
                        return
                elif wait > 0:
                    self.after(wait, go_on)
                    return

        self.soon.append(go_on)

    def run_until(self, end: Callable[[], bool]) -> None:
        """All that happens at the time at which it comes true still happens.

        Raises:
            InvariantError: nothing is left to happen before.
        """
        soon, later = self.soon, self._later
        while True:
            while soon:
                soon.popleft()()
            if end():
                return
            if not later:
                raise InvariantError("all processes of a simulation wait for each other")
            self.now_s, _, call = heappop(later)
            call()


class Changes:
    """Wakes threads that wait for a condition whenever it may have come true.

    Args:
        wake_s: what a thread takes to wake up.
    """

    def __init__(self, clock: Clock, wake_s: float) -> None:
        self._clock, self._wake_s = clock, wake_s
        self._next: Moment | None = None

    def tell(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    def wait(self) -> Steps[None]:
        """Until the next change."""
        if self._next is None:
            self._next = self._clock.moment()
        yield self._next
        yield self._wake_s

    def wait_for(self, condition: Callable[[], object]) -> Steps[None]:
        while not condition():
            yield from self.wait()


class Credits:
    """So many may be taken at once; who comes first is served first."""

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock, self._left = clock, number
        self._waiting: deque[Moment] = deque()

    def take(self) -> Steps[None]:
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = self._clock.moment()
        self._waiting.append(turn)
        yield turn

    def give(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._left += 1


class Server(Protocol):
    """Takes seconds of work."""

    def serve(self, seconds: float) -> Wait:
        """What to wait for until the work is done."""
        ...


class Dedicated:
    """Serves each as if there were no other: a device of its own."""

    def serve(self, seconds: float) -> Wait:
        return seconds


class Bandwidth:
    """What the work of several pools moves its bytes through, as the host's memory: where it is to move more
    than that gives, all of it slows down alike.

    Args:
        rate: bytes per second.

    Attributes:
        speed: of work that moves bytes, as a share of that which it has alone.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self.speed = rate, 1.0
        self._pools: list[Cores] = []

    def join(self, pool: Cores) -> None:
        self._pools.append(pool)

    def reckon(self) -> None:
        """A pool is to move more or less than before."""
        wanted = sum([pool.moves for pool in self._pools])
        speed = self._rate / wanted if wanted > self._rate else 1.0
        if speed != self.speed:
            for pool in self._pools:
                pool.advance()
            self.speed = speed
            for pool in self._pools:
                pool.reckon()


class _Job:
    __slots__ = ("done", "left_s", "moves", "threads")

    def __init__(self, left_s: float, threads: int, moves: float, done: Moment) -> None:
        self.left_s, self.threads, self.moves, self.done = left_s, threads, moves, done


class Cores:
    """The processor's cores, which threads share evenly: where there are more of them than cores, all slow
    down alike.

    Args:
        memory: what work moves its bytes through; None: as many as it likes.

    Attributes:
        moves: bytes per second that its work would move there if it had that for itself.
    """

    def __init__(self, clock: Clock, number: int, memory: Bandwidth | None = None) -> None:
        self._clock, self._number = clock, number
        self._memory = memory
        if memory is not None:
            memory.join(self)
        self._jobs: list[_Job] = []
        self._wanted = 0  # cores, by all jobs
        self._since_s = 0.0
        self._version = 0
        self.moves = 0.0
        self.busy_s = 0.0
        """Core seconds."""

    def threads(self, number: int, moves: float = 0.0) -> Server:
        """Serves work that `number` threads do at once; its seconds are those that it takes alone, in each of
        which it moves so many bytes through the memory.
        """
        return _Threads(self, min(number, self._number), 0.0 if self._memory is None else moves)

    def begin(self, seconds: float, threads: int, moves: float) -> Moment:
        self.advance()
        done = self._clock.moment()
        self._jobs.append(_Job(seconds, threads, moves, done))
        self._wanted += threads
        self._changed()
        return done

    def _speed(self) -> float:
        return 1.0 if self._wanted <= self._number else self._number / self._wanted

    def advance(self) -> None:
        """Until now."""
        passed, self._since_s = self._clock.now_s - self._since_s, self._clock.now_s
        if not self._jobs or not passed:
            return
        done_s = passed * self._speed()
        slowed_s = done_s if self._memory is None else done_s * self._memory.speed
        for job in self._jobs:
            own_s = slowed_s if job.moves else done_s
            job.left_s -= own_s
            self.busy_s += own_s * job.threads

    def _changed(self) -> None:
        """A job came or went."""
        if self._memory is not None:
            moves = sum([job.moves for job in self._jobs]) * self._speed()
            if moves != self.moves:
                self.moves = moves
                self._memory.reckon()
        self.reckon()

    def reckon(self) -> None:
        """Find out when the next job ends."""
        self._version += 1
        if self._jobs:
            left_s = max(0.0, min(self._left_s()))
            self._clock.after(left_s, partial(self._end, self._version))

    def _left_s(self) -> list[float]:
        """Until each job ends, if nothing changes before."""
        speed = self._speed()
        slowed = speed if self._memory is None else speed * self._memory.speed
        return [job.left_s / (slowed if job.moves else speed) for job in self._jobs]

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # somebody came meanwhile
        self.advance()
        left_s = self._left_s()
        ended = min(left_s) + 1e-12
        jobs, self._jobs = self._jobs, []
        for job, own_s in zip(jobs, left_s, strict=True):
            if own_s > ended:
                self._jobs.append(job)
            else:
                self._wanted -= job.threads
                job.done.set()
        self._changed()


class _Threads:
    def __init__(self, cores: Cores, number: int, moves: float) -> None:
        self._cores, self._number, self._moves = cores, number, moves

    def serve(self, seconds: float) -> Wait:
        return self._cores.begin(seconds, self._number, self._moves) if seconds > 0 else 0.0


class Lane:
    """Work in order, one after another; what is enqueued may have to wait for a moment of another lane.

    Attributes:
        busy_s: seconds at work.
    """

    def __init__(self, clock: Clock, server: Server) -> None:
        self._clock, self._server = clock, server
        self._last: Moment | None = None
        self.busy_s = 0.0

    def enqueue(
        self,
        seconds: float,
        after: Moment | None = None,
        watch: Callable[[float, float], None] | None = None,
    ) -> Moment:
        """The moment at which the work is done.

        Args:
            watch: is told when it began and ended.
        """
        clock, done, before = self._clock, self._clock.moment(), self._last
        self._last = done

        def begin() -> None:  # no process: there are more of these than of all else in a simulation
            if after is not None and not after.past:
                after.then(begin)
                return
            begin_s, wait = clock.now_s, self._server.serve(seconds)

            def end() -> None:
                self.busy_s += clock.now_s - begin_s
                if watch is not None:
                    watch(begin_s, clock.now_s)
                done.set()

            if isinstance(wait, Moment):
                wait.then(end)
            elif wait > 0:
                clock.after(wait, end)
            else:
                end()

        if before is None:
            clock.soon.append(begin)
        else:
            before.then(begin)
        return done

    def mark(self) -> Moment:
        """The moment at which all that is enqueued so far is done."""
        return self._last if self._last is not None else self.enqueue(0.0)
