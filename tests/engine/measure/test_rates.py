"""Copies, updates and matrix products are measured as they are made; wrong bytes are found."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstream import _native
from tierstream.engine.device.device import Device, HostLane
from tierstream.engine.measure import adam_rates, compute_rates, copy_rates, memory_rates
from tierstream.engine.measure.copy_rates import DIRECTIONS, CopyBench, arena_memory, other_memories
from tierstream.io.errors import InvariantError
from tierstream.io.measure import measure

KIB = 1 << 10


class FakeCuda(Device):
    """The CPU with a driver that registers memory, and a record of what its lanes copied."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.registered: dict[int, int] = {}
        self.copied: Counter[tuple[str, int]] = Counter()
        self.threads: dict[str, set[int]] = {"up": set(), "down": set()}
        self.upload, self.download = RecordingLane(self, "up"), RecordingLane(self, "down")

    def pinning(self):  # type: ignore[no-untyped-def]
        return self.registered.__setitem__, self.registered.__delitem__


class RecordingLane(HostLane):
    def __init__(self, device: FakeCuda, name: str) -> None:
        super().__init__(None)
        self.device, self.name = device, name

    def _copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self.device.copied[self.name, target.nbytes] += 1
        self.device.threads[self.name].add(threading.get_ident())
        super()._copy(target, source)


