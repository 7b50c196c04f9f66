"""Memory that is all there, of exact size, and refusals with numbers."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tierstream.io import host_memory
from tierstream.io.errors import BudgetError
from tierstream.io.memory import MemoryLimit, MemoryLimits
from tierstream.tiered.arena import Arena

MIB = 1 << 20
HUGE = host_memory.HUGE_PAGE_BYTES


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of [address, address + nbytes) that have memory behind them; both multiples of 4096 (proc(5),
    pagemap)."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // 4096 * 8)
        entries = np.frombuffer(pagemap.read(nbytes // 4096 * 8), np.uint64)
    assert len(entries) == nbytes // 4096
    return 4096 * int(np.count_nonzero(entries >> np.uint64(63)))


@pytest.mark.parametrize("nbytes", [4096, HUGE - 4096, HUGE, 3 * MIB + 4096, 5 * HUGE, 192 * MIB + 12288])
def test_all_of_it_is_resident_and_not_a_page_more(nbytes: int) -> None:
    memory = host_memory.allocate(nbytes)
    address = memory.ctypes.data
    assert (memory.nbytes, address % HUGE) == (nbytes, 0)
    assert resident_bytes(address, nbytes) == nbytes
    mapping = memory.base  # with the address space that only serves the alignment
    assert isinstance(mapping, np.ndarray)
    assert mapping.nbytes > nbytes
    assert resident_bytes(mapping.ctypes.data, mapping.nbytes) == nbytes
    assert not memory.any()


def test_the_memory_lives_as_long_as_an_array_over_it() -> None:
    memory = host_memory.allocate(8 * MIB)
    address, part = memory.ctypes.data, memory[4 * MIB :]
    del memory
    assert resident_bytes(address, 8 * MIB) == 8 * MIB
    part.fill(1)
    del part
    assert resident_bytes(address, 8 * MIB) < 8 * MIB


def test_it_is_resident_when_it_is_registered() -> None:
    seen = []
    Arena([MIB] * 5, register=lambda address, nbytes: seen.append(resident_bytes(address, nbytes)))
    assert seen == [5 * MIB]


class Kernel:
    """Stands for madvise: fails with each of `codes` in turn, then works."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.calls, self.threads = list(codes), [], set()  # type: ignore[var-annotated]
        self.both_there = threading.Barrier(2, timeout=5)

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        assert advice == host_memory.MADV_POPULATE_WRITE
        if self.codes:
            ctypes.set_errno(self.codes.pop(0))
            return -1
        self.calls.append((address, nbytes))
        self.threads.add(threading.get_ident())
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    def install(*codes: int) -> Kernel:
        made = Kernel(*codes)
        monkeypatch.setattr(host_memory, "_madvise", made)
        return made

    return install


def test_the_ranges_of_the_threads_are_the_whole_and_cut_at_huge_pages(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Kernel]
) -> None:
    monkeypatch.setattr(host_memory, "POPULATE_BYTES", 2 * HUGE)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    fake = kernel()
    memory = host_memory.allocate(9 * HUGE + 4096)
    start, ranges = memory.ctypes.data, sorted(fake.calls)
    assert [address - start for address, _ in ranges] == [0, 2 * HUGE, 4 * HUGE, 6 * HUGE, 8 * HUGE]
    assert [nbytes for _, nbytes in ranges] == [2 * HUGE] * 4 + [HUGE + 4096]
    assert threading.get_ident() not in fake.threads


def test_several_threads_are_in_the_kernel_at_once(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Kernel]
) -> None:
    monkeypatch.setattr(host_memory, "POPULATE_BYTES", HUGE)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    fake = kernel()
    meet = fake.both_there
    monkeypatch.setattr(host_memory, "_madvise", lambda *call: meet.wait() and 0)
    host_memory.allocate(2 * HUGE)  # a thread alone breaks the barrier


def test_an_old_kernel_gets_its_pages_by_writing(kernel: Callable[..., Kernel]) -> None:
    kernel(*[errno.EINVAL] * 9)
    memory = host_memory.allocate(5 * MIB)
    assert resident_bytes(memory.ctypes.data, 5 * MIB) == 5 * MIB
    assert not memory.any()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_call_is_made_again(kernel: Callable[..., Kernel], code: int) -> None:
    fake = kernel(code, code)
    memory = host_memory.allocate(MIB)
    assert fake.calls == [(memory.ctypes.data, MIB)]


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_does_not_come_is_a_budget_error(kernel: Callable[..., Kernel], code: int) -> None:
    kernel(code)
    with pytest.raises(BudgetError, match=r"8\.00 MiB of host memory .*available.*lower the DRAM budget"):
        Arena([8 * MIB])


def test_more_than_the_control_group_has_left_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Kernel]
) -> None:
    """The kernel would kill the process instead of refusing."""
    limits = MemoryLimits((MemoryLimit("/sys/fs/cgroup/memory.max", 256 * MIB, 100 * MIB),))
    monkeypatch.setattr(host_memory, "memory_budget", lambda: limits)
    fake = kernel()
    with pytest.raises(BudgetError, match=r"157\.00 MiB .* 156\.00 MiB available: 256\.00 MiB \(/sys/fs"):
        Arena([MIB] * 157)
    assert fake.calls == []
    assert len(Arena([MIB] * 156).frames) == 156


def test_huge_pages_are_used_where_the_kernel_has_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this kernel gives no transparent huge pages")
    memory = host_memory.allocate(16 * HUGE)
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            inside = int(first.split("-")[0], 16) == memory.ctypes.data
        elif inside and first == "AnonHugePages:":
            huge = int(line.split()[1]) * 1024
    assert 0 < huge <= 16 * HUGE
    assert np.count_nonzero(memory) == 0
