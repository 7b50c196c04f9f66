"""One path of `tierstream bench storage`: which settings are run on it, and what comes out."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.measure.streaming import StreamedStore, stored_bytes
from tierstream.engine.plan import STATE_FOLDER
from tierstream.io.backend import BackendKind, Buffer, TransferPath
from tierstream.io.drive_rates import ACCESSES, BufferKind, DriveTarget, Setting, Tuning
from tierstream.io.drives import DirectoryLock, Drive, check_directories
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.extents import check_written
from tierstream.io.measure import Case, Labels, Sample
from tierstream.io.posix import create_file
from tierstream.io.scratch import ScratchFolder
from tierstream.io.workload import Access
from tierstream.tools.bench.fio import find_fio
from tierstream.tools.bench.report import OutputOptions

MIB = 1 << 20
#: A path that serves for the first look at a drive's speed.
_FIRST_LOOK = Tuning(threads=4, task_bytes=4 * MIB, queue_depth=8)
_FIRST_LOOK_BYTES = 64 * MIB
#: Buffers of one run take this much memory at most, unless its threads alone need more.
_BUFFERS_BYTES = 256 * MIB
_FILE_BYTES_MAX = 4 << 30
_STATE_BYTES_MAX = 2 << 30
#: What is done to a file that is not ours.
_READS: list[Access] = ["read"]


@dataclass(kw_only=True)
class StorageOptions(OutputOptions):
    """What `bench storage` does."""

    access: list[Access] = field(default_factory=lambda: list(ACCESSES))
    """What is measured; mixed: half of the blocks are read, half written."""
    block: list[ByteSize] = field(default_factory=lambda: [ByteSize(n * MIB) for n in (1, 4, 16)])
    """Bytes of one request."""
    threads: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Worker threads: requests that the drive has at once."""
    queue_depth: list[int] | None = None
    """Requests begun at once; null: twice the threads, fewer where their buffers would take 256 MiB."""
    backend: list[BackendKind] | None = None
    """What moves the bytes; null: all that work here."""
    buffer: list[BufferKind] | None = None
    """Memory at the other end; device: of the GPU, by kvikio. null: all that work here."""
    file_size: ByteSize | None = None
    """Size of the file that is written and read on each drive; null: 4 GiB, or an eighth of what is free. Up
    to four times as much is needed while it is measured.
    """
    page: ByteSize = field(default_factory=lambda: ByteSize(16 * MIB))
    """Page size of the store whose schedule is streamed."""
    seconds: float = 0.25
    """Duration of one run, about."""
    rounds: int = 5
    """How often each case runs, in turn with the others; the search for the best setting takes half as
    many."""
    compare: Literal["fio"] | None = None
    """Runs fio too, with the same pattern, in the same rounds."""
    require_gds: bool = False
    """Fail unless GPUDirect Storage is really available."""
    profile: str | None = None
    """Machine profile that gets the drives' best tunings and rates; made if missing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("access", "block", "threads", "queue_depth", "backend", "buffer"):
            values = getattr(self, key)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ConfigError(f"{key} is {values}; name at least one value, each of them once")
        for key in ("block", "threads", "queue_depth"):
            for value in getattr(self, key) or []:
                if value < 1:
                    raise ConfigError(f"{key} is {value}; it must be >= 1")
        for size in (*self.block, self.page):
            if size < 4096 or size % 4096:
                raise ConfigError(
                    f"block and page sizes must be positive multiples of 4096 bytes, not {size}"
                )
        if not 0.01 <= self.seconds <= 600:
            raise ConfigError(f"seconds is {self.seconds}; it must be between 0.01 and 600")
        if self.profile is not None and set(self.access) != {"read", "write", "mixed"}:
            raise ConfigError("a profile needs read, write and mixed; leave --access out")

    def tunings(self) -> Iterator[Tuning]:
        """Every combination of threads, block and queue depth."""
        for threads, block in itertools.product(self.threads, self.block):
            usual = max(threads, min(2 * threads, _BUFFERS_BYTES // block))
            for depth in self.queue_depth or [usual]:
                yield Tuning(threads=threads, task_bytes=int(block), queue_depth=depth)


@dataclass(frozen=True)
class Way:
    """A backend, the memory at the other end, and the way that bytes then take."""

    backend: BackendKind
    buffer: BufferKind
    path: TransferPath

    def setting(
        self, access: Access, tuning: Tuning, *, direct: bool = True, reused: bool = False
    ) -> Setting:
        return Setting(
            access=access, tuning=tuning, backend=self.backend, direct=direct, buffer=self.buffer,
            reused=reused,
        )  # fmt: skip


def check_paths(paths: Sequence[str], options: StorageOptions) -> list[int]:
    """Bytes of the file at each path: of that which is there, or of that which will be written. Nothing is
    written yet.

    Raises:
        StorageError: a directory is missing, cannot be written or has too little space; a file would measure
            nothing.
        ConfigError: a size that does not fit the others; a file that is asked for more than reads; a path
            named twice.
    """
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise ConfigError(f"paths {' '.join(paths)}: name each of them once")
    folders = [path for path in paths if not os.path.isfile(path)]
    infos = check_directories((path, 0) for path in folders)
    sharers = Counter(info.device for info in infos)
    sizes = {
        path: _file_bytes(options, info.free_bytes // sharers[info.device])
        for path, info in zip(folders, infos, strict=True)
    }
    check_directories((path, _needed_bytes(options, nbytes)) for path, nbytes in sizes.items())
    return [sizes[path] if path in sizes else _existing_bytes(path, options) for path in paths]


def _file_bytes(options: StorageOptions, free_bytes: int) -> int:
    largest = max(*options.block, options.page)
    wanted = options.file_size
    if wanted is None:
        wanted = ByteSize(max(largest, min(_FILE_BYTES_MAX, free_bytes // 8)))
    if wanted < largest:
        raise ConfigError(
            f"file_size is {wanted}, less than a block or page of {largest}; raise it, or lower them"
        )
    return int(wanted) // largest * largest


def _needed_bytes(options: StorageOptions, nbytes: int) -> int:
    """Space for the file, that of first writes, and the stores of this drive alone and of all together."""
    return 2 * (nbytes + stored_bytes(_state_bytes(nbytes), options.page))


def _state_bytes(nbytes: int) -> int:
    return min(nbytes, _STATE_BYTES_MAX)


def _existing_bytes(path: str, options: StorageOptions) -> int:
    if "read" not in options.access:
        raise ConfigError(f"{path} is a file, which is only read; name a directory to measure writes")
    if options.profile is not None:
        raise ConfigError(f"{path} is a file; a profile needs writes too: name a directory on that drive")
    nbytes, largest = os.path.getsize(path), max(options.block)
    if nbytes < largest:
        raise ConfigError(
            f"{path} has {nbytes} bytes, less than a block of {largest}; name a larger file, or lower --block"
        )
    check_written(path)
    return nbytes


def _is_locked(directory: str) -> bool:
    """Whether a run is at work there."""
    if not os.path.isdir(directory):
        return False
    try:
        DirectoryLock(directory).release()
    except StorageError:
        return True
    return False


class MeasuredPath:
    """A directory, in which scratch files are made, or an existing file, which is only read.

    Args:
        path: as the user named it.
        nbytes: of the file, as `check_paths` has it.
        stack: removes the files at its end.
        allocate_device: makes device buffers.

    Raises:
        StorageError: the drive is full or fails.
    """

    def __init__(
        self,
        path: str,
        nbytes: int,
        options: StorageOptions,
        stack: ExitStack,
        allocate_device: Callable[[int], Buffer],
    ) -> None:
        self.path, self.options = os.path.abspath(path), options
        self.folder: ScratchFolder | None = None
        self.busy = False
        self._allocate_device = allocate_device
        self._amounts: dict[tuple[Access, Way], int] = {}
        if os.path.isfile(self.path):
            file, self.accesses = self.path, _READS
        else:
            self.folder = stack.enter_context(ScratchFolder(self.path))
            self.busy = self.folder.neighbours > 0 or _is_locked(os.path.join(self.path, STATE_FOLDER))
            file = self.folder.new_file("file", nbytes)
            self.accesses = options.access
        self.target = DriveTarget([file], nbytes, allocate_device)

    def way(self, backend: BackendKind, buffer: BufferKind) -> Way:
        setting = Setting(access="read", tuning=_FIRST_LOOK, backend=backend, buffer=buffer)
        return Way(backend, buffer, self.target.path_taken(setting))

    def amount(self, access: Access, way: Way) -> int:
        """Bytes that take about `options.seconds`, at most the file."""
        key = (access, way)
        if key not in self._amounts:
            tuning = replace(_FIRST_LOOK, task_bytes=min(_FIRST_LOOK.task_bytes, self.target.nbytes))
            sample = self.target.run(way.setting(access, tuning), _FIRST_LOOK_BYTES)
            wanted = int(self.options.seconds * sample.amount / sample.seconds)
            self._amounts[key] = min(wanted, self.target.nbytes)
        return self._amounts[key]

    @property
    def state_bytes(self) -> int:
        """Of the store whose schedule is streamed."""
        return _state_bytes(self.target.nbytes)

    def cost(self, ways: Sequence[Way], grid_rounds: int) -> tuple[float, int]:
        """What measuring takes, about: seconds, and bytes written to the drive."""
        tunings, best_rounds = len(list(self.options.tunings())), self.options.rounds + 1
        plain = 1 + 2 * bool(self.options.compare)
        runs = len(ways) * len(self.accesses) * (tunings * grid_rounds + best_rounds * (plain + 1))
        written = self.target.nbytes + self.state_bytes * (1 + best_rounds) if self.folder else 0
        for way in ways:
            moved = {access: self.amount(access, way) for access in self.accesses}
            per_run = moved.get("write", 0) + moved.get("mixed", 0) // 2
            written += per_run * (tunings * grid_rounds + best_rounds * plain)
            written += 2 * moved.get("write", 0) * best_rounds
        rate = self.amount("read", ways[0]) / self.options.seconds if "read" in self.accesses else 1e9
        seconds = 1.3 * runs * self.options.seconds + 3 * self.state_bytes * best_rounds / rate
        return seconds, written

    def grid(self, way: Way) -> list[Case]:
        """Every access with every tuning, on one file."""
        return [
            self.target.case(way.setting(access, tuning), self.amount(access, way))
            for access in self.accesses
            for tuning in self.options.tunings()
        ]

    def best(self, tunings: Mapping[Way, Tuning], home: BackendKind, stack: ExitStack) -> list[Case]:
        """Every way at its best tuning, beside the page cache, fio, and what training does with a store.

        All of it on the same files, the store's (where there is one): a drive may not be equally fast
        everywhere.

        Args:
            home: the backend that training would take; the store's.
            stack: closes the store at its end; its files stay.
        """
        target, cases = self.target, []
        kind = (home, "host")
        stored = {way: tuning for way, tuning in tunings.items() if (way.backend, way.buffer) == kind}
        if self.folder is not None:
            for way, tuning in stored.items():
                store = stack.enter_context(
                    StreamedStore(
                        [self.drive(way, tuning, 1.0, stack)],
                        state_bytes=_state_bytes(target.nbytes),
                        page_bytes=int(self.options.page),
                    )
                )
                target = DriveTarget(store.paths, store.page_bytes, self._allocate_device)
                labels = self._labels(way, tuning)
                cases += [store.case("stream", labels), store.case("update", labels)]
        for way, tuning in tunings.items():
            fitting = replace(tuning, task_bytes=min(tuning.task_bytes, target.file_bytes))
            cases += self._plain(target, way, fitting)
        if self.folder is not None and "write" in self.accesses:
            cases += [self._first_pass(way, tuning) for way, tuning in stored.items()]
        return cases

    def _plain(self, target: DriveTarget, way: Way, tuning: Tuning) -> list[Case]:
        """The way alone, through the page cache, and, as fio does it, beside fio."""
        cases = []
        for access in self.accesses:
            amount = self.amount(access, way)
            cases.append(target.case(way.setting(access, tuning), amount))
            if way.backend != "posix":
                continue
            if way.path.direct and access != "mixed":
                cases.append(target.case(way.setting(access, tuning, direct=False), amount))
            if self.options.compare:
                same = way.setting(access, tuning, direct=way.path.direct, reused=True)
                cases.append(target.case(same, amount))
                cases.append(find_fio(self.target.paths[0]).case(target, same, amount))
        return cases

    def _first_pass(self, way: Way, tuning: Tuning) -> Case:
        """Writing into space that was reserved and never written: what a file system must note of it costs
        time that later writes do not take.
        """
        assert self.folder is not None
        path = os.path.join(self.folder.path, "first")
        setting = way.setting("write", tuning)
        block = tuning.task_bytes
        nbytes = max(self.amount("write", way) // block, 2 * tuning.queue_depth) * block
        nbytes = min(nbytes, self.target.nbytes // block * block)

        def run() -> Sample:
            create_file(path, nbytes)
            try:
                return DriveTarget([path], nbytes).run(setting, nbytes)
            finally:
                os.unlink(path)

        labels = self.target.case(setting, nbytes).labels
        return Case({**labels, "access": "first write"}, "B", run)

    def drive(self, way: Way, tuning: Tuning, weight: float, stack: ExitStack) -> Drive:
        """A new folder here as a store's drive; its backend is closed at the end of `stack`."""
        assert self.folder is not None
        backend = tuning.open_backend(way.backend)
        stack.callback(backend.close)
        name = f"store-{len(os.listdir(self.folder.path))}"
        return Drive(os.path.join(self.folder.path, name), backend, weight)

    def _labels(self, way: Way, tuning: Tuning) -> Labels:
        return {
            "backend": f"store, {way.backend}",
            "path": way.path.name,
            "buffer": way.buffer,
            "block_bytes": tuning.task_bytes,
            "threads": tuning.threads,
            "queue_depth": tuning.queue_depth,
        }
