"""The store against a perfect one in memory: random leases, ranges, schedules, discards and flushes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.stores import (
    PAGE_BYTES,
    MemoryDirectory,
    all_pages,
    content_bytes,
    drives_in,
    mixed_layout,
    pattern,
)

from tierstream.io.errors import InvariantError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Directory, Faults, Intent, Lease, Store
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = mixed_layout()
PAGES = all_pages(LAYOUT)
DURABLE = set(all_pages(LAYOUT, durable=True))
PLANES = list(LAYOUT.planes)

pages = st.sampled_from(PAGES)
page_lists = st.lists(pages, min_size=1, max_size=4, unique=True)


class StoreMachine(RuleBasedStateMachine):
    """One thread that holds several leases, none of which keeps another waiting."""

    store: Store

    @initialize(
        frames=st.integers(4, 12),
        policy=st.sampled_from(["lookahead", "lru"]),
        prefetch_pages=st.sampled_from([0, 1, 3, 20]),
        writeback_pages=st.integers(1, 4),
        home=st.sampled_from(["nvme", "nvme", "nvme", "files", "dram"]),
        seed=st.integers(0, 99),
    )
    def start(
        self, frames: int, policy: str, prefetch_pages: int, writeback_pages: int, home: str, seed: int
    ) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.backend = PosixBackend(threads=2)
        self.directory: Directory | None = None
        if home == "nvme":
            self.directory = MemoryDirectory()
        elif home == "files":
            roots = [self.scratch / "a", self.scratch / "b"]
            self.directory = ZarrDirectory.create(drives_in(roots, self.backend), LAYOUT, {}, readback="full")
        else:
            frames = 3 * len(PAGES)
        self.store = Store(
            LAYOUT,
            dram_bytes=frames * PAGE_BYTES,
            directory=self.directory,
            policy=policy,
            prefetch_bytes=prefetch_pages * PAGE_BYTES,
            writeback_bytes=writeback_pages * PAGE_BYTES,
            debug=True,
            faults=Faults(seed, 0.0005),
        )
        self.frames = self.store.stats.frame_count
        self.truth: dict[Page, bytes] = {}
        self.held: list[tuple[Lease, list[tuple[Page, Intent]]]] = []
        self.version = 0
        self.used = 0

    # What a page holds, and who has it

    def content(self, page: Page) -> bytes:
        return self.truth.get(page, bytes(content_bytes(LAYOUT, page)))

    def readable(self, page: Page) -> bool:
        return page in DURABLE or page in self.truth

    def holders(self, page: Page) -> list[Intent]:
        return [intent for _, uses in self.held for other, intent in uses if other == page]

    def free_of_conflict(self, page: Page, intent: Intent) -> bool:
        return all(intent is other is Intent.READ for other in self.holders(page))

    def fits(self, wanted: list[Page]) -> bool:
        leased = {page for _, uses in self.held for page, _ in uses}
        return len(leased | set(wanted)) <= self.frames

    # Leases

    @rule(chosen=page_lists, data=st.data(), keep=st.booleans(), scheduled=st.booleans())
    def acquire(self, chosen: list[Page], data: st.DataObject, keep: bool, scheduled: bool) -> None:
        uses: list[tuple[Page, Intent]] = []
        for page in chosen:
            possible = [Intent.OVERWRITE]
            if self.readable(page):
                possible += [Intent.READ, Intent.READ, Intent.UPDATE]
                possible += [] if page in DURABLE else [Intent.CONSUME]
            intent = data.draw(st.sampled_from(possible))
            if self.free_of_conflict(page, intent):
                uses.append((page, intent))
        if not uses or not self.fits([page for page, _ in uses]):
            return
        lease = self.store.acquire(uses, scheduled=scheduled)
        self.used += len(uses)
        for (page, intent), array in zip(uses, lease.arrays, strict=True):
            assert len(array) == LAYOUT.page_nbytes(page)
            assert array.ctypes.data % 4096 == 0
            if intent is not Intent.OVERWRITE:
                self.check(page, array)
            if intent in (Intent.UPDATE, Intent.OVERWRITE):
                self.version += 1
                self.truth[page] = pattern(LAYOUT, page, self.version)
                # The padding is the store's to clear.
                array[:] = 0x55
                array[: content_bytes(LAYOUT, page)] = np.frombuffer(self.truth[page], dtype=np.uint8)
            elif intent is Intent.CONSUME:
                array[:] = 0x66
                del self.truth[page]
        self.held.append((lease, uses))
        if not keep:
            self.give_back(len(self.held) - 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.integers(0, len(self.held) - 1)))

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

    @rule(page=pages, intent=st.sampled_from([Intent.READ, Intent.UPDATE, Intent.CONSUME]))
    def read_what_is_not_there(self, page: Page, intent: Intent) -> None:
        if not self.readable(page) and not self.holders(page):
            with pytest.raises(InvariantError, match="never written or is gone"):
                self.store.acquire([(page, intent)])
            assert not self.store.has_content(page)

    # The rest of the interface

    @rule(plane=st.sampled_from(PLANES), data=st.data(), write=st.booleans())
    def access_range(self, plane: tuple[str, str], data: st.DataObject, write: bool) -> None:
        spec = LAYOUT.spec(*plane)
        start = data.draw(st.integers(0, spec.numel))
        count = data.draw(st.integers(0, spec.numel - start))
        touched = LAYOUT.pages_over(*plane, start, start + count) if count else []
        alone = Intent.UPDATE if write else Intent.READ
        if not all(self.free_of_conflict(page, alone) and self.fits([page]) for page in touched):
            return
        if not all(self.readable(page) for page in touched):
            return
        whole = bytearray(b"".join(self.content(page) for page in LAYOUT.pages(*plane)))
        low, high = start * spec.item_bytes, (start + count) * spec.item_bytes
        dtype = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)
        if write:
            self.version += 1
            values = np.frombuffer(np.random.default_rng(self.version).bytes(high - low), dtype=dtype)
            self.store.write_range(*plane, start, values)
            whole[low:high] = values.tobytes()
            for page in touched:
                first = page.index * PAGE_BYTES
                self.truth[page] = bytes(whole[first : first + content_bytes(LAYOUT, page)])
        else:
            out = np.empty(count, dtype=dtype)
            self.store.read_range(*plane, start, out)
            assert out.tobytes() == bytes(whole[low:high])
        self.used += len(touched)

    @rule(step=st.lists(pages, max_size=30), following=st.lists(pages, max_size=30))
    def begin_step(self, step: list[Page], following: list[Page]) -> None:
        self.store.begin_step(step, following)

    @rule(chosen=page_lists)
    def discard(self, chosen: list[Page]) -> None:
        free = [page for page in chosen if page not in DURABLE and not self.holders(page)]
        self.store.discard(free)
        for page in free:
            self.truth.pop(page, None)
        for page in chosen:
            if page not in free:
                with pytest.raises(InvariantError, match="cannot be discarded"):
                    self.store.discard([page])

    @rule()
    def flush(self) -> None:
        writers = [page for _, uses in self.held for page, intent in uses if intent is not Intent.READ]
        if DURABLE.intersection(writers):
            return
        self.store.flush()
        if isinstance(self.directory, MemoryDirectory):
            files = self.directory.files
        elif isinstance(self.directory, ZarrDirectory):
            files = {page: Path(self.directory.path(page)).read_bytes() for page in DURABLE}
        else:
            return
        for page in DURABLE.intersection(self.truth):
            assert files[page] == self.truth[page].ljust(LAYOUT.page_nbytes(page), b"\0")

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats.copy()
        assert stats.hits + stats.prefetched + stats.misses + stats.fresh == self.used
        assert stats.frames_in_use <= stats.frames_in_use_peak <= stats.frame_count

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            while self.held:
                self.give_back(0)
            for page in PAGES:
                assert self.store.has_content(page) == (page in self.truth)
                if self.readable(page):
                    with self.store.acquire([(page, Intent.READ)]) as lease:
                        self.check(page, lease.arrays[0])
        finally:
            self.store.close()
            self.backend.close()
            shutil.rmtree(self.scratch)


StoreMachine.TestCase.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestStoreModel = StoreMachine.TestCase
