"""What a drive gives, through the very backends that training uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tierstream.io.backend import Backend, BackendKind, Buffer, TransferPath, open_backend
from tierstream.io.errors import ConfigError
from tierstream.io.measure import Case, Labels, Measurement, Sample
from tierstream.io.memory import memory_budget
from tierstream.io.posix import PosixBackend
from tierstream.io.scratch import forget_cached, incompressible, stamp, sync
from tierstream.io.workload import Access, blocks, cached_note, run_requests, storage_bytes

BufferKind: TypeAlias = Literal["host", "device"]
ACCESSES: tuple[Access, ...] = ("read", "write", "mixed")
#: Requests go to and from so much host memory in turn, as a run's do: few buffers, used over and over, stay
#: in a processor's cache, and with these a drive of a virtual machine was up to 1.25 times as fast. More than
#: most last-level caches; of the free memory one byte in so many at most, and for small files less.
_MEMORY_BYTES, _MEMORY_SHARE, _FILES_IN_MEMORY = 512 << 20, 16, 8
#: Tunings within this share of the best are as good: the one that costs least is taken.
_AS_GOOD = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a drive is worked on.

    Attributes:
        threads: worker threads: calls under way at a time.
        task_bytes: bytes of one call; longer requests are cut.
        queue_depth: requests begun and not ended at most.
    """

    threads: int
    task_bytes: int
    queue_depth: int

    def open_backend(self, name: str) -> Backend:
        """A backend that works so; else as `tierstream.io.backend.open_backend`."""
        return open_backend(
            name, threads=self.threads, task_bytes=self.task_bytes, queue_depth=self.queue_depth
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to use a drive.

    Attributes:
        access: "read", "write" or "mixed".
        tuning: a request is one block of `task_bytes`.
        backend: "posix" or "kvikio".
        direct: False goes through the page cache (posix).
        buffer: "host", or "device" (kvikio).
        reused: one buffer per request under way, over and over, as other programs measure.
    """

    access: Access
    tuning: Tuning
    backend: BackendKind = "posix"
    direct: bool = True
    buffer: BufferKind = "host"
    reused: bool = False


class DriveTarget:
    """Files on a drive, and settings run on them, each going on where the last one stopped.

    Args:
        paths: existing files, used in this order; they are written only by settings that write.
        file_bytes: size of each.
        allocate_device: makes a device buffer of so many bytes, for settings of `buffer` "device".
    """

    def __init__(
        self, paths: Sequence[str], file_bytes: int, allocate_device: Callable[[int], Buffer] | None = None
    ) -> None:
        self.paths, self.file_bytes = list(paths), file_bytes
        self._allocate_device = allocate_device
        self._host = incompressible(0)
        self._position = 0
        self._stamps = itertools.count()
        self._paths: dict[tuple[BackendKind, BufferKind, bool], TransferPath] = {}

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return len(self.paths) * self.file_bytes

    def path_taken(self, setting: Setting) -> TransferPath:
        """The way that the bytes of this setting take; it is tried once."""
        key = (setting.backend, setting.buffer, setting.direct)
        if key not in self._paths:
            backend = _open(setting)
            try:
                self._paths[key] = backend.transfer_path(self.paths[0], device=setting.buffer == "device")
            finally:
                backend.close()
        return self._paths[key]

    def run(self, setting: Setting, amount_bytes: int) -> Sample:
        """Moves about `amount_bytes`, at least two blocks per request under way.

        What is read through the page cache is dropped from it before; what is written is on the drive in the
        end (fsync).

        Raises:
            StorageError: a request failed.
            ConfigError: the file is too small for the setting.
        """
        tuning = setting.tuning
        if self.file_bytes < tuning.task_bytes:
            raise ConfigError(
                f"{self.paths[0]} has {self.file_bytes} bytes, less than one block of {tuning.task_bytes}: "
                "choose smaller blocks or a larger file"
            )
        count = max(2 * tuning.queue_depth, amount_bytes // tuning.task_bytes)
        count += count % 2  # "mixed" is half and half
        start, self._position = self._position, self._position + count
        requests = list(
            blocks(
                setting.access,
                len(self.paths),
                self.file_bytes,
                tuning.task_bytes,
                count,
                start=start,
                seed=start,
            )
        )
        buffers = self._buffers(setting, start)
        touched = [self.paths[index] for index in sorted({request.file for request in requests})]
        buffered = not self.path_taken(setting).direct  # also where the file system refuses O_DIRECT
        if buffered:
            for path in touched:
                forget_cached(path)
        backend = _open(setting)
        try:
            files = [backend.open(path, writable=setting.access != "read") for path in self.paths]
            before = storage_bytes()
            cpu, begin = time.process_time(), time.perf_counter()
            stamped = self._stamp if setting.buffer == "host" else None
            run_requests(files, requests, buffers, tuning.queue_depth, stamped)
            if setting.access != "read" and buffered:
                for path in touched:
                    sync(path)
            seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            after = storage_bytes()
            for file in files:
                file.close()
        finally:
            backend.close()
        amount = count * tuning.task_bytes
        note = "" if not before or not after else cached_note(setting.access, amount, after[0] - before[0])
        return Sample(amount, seconds, cpu_s, note)

    def case(self, setting: Setting, amount_bytes: int) -> Case:
        """The setting as something that `measure` runs."""
        tuning = setting.tuning
        labels: Labels = {
            "access": setting.access,
            "backend": setting.backend,
            "path": self.path_taken(setting).name,
            "buffer": f"{setting.buffer}, reused" if setting.reused else setting.buffer,
            "block_bytes": tuning.task_bytes,
            "threads": tuning.threads,
            "queue_depth": tuning.queue_depth,
        }
        return Case(labels, "B", lambda: self.run(setting, amount_bytes))

    def _buffers(self, setting: Setting, start: int) -> list[Buffer]:
        """Blocks of memory, at least one per request under way; those of host memory from where the runs
        before have left off, at block number `start`.
        """
        nbytes, depth = setting.tuning.task_bytes, setting.tuning.queue_depth
        if setting.buffer == "host":
            count = depth if setting.reused else max(depth, self._memory_bytes() // nbytes)
            if self._host.nbytes < count * nbytes:
                self._host = incompressible(count * nbytes)
            places = [(start + index) % count * nbytes for index in range(count)]
            return [self._host[at : at + nbytes] for at in places]
        if self._allocate_device is None:
            raise ConfigError("device buffers need a CUDA device")
        return [self._allocate_device(nbytes) for _ in range(depth)]

    def _memory_bytes(self) -> int:
        """Of the host, for requests."""
        most = min(_MEMORY_BYTES, _FILES_IN_MEMORY * self.nbytes)
        if self._host.nbytes >= most:
            return most
        return min(most, memory_budget().available_bytes // _MEMORY_SHARE)

    def _stamp(self, buffer: Buffer) -> None:
        stamp(buffer, next(self._stamps))


def _open(setting: Setting) -> Backend:
    tuning = setting.tuning
    if setting.direct:
        return tuning.open_backend(setting.backend)
    if setting.backend != "posix":
        raise ConfigError("the page cache is measured with the backend posix")
    return PosixBackend(
        threads=tuning.threads, task_bytes=tuning.task_bytes, queue_depth=tuning.queue_depth, direct=False
    )


def best_tuning(measurements: Sequence[Measurement]) -> Tuning:
    """The cheapest of the tunings that are as good as the best, where a tuning is as good as the worst of its
    accesses, each as a share of the best rate of that access.

    Args:
        measurements: of `DriveTarget.case`, of one drive, backend and buffer, with the same accesses for
            every tuning.
    """
    best: dict[str | int, float] = {}
    for found in measurements:
        access = found.labels["access"]
        best[access] = max(best.get(access, 0.0), found.median)
    share: dict[tuple[int, int, int], float] = {}
    for found in measurements:
        key = (
            int(found.labels["threads"]),
            int(found.labels["queue_depth"]),
            -int(found.labels["block_bytes"]),
        )
        share[key] = min(share.get(key, 1.0), found.median / best[found.labels["access"]])
    enough = _AS_GOOD * max(share.values())
    # Fewest threads, then the shortest queue, then the largest block: least work for the processor.
    threads, depth, block = min(key for key, value in share.items() if value >= enough)
    return Tuning(threads=threads, task_bytes=-block, queue_depth=depth)
