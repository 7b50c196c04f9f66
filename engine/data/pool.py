"""Shards are tokenised by several processes at once (`worker.py`)."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tierstream.engine.data.shard_writer import ShardPlan
from tierstream.engine.data.shards import shard_directory
from tierstream.engine.data.worker import Assignment, error_from_json
from tierstream.io.errors import DataError, TierstreamError

#: Characters of what a process said before it died that the error repeats.
LAST_WORDS = 2000


def write_shards(
    plans: Sequence[ShardPlan],
    store: Path,
    assignment: Assignment,
    *,
    workers: int,
    pass_fds: Sequence[int],
    on_done: Callable[[ShardPlan, int], object],
    on_tokens: Callable[[ShardPlan, int], object],
) -> None:
    """Write shards of a store, handed out in their order. The processes end with the call, and with this
    process, whatever ends it.

    Args:
        pass_fds: open files that the processes hold as well, such as that of a lock.
        on_done: told of each finished shard and its tokens.
        on_tokens: told of a shard's tokens so far, now and then.

    Raises:
        TierstreamError: that of the first shard that cannot be written, the same as without processes:
            shards before it are waited for.
        DataError: a process died.
    """
    waiting = deque(plans)
    failed: dict[int, TierstreamError] = {}  # by shard
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        started = [stack.enter_context(_Worker(assignment, pass_fds)) for _ in range(workers)]
        for worker in started:
            selector.register(worker.output, selectors.EVENT_READ, worker)
            worker.next_shard(waiting, store)
        while any(worker.is_before(failed) for worker in started):
            for key, _ in selector.select():
                worker = key.data
                plan = worker.plan
                for message in worker.messages():
                    if "error" in message:
                        failed[plan.number] = error_from_json(message)
                        waiting.clear()
                        worker.plan = None
                        selector.unregister(worker.output)
                    elif "done" in message:
                        on_done(plan, message["done"])
                        worker.next_shard(waiting, store)
                    else:
                        on_tokens(plan, message["tokens"])
    if failed:
        raise failed[min(failed)]


class _Worker:
    """One process. `plan`: the shard it works on."""

    def __init__(self, assignment: Assignment, pass_fds: Sequence[int]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `__exit__`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierstream.engine.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=pass_fds,
            env=_environment(),
            process_group=0,  # Ctrl-C is for this process, which then ends its workers
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._held = b""
        self.plan: ShardPlan | None = None
        self._send(assignment.to_json())

    def next_shard(self, waiting: deque[ShardPlan], store: Path) -> None:
        """Hand out the first of `waiting`, if there is one."""
        self.plan = waiting.popleft() if waiting else None
        if self.plan is not None:
            jobs = [(number, dataclasses.asdict(job)) for number, job in self.plan.jobs]
            directory = str(shard_directory(store, self.plan.number))
            self._send({"directory": directory, "jobs": jobs})

    def is_before(self, failed: Collection[int]) -> bool:
        """Is it at work on a shard that comes before all that failed?"""
        return self.plan is not None and self.plan.number < min(failed, default=sys.maxsize)

    def messages(self) -> list[dict[str, Any]]:
        """What it has said since.

        Raises:
            DataError: nothing, for it is dead.
        """
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            raise self._death()
        *lines, self._held = (self._held + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._input.close()
        self.output.close()
        self._stderr.close()

    def _send(self, value: dict[str, Any]) -> None:
        try:
            self._input.write(json.dumps(value).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _death(self) -> DataError:
        status = self._process.wait()
        how = f"ended with exit status {status}"
        if status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        if status == -signal.SIGKILL:
            how += ", as the system does when memory runs out; fewer processes (data.workers) need less"
        at = f" at {self.plan.jobs[0][1].path}" if self.plan else ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - LAST_WORDS))
        words = self._stderr.read().decode(errors="replace").strip()
        return DataError(f"a process that tokenises{at} {how}. Its last words: {words or 'none'}")


def _environment() -> dict[str, str]:
    """That of this process, with its import path. One thread each: the processes together use all cores."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