def test_every_case_moves_what_its_labels_say() -> None:
    device, nbytes = FakeCuda(), 64 * KIB
    sizes = [4 * KIB, 24 * KIB, 64 * KIB]
    with arena_memory(device, nbytes) as arena:
        assert sum(device.registered.values()) == 2 * nbytes
        cases = CopyBench(device, nbytes).cases(arena, sizes)
        labels = [(case.labels["direction"], case.labels["size_bytes"]) for case in cases]
        assert labels == list(itertools.product(DIRECTIONS, sizes))
        for case in cases:
            device.copied.clear()
            sample = case.run()
            size = int(case.labels["size_bytes"])
            ways = {"H2D": ["up"], "D2H": ["down"], "both": ["up", "down"]}[str(case.labels["direction"])]
            assert device.copied == {(way, size): nbytes // size for way in ways}
            assert sample.amount == len(ways) * (nbytes // size) * size
    assert not device.registered


def test_both_directions_have_a_thread_each() -> None:
    device = FakeCuda()
    with arena_memory(device, 8 * KIB) as arena:
        both = CopyBench(device, 8 * KIB).cases(arena, [4 * KIB])[2]
        both.run()
    assert device.threads["up"] == {threading.get_ident()}
    assert device.threads["up"].isdisjoint(device.threads["down"])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_copy_of_wrong_bytes_fails(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    device = Device("cpu")
    case = CopyBench(device, 16 * KIB).cases(other_memories(device, 16 * KIB)[0], [4 * KIB])[
        DIRECTIONS.index(direction)  # type: ignore[arg-type]
    ]

    def corrupt(self: HostLane, target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source)
        target[-1] ^= 1

    monkeypatch.setattr(HostLane, "_copy", corrupt)
    way = {"both": "H2D"}.get(direction, direction)
    with pytest.raises(InvariantError, match=rf"{way} .*4 of 16384 bytes are wrong, the first at 4095"):
        case.run()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_copy_that_is_not_made_fails(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    device = Device("cpu")
    case = CopyBench(device, 16 * KIB).cases(other_memories(device, 16 * KIB)[0], [4 * KIB])[
        DIRECTIONS.index(direction)  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(HostLane, "_copy", lambda *_: None)
    with pytest.raises(InvariantError, match="16384 of 16384"):
        case.run()


def test_buffers_hold_every_size_and_are_whole_pages() -> None:
    assert copy_rates.buffer_bytes([4096]) == copy_rates.RUN_BYTES
    assert copy_rates.buffer_bytes([(1 << 30) + 1]) == (1 << 30) + 4096


def test_why_the_arena_is_pageable_stands_in_the_measurement() -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError("no such driver")

    device = FakeCuda()
    device.pinning = lambda: (refuse, device.registered.__delitem__)  # type: ignore[method-assign]
    with arena_memory(device, 4 * KIB) as arena:
        cases = CopyBench(device, 4 * KIB).cases(arena, [4 * KIB])
        assert all("no such driver" in m.note for m in measure(cases, rounds=1))


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_thread_counts(cores: int, counts: list[int]) -> None:
    assert adam_rates.thread_counts(cores) == counts


def test_adam_cases_update_all_parameters_with_the_threads_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[tuple[str, int, int]] = Counter()

    def recording(name: str):  # type: ignore[no-untyped-def]
        kernel = getattr(_native, name)

        def call(*arrays, threads: int, **settings):  # type: ignore[no-untyped-def]
            calls[name, arrays[-1].size, threads] += 1
            kernel(*arrays, threads=threads, **settings)

        return call

    kernels = {"adamw_split": recording("adamw_split"), "adamw_fp32": recording("adamw_fp32")}
    update = _native.memory_update

    def touch(targets, source, threads: int) -> None:  # type: ignore[no-untyped-def]
        calls["memory_update", source.size, threads] += 1
        update(targets, source, threads)

    monkeypatch.setattr(_native, "memory_update", touch)
    monkeypatch.setattr(adam_rates, "PAGE_PARAMETERS", 400)
    for name, kernel in kernels.items():
        monkeypatch.setattr(_native, name, kernel)
    threads_of_torch = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: threads_of_torch.append(torch.get_num_threads()) or step(self)
    )
    before = torch.get_num_threads()
    cases = adam_rates.adam_cases(1000, [1, 2])
    measurements = measure(cases, rounds=2, warmups=0)
    assert calls == {
        ("adamw_split", 1000, 1): 4, ("adamw_split", 1000, 2): 4,
        ("adamw_split", 400, 1): 4, ("adamw_split", 400, 2): 4,
        ("adamw_split", 200, 1): 2, ("adamw_split", 200, 2): 2,
        ("adamw_fp32", 1000, 1): 6, ("adamw_fp32", 1000, 2): 6,
        ("memory_update", 1000, 1): 20, ("memory_update", 1000, 2): 20,
    }  # fmt: skip
    assert sorted(threads_of_torch) == [1, 1, 2, 2]
    assert torch.get_num_threads() == before
    updates = [m for m in measurements if m.labels["part"] == adam_rates.UPDATE]
    memory = {m.labels["kernel"] for m in measurements if m.labels["part"] == adam_rates.MEMORY}
    assert [m.labels["kernel"] for m in updates] == [k for k in adam_rates.BYTES_PER_PARAMETER for _ in "12"]
    assert {adam_rates.traffic_of(kernel) for kernel in adam_rates.BYTES_PER_PARAMETER} == memory
    assert {m.labels["isa"] for m in updates[:12]} == {_native.cpu_isa()}
    assert all(m.unit == "parameters" and m.median > 0 for m in measurements)


def test_bytes_per_parameter_are_the_traffic_of_the_arrays() -> None:
    """Read and write of every array that is written, read of the gradient; the bf16 copy of a master is not
    read."""
    assert list(adam_rates.BYTES_PER_PARAMETER.values()) == [26, 26, 28, 28, 30, 28, 28]
    for kernel, traffic in adam_rates.BYTES_PER_PARAMETER.items():
        assert adam_rates.BYTES_PER_PARAMETER[adam_rates.traffic_of(kernel)] == traffic


def test_memory_traffic_leaves_the_state_as_it_was() -> None:
    arrays = adam_rates._arrays(1000)
    for planes in arrays.values():
        before = [plane.tobytes() for plane in planes]
        adam_rates._traffic(planes)(2)
        assert [plane.tobytes() for plane in planes] == before


def test_memory_cases_count_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: Counter[str] = Counter()
    read, copy, update = _native.memory_read, _native.memory_copy, _native.memory_update

    def counted_read(source, threads):  # type: ignore[no-untyped-def]
        moved["memory_read"] += source.nbytes
        return read(source, threads)

    def counted_copy(source, target, threads):  # type: ignore[no-untyped-def]
        moved["memory_copy"] += source.nbytes + target.nbytes
        copy(source, target, threads)

    def counted_update(targets, source, threads):  # type: ignore[no-untyped-def]
        moved["memory_update"] += source.nbytes + 2 * sum(target.nbytes for target in targets)
        update(targets, source, threads)

    for counted in (counted_read, counted_copy, counted_update):
        monkeypatch.setattr(_native, counted.__name__.replace("counted", "memory"), counted)
    cases = memory_rates.memory_cases(10_007, [1, 2])
    labels = [(case.labels["pattern"], case.labels["threads"]) for case in cases]
    assert labels == list(itertools.product(["read", "copy", "update"], [1, 2]))
    for case in cases:
        moved.clear()
        amount = case.run().amount
        assert moved == {f"memory_{case.labels['pattern']}": amount}
        assert 9900 < amount < 2 * 10_007


def test_memory_is_measured_over_more_than_the_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache_bytes, nbytes in ((1 << 20, 4 << 20), (None, 2 << 30)):
        monkeypatch.setattr(memory_rates, "last_level_cache_bytes", lambda found=cache_bytes: found)
        assert memory_rates.buffer_bytes() == nbytes


def test_quick_rates_are_the_best_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_rates, "_QUICK_BYTES", 1 << 20)
    monkeypatch.setattr(compute_rates, "CPU_EDGE", 64)
    monkeypatch.setattr(adam_rates, "_QUICK_PARAMETERS", 1 << 12)
    device = Device("cpu")
    for module in (copy_rates, compute_rates, adam_rates):
        seen = []

        def recorded(*args, seen=seen, **kwargs):  # type: ignore[no-untyped-def]
            seen.extend(measure(*args, **kwargs))
            return seen

        monkeypatch.setattr(module, "measure", recorded)
        rate = {
            copy_rates: lambda: copy_rates.upload_rate(device),
            compute_rates: lambda: compute_rates.matmul_rate(device, torch.float32),
            adam_rates: lambda: adam_rates.update_rate(2),
        }[module]()
        assert rate == max(seen[0].rates)
        assert len(seen[0].rates) == 5


@pytest.mark.gpu
def test_copies_on_cuda(tmp_path: Path) -> None:
    """Every kind of memory, every direction: the bytes are checked by the cases themselves."""
    device, nbytes, sizes = Device("cuda"), 64 << 20, [64 * KIB, 3 << 20, 64 << 20]
    bench = CopyBench(device, nbytes)
    with arena_memory(device, nbytes) as arena:
        assert arena.note == ""
        memories = [arena, *other_memories(device, nbytes)]
        assert [memory.kind for memory in memories] == ["arena", "torch", "pageable"]
        assert [torch.from_numpy(memory.source).is_pinned() for memory in memories] == [True, True, False]
        cases = [case for memory in memories for case in bench.cases(memory, sizes)]
        rates = {tuple(m.labels.values()): m.median for m in measure(cases, rounds=3)}
    for direction in ("H2D", "D2H"):
        pinned, pageable = rates[direction, "arena", 64 << 20], rates[direction, "pageable", 64 << 20]
        assert 0.8 < pinned / rates[direction, "torch", 64 << 20] < 1.25
        assert pinned > pageable, "registered memory is copied as if it were not"
    assert copy_rates.upload_rate(device) > 1e9
    device.close()
