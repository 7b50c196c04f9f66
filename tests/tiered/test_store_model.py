"""The store against a perfect one in memory: long random sequences of everything that its interface offers,
with real files behind a DRAM much smaller than the state.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.drive_kinds import open_descriptors
from support.stores import PAGE_BYTES, all_pages, content_bytes, drives_in, mixed_layout, pattern

from tierstream.io import seam
from tierstream.io.backend import Backend
from tierstream.io.errors import InvariantError
from tierstream.io.kvikio_backend import KvikioBackend, kvikio_problem
from tierstream.io.posix import PosixBackend
from tierstream.tiered.capture import Capture
from tierstream.tiered.layout import Page
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Faults, Intent, Lease, Store
from tierstream.tiered.zarrdir import ZarrDirectory

#: Sequences per home and policy (more in the nightly profile), and operations in each.
EXAMPLES = max(20, settings().max_examples // 3)
OPERATIONS = 200

LAYOUT = mixed_layout(units=1)
PAGES = all_pages(LAYOUT)
DURABLE = all_pages(LAYOUT, durable=True)
LOCAL = all_pages(LAYOUT, durable=False)
PLANES = list(LAYOUT.planes)
HELD_MAX = 3

#: One draw per operation, whatever it chooses: a tenth of the time that a strategy for each choice takes.
dice = st.integers(0, (1 << 32) - 1).map(random.Random)


class WithoutSync(seam.Syscalls):
    """Power does not fail here; test_snapshot_crash.py is about that."""

    def fsync(self, fd: int) -> None:
        pass


@dataclass
class Home:
    """Where pages live, and what has been done there."""

    backend: Backend | None
    policy: str
    folder: Path
    operations: list[int] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """One thread that holds several leases, none of which keeps another waiting."""

    store: Store

    def __init__(self, home: Home) -> None:
        super().__init__()
        self.home = home

    @initialize(dice=dice, drives=st.integers(1, 2), late=st.sampled_from([False, False, False, True]))
    def start(self, dice: random.Random, drives: int, late: bool) -> None:
        self.descriptors = open_descriptors()
        self.scratch = Path(tempfile.mkdtemp(prefix="model-", dir=self.home.folder))
        self.roots = [self.scratch / f"drive{number}" for number in range(drives)]
        self.faults = Faults(dice.randrange(100), 0.0001) if late else None
        self.truth: dict[Page, bytes] = {}
        self.held: list[tuple[Lease, list[tuple[Page, Intent]]]] = []
        self.version = self.used = self.operations = 0
        self.capture: Capture | None = None
        self.writer = ThreadPoolExecutor(1)
        self.restart_after = dice.randrange(2 * OPERATIONS)  # every second sequence has one
        self.open(dice)

    def open(self, dice: random.Random) -> None:
        self.directory = None
        frames = 3 * len(PAGES)
        if self.home.backend is not None:
            frames = dice.randint(4, 7)
            self.directory = ZarrDirectory.create(
                drives_in(self.roots, self.home.backend), LAYOUT, {}, readback="full"
            )
        self.store = Store(
            LAYOUT,
            dram_bytes=frames * PAGE_BYTES,
            directory=self.directory,
            policy=self.home.policy,
            prefetch_bytes=dice.choice([0, 1, 3, 20]) * PAGE_BYTES,
            writeback_bytes=dice.randint(1, 4) * PAGE_BYTES,
            copy_bytes=dice.choice([0, 1, 2, 5]) * PAGE_BYTES,
            debug=True,
            faults=self.faults,
        )
        self.frames = self.store.stats.frame_count

    # What a page holds, and who has it

    def content(self, page: Page) -> bytes:
        return self.truth.get(page, bytes(content_bytes(LAYOUT, page)))

    def readable(self, page: Page) -> bool:
        return page.plane not in ("grad", "activation") or page in self.truth

    def holders(self, page: Page) -> list[Intent]:
        return [intent for _, uses in self.held for other, intent in uses if other == page]

    def free_of_conflict(self, page: Page, intent: Intent) -> bool:
        return all(intent is other is Intent.READ for other in self.holders(page))

    def fits(self, wanted: list[Page]) -> bool:
        leased = {page for _, uses in self.held for page, _ in uses}
        return len(leased | set(wanted)) <= self.frames

    # Leases

    @rule(dice=dice, keep=st.booleans(), scheduled=st.booleans())
    def acquire(self, dice: random.Random, keep: bool, scheduled: bool) -> None:
        uses: list[tuple[Page, Intent]] = []
        for page in dice.sample(PAGES, dice.randint(1, 4)):
            possible = [Intent.OVERWRITE]
            if self.readable(page):
                possible += [Intent.READ, Intent.READ, Intent.UPDATE]
                possible += [Intent.CONSUME] if page in LOCAL else []
            intent = dice.choice(possible)
            if self.free_of_conflict(page, intent):
                uses.append((page, intent))
        while len(self.held) > HELD_MAX or not self.fits([page for page, _ in uses]):
            self.give_back(0)
        lease = self.store.acquire(uses, scheduled=scheduled)
        self.used += len(uses)
        for (page, intent), array in zip(uses, lease.arrays, strict=True):
            whole = LAYOUT.page_nbytes(page) if intent is Intent.READ else content_bytes(LAYOUT, page)
            assert len(array) == whole
            assert array.ctypes.data % 4096 == 0
            if intent is not Intent.OVERWRITE:
                self.check(page, array)
            if intent in (Intent.UPDATE, Intent.OVERWRITE):
                self.version += 1
                self.truth[page] = pattern(LAYOUT, page, self.version)
                array[:] = np.frombuffer(self.truth[page], dtype=np.uint8)
            elif intent is Intent.CONSUME:
                array[:] = 0x66
                del self.truth[page]
        self.held.append((lease, uses))
        if not keep:
            self.give_back(len(self.held) - 1)

    @precondition(lambda self: self.held)
    @rule(dice=dice)
    def release(self, dice: random.Random) -> None:
        self.give_back(dice.randrange(len(self.held)))

    def give_back(self, index: int) -> None:
        lease, uses = self.held.pop(index)
        for (page, intent), array in zip(uses, lease.arrays, strict=True):
            if intent is not Intent.CONSUME:
                kept = content_bytes(LAYOUT, page)
                assert array[:kept].tobytes() == self.content(page), "a leased page has changed"
        lease.release()
        with pytest.raises(InvariantError, match="released twice"):
            lease.release()

    def check(self, page: Page, array: np.ndarray) -> None:
        kept = content_bytes(LAYOUT, page)
        assert array[:kept].tobytes() == self.content(page)
        assert not array[kept:].any(), "padding is not zero"

    @precondition(lambda self: any(page not in self.truth for page in LOCAL))
    @rule(dice=dice)
    def read_what_is_not_there(self, dice: random.Random) -> None:
        page = dice.choice([page for page in LOCAL if page not in self.truth])
        if not self.holders(page):
            assert not self.store.has_content(page)
            with pytest.raises(InvariantError, match="never written or is gone"):
                self.store.acquire([(page, dice.choice([Intent.READ, Intent.UPDATE, Intent.CONSUME]))])

    # The rest of the interface

    def accessible(self, plane: tuple[str, str], intent: Intent) -> bool:
        return all(
            self.readable(page) and self.free_of_conflict(page, intent) and self.fits([page])
            for page in LAYOUT.pages(*plane)
        )

    @rule(dice=dice, write=st.booleans())
    def access_range(self, dice: random.Random, write: bool) -> None:
        intent = Intent.UPDATE if write else Intent.READ
        while not (free := [plane for plane in PLANES if self.accessible(plane, intent)]):
            self.give_back(0)
        plane = dice.choice(free)
        spec = LAYOUT.spec(*plane)
        start, stop = sorted(dice.randint(0, spec.numel) for _ in range(2))
        touched = LAYOUT.pages_over(*plane, start, stop) if stop > start else []
        whole = bytearray(b"".join(self.content(page) for page in LAYOUT.pages(*plane)))
        low, high = start * spec.item_bytes, stop * spec.item_bytes
        dtype = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)
        if write:
            values = np.frombuffer(dice.randbytes(high - low), dtype=dtype)
            self.store.write_range(*plane, start, values)
            whole[low:high] = values.tobytes()
            for page in touched:
                first = page.index * PAGE_BYTES
                self.truth[page] = bytes(whole[first : first + content_bytes(LAYOUT, page)])
        else:
            out = np.empty(stop - start, dtype=dtype)
            self.store.read_range(*plane, start, out)
            assert out.tobytes() == bytes(whole[low:high])
        self.used += len(touched)

    @rule(dice=dice)
    def begin_step(self, dice: random.Random) -> None:
        step, following = (dice.choices(PAGES, k=dice.randint(0, 30)) for _ in range(2))
        self.store.begin_step(step, following)

    @rule(dice=dice)
    def discard(self, dice: random.Random) -> None:
        chosen = dice.sample(PAGES, dice.randint(1, 4))
        free = [page for page in chosen if page in LOCAL and not self.holders(page)]
        self.store.discard(free)
        for page in free:
            self.truth.pop(page, None)
        for page in set(chosen) - set(free):
            with pytest.raises(InvariantError, match="cannot be discarded"):
                self.store.discard([page])

    def no_durable_page_is_held_to_write(self) -> bool:
        return not any(
            page in DURABLE and intent is not Intent.READ for _, uses in self.held for page, intent in uses
        )

    @precondition(no_durable_page_is_held_to_write)
    @rule()
    def flush(self) -> None:
        self.store.flush()
        if self.directory is None:
            return
        for page in self.truth.keys() & set(DURABLE):
            found = Path(self.directory.path(page)).read_bytes()
            assert found == self.truth[page].ljust(LAYOUT.page_nbytes(page), b"\0")

    @precondition(lambda self: self.capture is None and self.no_durable_page_is_held_to_write())
    @rule(dice=dice)
    def begin_capture(self, dice: random.Random) -> None:
        """A thread writes the pages as they are now, while whatever comes next happens to them."""
        self.captured = {page: self.truth[page] for page in DURABLE if page in self.truth}
        self.capture = self.store.capture(dice.sample(DURABLE, dice.randint(0, 5)))
        assert set(self.capture.pages) == self.captured.keys()
        delay_s = dice.choice([0, 0.0005])
        self.written = self.writer.submit(self.write, self.capture, delay_s)

    def write(self, capture: Capture, delay_s: float) -> dict[Page, bytes]:
        found: dict[Page, bytes] = {}
        while (piece := capture.take()) is not None:
            time.sleep(delay_s)
            assert piece.page not in found
            found[piece.page] = piece.array.tobytes()
            capture.give_back(piece)
        return found

    @precondition(lambda self: self.capture is not None)
    @rule()
    def end_capture(self) -> None:
        if self.capture is not None:
            found = self.written.result(60)
            self.capture.close()
            self.capture = None
            assert found.keys() == self.captured.keys()
            for page, content in self.captured.items():
                assert found[page] == content.ljust(LAYOUT.page_nbytes(page), b"\0"), page

    @precondition(lambda self: not self.held and self.operations >= self.restart_after)
    @rule(dice=dice)
    def restart(self, dice: random.Random) -> None:
        """Close the store and go on with another, of another size, that starts from a snapshot."""
        self.restart_after = OPERATIONS
        self.end_capture()
        write_snapshot(self.store, self.scratch / "snapshot", {"version": self.version})
        self.store.close()
        self.open(dice)
        snapshot = Snapshot.open(self.scratch / "snapshot")
        assert snapshot.state == {"version": self.version}
        snapshot.restore(self.store)
        shutil.rmtree(self.scratch / "snapshot")
        for page in LOCAL:
            self.truth.pop(page, None)
        stats = self.store.stats
        self.used = stats.hits + stats.prefetched + stats.misses + stats.fresh

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        self.operations += 1
        stats = self.store.stats.copy()
        assert stats.hits + stats.prefetched + stats.misses + stats.fresh == self.used
        assert stats.frames_in_use <= stats.frames_in_use_peak <= stats.frame_count

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.end_capture()
            while self.held:
                self.give_back(0)
            for page in PAGES:
                assert self.store.has_content(page) == (page in self.truth)
                if self.readable(page):
                    with self.store.acquire([(page, Intent.READ)]) as lease:
                        self.check(page, lease.arrays[0])
            self.flush()
            everything = [(page, Intent.OVERWRITE) for page in PAGES[: self.frames]]
            self.store.acquire(everything).release()  # else a frame has gone lost
        finally:
            self.store.close()
            self.writer.shutdown()
            shutil.rmtree(self.scratch)
        assert open_descriptors() == self.descriptors
        assert not [thread for thread in threading.enumerate() if thread.name == "tierstream-store"]
        self.home.operations.append(self.operations - 1)


@contextmanager
def home_of(kind: str, policy: str, folder: Path) -> Iterator[Home]:
    backend: Backend | None = None
    if kind == "kvikio":
        if kvikio_problem():
            pytest.skip(kvikio_problem())
        backend = KvikioBackend(threads=2)
    elif kind != "dram":
        backend = PosixBackend(threads=2, direct=kind == "posix-direct")
        if backend.transfer_path(folder).direct != (kind == "posix-direct"):
            backend.close()
            pytest.skip(f"{folder} does not take direct I/O")
    try:
        with seam.injected(WithoutSync()):
            yield Home(backend, policy, folder)
    finally:
        if backend is not None:
            backend.close()


@pytest.mark.slow
@pytest.mark.timeout(600)  # it takes seconds; to make a failing sequence short takes minutes
@pytest.mark.parametrize(
    ("kind", "policy"),
    [*product(["posix-direct", "posix-buffered", "kvikio"], ["lookahead", "lru"]), ("dram", "lookahead")],
)
def test_store_against_model(tmp_path: Path, kind: str, policy: str) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    with home_of(kind, policy, tmp_path) as home:
        run_state_machine_as_test(
            lambda: StoreMachine(home),
            settings=settings(
                max_examples=EXAMPLES * 4 // 3,  # hypothesis ends some of them early
                stateful_step_count=OPERATIONS + 1,  # the first one opens the store
                suppress_health_check=list(HealthCheck),
            ),
        )
    # What hypothesis draws depends on which modules a worker has imported: most of the operations are enough.
    assert sum(home.operations) >= EXAMPLES * OPERATIONS * 2 // 3, home.operations
    assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors
