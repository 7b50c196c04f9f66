"""What a drive is asked to do while it is measured: blocks in order, read, written, or both, with a number of
requests always under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal, TypeAlias

import numpy as np

from tierstream.io.backend import Buffer, File
from tierstream.io.transfer import Direction

#: "mixed": every other block is read, the rest written.
Access: TypeAlias = Literal["read", "write", "mixed"]


@dataclass(frozen=True, slots=True)
class Request:
    """One block to be moved; `file` is the number of the file."""

    direction: Direction
    file: int
    offset: int
    nbytes: int


def blocks(
    access: Access,
    files: int,
    file_bytes: int,
    block_bytes: int,
    count: int,
    *,
    start: int = 0,
    seed: int = 0,
) -> Iterator[Request]:
    """`count` whole blocks of some files in order, from block number `start` on, beginning anew at the end of
    the last one.

    Args:
        files: how many there are. file_bytes: size of each.
        seed: of the order of reads and writes.

    For "mixed" the reads and writes are half each, in an order that does not repeat.
    """
    per_file = file_bytes // block_bytes
    writes = np.zeros(count, dtype=bool)
    writes[: {"read": 0, "write": count, "mixed": count // 2}[access]] = True
    if access == "mixed":
        np.random.default_rng(seed).shuffle(writes)
    for index in range(count):
        direction = Direction.WRITE if writes[index] else Direction.READ
        file, block = divmod((start + index) % (files * per_file), per_file)
        yield Request(direction, file, block * block_bytes, block_bytes)


def run_requests(
    files: Sequence[File],
    requests: Iterable[Request],
    buffers: Sequence[Buffer],
    under_way: int,
    before_write: Callable[[Buffer], None] | None = None,
) -> None:
    """Carries the requests out in order; returns when all have ended. After a Ctrl-C no more are begun.

    Args:
        buffers: used in turn, at least one per request under way, and as large as the largest request. Those
            of host memory are flat uint8 arrays.
        under_way: as many requests are at any time.
        before_write: is called with the buffer before it is written.

    Raises:
        StorageError: the first request that failed; none is under way any more.
    """
    stopped = threading.Event()
    # Signals interrupt the main thread alone: here no request is half begun, which a backend would wait for.
    with ThreadPoolExecutor(1, thread_name_prefix="tierstream-requests") as thread:
        try:
            thread.submit(_run_requests, files, requests, buffers, under_way, before_write, stopped).result()
        finally:
            stopped.set()


def _run_requests(
    files: Sequence[File],
    requests: Iterable[Request],
    buffers: Sequence[Buffer],
    under_way: int,
    before_write: Callable[[Buffer], None] | None,
    stopped: threading.Event,
) -> None:
    free: SimpleQueue[int] = SimpleQueue()
    for index in range(len(buffers)):
        free.put(index)
    room = threading.Semaphore(under_way)
    failures: list[BaseException] = []
    begun: dict[int, Future[int]] = {}

    def ended(index: int, future: Future[int]) -> None:
        error = future.exception()
        if error is not None:
            failures.append(error)
        free.put(index)
        room.release()

    try:
        for request in requests:
            room.acquire()
            index = free.get()
            if failures or stopped.is_set():
                break
            buffer = buffers[index]
            if request.direction is Direction.WRITE and before_write is not None:
                before_write(buffer)
            file = files[request.file]
            move = file.read_into if request.direction is Direction.READ else file.write_from
            begun[index] = move(buffer, request.offset)
            begun[index].add_done_callback(partial(ended, index))
    finally:
        wait(begun.values())
    # `wait` may return before the last callbacks have run.
    failures += filter(None, (future.exception() for future in begun.values()))
    if failures:
        raise failures[0]


def storage_bytes() -> tuple[int, int] | None:
    """Bytes that this process has had fetched from and sent to storage since its start, page cache excluded
    (proc_pid_io(5)); None where the kernel does not count them.
    """
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except OSError:
        return None
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def cached_note(access: Access, asked_bytes: int, fetched_bytes: int) -> str:
    """What to say of a reading whose bytes did not all come from the drive; empty where they did."""
    reads = {"read": asked_bytes, "write": 0, "mixed": asked_bytes // 2}[access]
    if not reads or fetched_bytes >= 0.95 * reads:
        return ""
    return (
        f"cached: the kernel fetched only {100 * fetched_bytes // reads} % of what was read from storage, "
        "the rest came from memory"
    )
