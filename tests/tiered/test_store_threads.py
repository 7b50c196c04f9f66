"""Several threads at the store at once: content, sharing, order of grants."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.stores import (
    PAGE_BYTES,
    MemoryDirectory,
    all_pages,
    content_bytes,
    drives_in,
    mixed_layout,
    pattern,
    uniform_layout,
)

from tierstream.io.errors import BudgetError, InvariantError
from tierstream.io.posix import PosixBackend
from tierstream.tiered.cache import OVERTAKES_MAX
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Directory, Faults, Intent, Lease, Store
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = mixed_layout(units=4)


class Worker:
    """Takes random leases and keeps the truth about the pages that it holds alone."""

    def __init__(self, store: Store, truth: dict[Page, int], seed: int) -> None:
        self.store, self.truth = store, truth
        self.random = random.Random(seed)

    def run(self, pages: list[Page], leases: int) -> None:
        for _ in range(leases):
            chosen = self.random.sample(pages, self.random.randint(1, 3))
            intents = [
                self.random.choice([Intent.READ, Intent.READ, Intent.UPDATE, Intent.OVERWRITE])
                for _ in chosen
            ]
            with self.store.acquire(list(zip(chosen, intents, strict=True))) as lease:
                for page, intent, array in zip(chosen, intents, lease.arrays, strict=True):
                    self.use(page, intent, array)
                if self.random.random() < 0.2:
                    time.sleep(0.0005)
                # Nobody has touched what is leased.
                for page, array in zip(chosen, lease.arrays, strict=True):
                    self.check(page, array)

    def use(self, page: Page, intent: Intent, array: np.ndarray) -> None:
        if intent is not Intent.OVERWRITE:
            self.check(page, array)
        if intent is not Intent.READ:
            array.fill(0x77)
            version = self.truth.get(page, 0) + 1
            array[: content_bytes(LAYOUT, page)] = np.frombuffer(
                pattern(LAYOUT, page, version), dtype=np.uint8
            )
            self.truth[page] = version

    def check(self, page: Page, array: np.ndarray) -> None:
        nbytes = content_bytes(LAYOUT, page)
        version = self.truth.get(page)
        expected = bytes(nbytes) if version is None else pattern(LAYOUT, page, version)
        assert array[:nbytes].tobytes() == expected, f"{page} is not version {version}"


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize("seed", range(5))
def test_content_is_right_under_random_delays(tmp_path: Path, seed: int, policy: str) -> None:
    """Four threads, few frames, delays at I/O and grants, freed frames poisoned; steps begin meanwhile."""
    pages = all_pages(LAYOUT, durable=True)
    backend = PosixBackend(threads=3)
    directory: Directory = (
        ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {}, readback="full")
        if seed % 2
        else MemoryDirectory(threads=3)
    )
    truth: dict[Page, int] = {}
    with Store(
        LAYOUT,
        dram_bytes=(12 + seed) * PAGE_BYTES,
        directory=directory,
        policy=policy,
        prefetch_bytes=seed * 3 * PAGE_BYTES,
        writeback_bytes=(1 + seed) * PAGE_BYTES,
        debug=True,
        faults=Faults(seed, 0.001),
    ) as store:
        workers = [Worker(store, truth, seed * 10 + number) for number in range(4)]
        with ThreadPoolExecutor(len(workers)) as pool:
            runs = [pool.submit(worker.run, pages, 50) for worker in workers]
            choice = random.Random(seed)
            while not all(run.done() for run in runs):
                store.begin_step(choice.choices(pages, k=40), choice.choices(pages, k=40))
                time.sleep(0.02)
                store.flush()
            for run in runs:
                run.result()
        check = Worker(store, truth, 0)
        for page in pages:
            with store.acquire([(page, Intent.READ)]) as lease:
                check.check(page, lease.arrays[0])
        assert store.stats.evictions > 0
    backend.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_uploads_downloads_and_updates(seed: int) -> None:
    """The threads of a training step, each walking its own part of one schedule, for several steps."""
    units = [f"layers.{index}" for index in range(4)]
    weights = {unit: LAYOUT.pages(unit, "weight") for unit in units}
    moments = {unit: LAYOUT.pages(unit, "exp_avg") for unit in units}
    grads = {unit: LAYOUT.pages(unit, "grad") for unit in units}
    update = [page for unit in units for page in (*grads[unit], *moments[unit], *weights[unit])]
    sweep = [page for unit in [*units, *reversed(units)] for page in (*weights[unit], *grads[unit][:1])]

    def upload(store: Store, version: int) -> None:
        for unit in [*units, *reversed(units)]:
            for page in weights[unit]:
                with store.acquire([(page, Intent.READ)]) as lease:
                    nbytes = content_bytes(LAYOUT, page)
                    assert lease.arrays[0][:nbytes].tobytes() == pattern(LAYOUT, page, version)

    def download(store: Store, version: int) -> None:
        for unit in reversed(units):
            for page in grads[unit]:
                with store.acquire([(page, Intent.OVERWRITE)]) as lease:
                    data = np.frombuffer(pattern(LAYOUT, page, version), dtype=np.uint8)
                    lease.arrays[0][: len(data)] = data

    def optimize(store: Store, version: int) -> None:
        for unit in units:
            for grad in grads[unit]:
                weight = Page(unit, "weight", grad.index)
                moment = Page(unit, "exp_avg", grad.index)
                uses = [(grad, Intent.CONSUME), (weight, Intent.UPDATE), (moment, Intent.UPDATE)]
                with store.acquire(uses) as lease:
                    got = lease.arrays[0][: content_bytes(LAYOUT, grad)].tobytes()
                    assert got == pattern(LAYOUT, grad, version - 1)
                    for array, page in zip(lease.arrays[1:], (weight, moment), strict=True):
                        data = np.frombuffer(pattern(LAYOUT, page, version), dtype=np.uint8)
                        assert array[0] == 0 or version > 1
                        array[: len(data)] = data

    with (
        Store(
            LAYOUT,
            dram_bytes=10 * PAGE_BYTES,
            directory=MemoryDirectory(threads=3),
            prefetch_bytes=(0, 2, 4, 8, 16)[seed] * PAGE_BYTES,
            writeback_bytes=3 * PAGE_BYTES,
            debug=True,
            faults=Faults(seed, 0.0005),
        ) as store,
        ThreadPoolExecutor(3) as pool,
    ):
        download(store, 0)
        for version in range(1, 5):
            store.begin_step(update + sweep, update + sweep)
            pool.submit(optimize, store, version).result()
            parts: list[Callable[[Store, int], None]] = [upload, download]
            for future in [pool.submit(part, store, version) for part in parts]:
                future.result()
        store.discard([page for pages in grads.values() for page in pages])
        assert not any(store.has_content(page) for pages in grads.values() for page in pages)


def small_store(frames: int, directory: Directory | None = None) -> Store:
    return Store(
        uniform_layout(8),
        dram_bytes=frames * PAGE_BYTES,
        directory=directory or MemoryDirectory(),
        prefetch_bytes=0,
        writeback_bytes=PAGE_BYTES,
        debug=True,
    )


def page(index: int) -> Page:
    return Page("unit", "weight", index)


def in_thread(store: Store, uses: list[tuple[Page, Intent]]) -> tuple[threading.Thread, list[Lease]]:
    """A thread that acquires, and the list in which its lease will be."""
    leases: list[Lease] = []
    thread = threading.Thread(target=lambda: leases.append(store.acquire(uses)))
    thread.start()
    return thread, leases


def test_debug_finds_a_page_that_was_changed_under_a_lease_to_read_it() -> None:
    with small_store(4) as store:
        store.acquire([(page(0), Intent.OVERWRITE)]).release()
        lease = store.acquire([(page(0), Intent.READ)])
        lease.arrays[0][100] ^= 1
        with pytest.raises(InvariantError, match="was changed outside a lease"):
            lease.release()
        with pytest.raises(InvariantError, match="was changed outside a lease"):
            store.acquire([(page(1), Intent.READ)])


def test_debug_finds_a_page_that_was_changed_after_its_release() -> None:
    with small_store(1) as store:
        lease = store.acquire([(page(0), Intent.UPDATE)])
        kept = lease.arrays[0]
        lease.release()
        kept.fill(3)
        for _ in range(2):
            with pytest.raises(InvariantError, match="was changed outside a lease"):
                store.acquire([(page(1), Intent.READ)])


def test_readers_share_and_a_writer_is_alone() -> None:
    with small_store(4) as store:
        first = store.acquire([(page(0), Intent.READ)])
        second = store.acquire([(page(0), Intent.READ)])
        assert first.arrays[0].ctypes.data == second.arrays[0].ctypes.data
        thread, leases = in_thread(store, [(page(0), Intent.UPDATE)])
        first.release()
        thread.join(0.05)
        assert not leases
        second.release()
        thread.join(5)
        leases[0].release()


def test_a_reader_does_not_pass_a_waiting_writer() -> None:
    with small_store(4) as store:
        reader = store.acquire([(page(0), Intent.READ)])
        writing, written = in_thread(store, [(page(0), Intent.UPDATE)])
        writing.join(0.05)
        reading, read = in_thread(store, [(page(0), Intent.READ)])
        reading.join(0.05)
        assert not written
        assert not read
        reader.release()
        writing.join(5)
        assert not read
        written[0].release()
        reading.join(5)
        read[0].release()


def test_a_request_for_resident_pages_passes_a_waiting_one_but_not_for_ever() -> None:
    with small_store(4) as store:
        held = store.acquire([(page(0), Intent.READ)])
        store.acquire([(page(1), Intent.READ)]).release()
        waiting, got = in_thread(store, [(page(index), Intent.READ) for index in (4, 5, 6, 7)])
        waiting.join(0.05)
        assert not got
        # Page 1 may have been evicted for the request at the head; page 0 is leased and stays.
        passes = 0
        for _ in range(OVERTAKES_MAX):
            store.acquire([(page(0), Intent.READ)]).release()
            passes += 1
        late, late_got = in_thread(store, [(page(0), Intent.READ)])
        late.join(0.05)
        assert not late_got, "requests overtake without end"
        held.release()
        waiting.join(5)
        got[0].release()
        late.join(5)
        late_got[0].release()
        assert passes == OVERTAKES_MAX


def test_a_big_request_is_not_starved_by_small_ones() -> None:
    with small_store(4) as store, ThreadPoolExecutor(3) as pool:
        stop = threading.Event()

        def small(number: int) -> None:
            while not stop.is_set():
                with store.acquire([(page(number), Intent.READ)]):
                    time.sleep(0.0002)

        runs = [pool.submit(small, number) for number in range(3)]
        for _ in range(20):
            with store.acquire([(page(index), Intent.UPDATE) for index in (3, 5, 6, 7)]) as lease:
                assert len(lease.arrays) == 4
        stop.set()
        for run in runs:
            run.result(5)


def test_more_pages_than_frames_are_refused_at_once() -> None:
    with small_store(4) as store:
        held = store.acquire([(page(0), Intent.READ)])
        with pytest.raises(BudgetError, match=r"5 pages of 4096 bytes.*holds 4.*raise the DRAM budget"):
            store.acquire([(page(index), Intent.READ) for index in range(5)])
        held.release()
        store.acquire([(page(index), Intent.READ) for index in range(4)]).release()


@pytest.mark.parametrize(
    ("uses", "why"),
    [
        ([(page(0), Intent.READ), (page(0), Intent.READ)], "names a page twice"),
        ([(page(8), Intent.READ)], "not in the layout"),
        ([(page(-1), Intent.READ)], "not in the layout"),
        ([(Page("unit", "grad", 0), Intent.READ)], "not in the layout"),
        ([(page(0), Intent.CONSUME)], "durable and cannot be consumed"),
    ],
)
def test_a_wrong_request_is_a_bug_and_changes_nothing(uses: list[tuple[Page, Intent]], why: str) -> None:
    with small_store(4) as store:
        with pytest.raises(InvariantError, match=why):
            store.acquire(uses)
        assert store.stats.frames_in_use == 0
        store.acquire([(page(0), Intent.UPDATE)]).release()


def test_an_empty_request_is_granted() -> None:
    with small_store(1) as store, store.acquire([]) as lease:
        assert lease.arrays == []


def test_settle_waits_for_what_was_read_ahead_and_written_behind() -> None:
    """Of itself the store moves nothing after it."""
    hold = threading.Event()
    hold.set()
    directory = MemoryDirectory(hold=hold)
    pages = [page(index) for index in range(8)]
    with Store(
        uniform_layout(8),
        dram_bytes=4 * PAGE_BYTES,
        directory=directory,
        prefetch_bytes=2 * PAGE_BYTES,
        writeback_bytes=PAGE_BYTES,
    ) as store:
        for each in pages:
            with store.acquire([(each, Intent.OVERWRITE)]) as lease:
                lease.arrays[0][:] = 1
        store.flush()
        hold.clear()
        before = len(directory.read_pages)
        store.begin_step(pages, pages)
        waiting = threading.Thread(target=store.settle, daemon=True)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        hold.set()
        waiting.join(10)
        assert not waiting.is_alive()
        moved = (store.stats.nvme_bytes_read, store.stats.nvme_bytes_written)
        ahead = len(directory.read_pages) - before
        assert ahead > 0
        time.sleep(0.05)
        assert moved == (store.stats.nvme_bytes_read, store.stats.nvme_bytes_written)
        assert len(directory.read_pages) - before == ahead


def test_closing_ends_waiting_requests_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    store = small_store(1)
    held = store.acquire([(page(0), Intent.READ)])
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.acquire([(page(1), Intent.READ)])
        except InvariantError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    store.close()
    thread.join(5)
    assert "closed" in str(errors[0])
    assert held.arrays[0].sum() == 0
    held.release()
    store.close()
    with pytest.raises(InvariantError, match="closed"):
        store.acquire([(page(0), Intent.READ)])
    assert set(threading.enumerate()) <= before
