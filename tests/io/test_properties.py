"""Random reads and writes, one after the other and at once, against a bytearray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drive_kinds import PATH_OF_KIND, drive_of_kind
from support.faults import FaultySyscalls, delay, interrupt_every

from tierstream.io import seam
from tierstream.io.backend import File
from tierstream.io.direct import aligned_buffer

FILE_BYTES = 5 * 4096 + 123


@dataclass(frozen=True)
class Operation:
    write: bool
    offset: int
    nbytes: int
    misalignment: int
    fill: int


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    edges = st.sampled_from([0, 1, 511, 512, 4095, 4096, 4097, 8192, FILE_BYTES])
    start, stop = sorted((draw(edges | st.integers(0, FILE_BYTES)), draw(edges | st.integers(0, FILE_BYTES))))
    misalignment = draw(st.sampled_from([0, 0, 0, 1, 16, 512, 4095]))
    return Operation(draw(st.booleans()), start, stop - start, misalignment, draw(st.integers(0, 255)))


def start(file: File, operation: Operation) -> tuple[Future[int], np.ndarray]:
    whole = aligned_buffer(operation.nbytes + 4096)
    buffer = whole[operation.misalignment : operation.misalignment + operation.nbytes]
    if operation.write:
        buffer[:] = (np.arange(operation.nbytes) * 7 + operation.fill).astype(np.uint8)
        return file.write_from(buffer, operation.offset), buffer
    return file.read_into(buffer, operation.offset), buffer


def check_sequence(path: Path, file: File, sequence: list[Operation]) -> None:
    oracle = bytearray(path.read_bytes())
    for operation in sequence:
        future, buffer = start(file, operation)
        assert future.result() == operation.nbytes
        span = slice(operation.offset, operation.offset + operation.nbytes)
        if operation.write:
            oracle[span] = buffer.tobytes()
        assert buffer.tobytes() == oracle[span]
    assert path.read_bytes() == oracle


def check_at_once(path: Path, file: File, sequence: list[Operation]) -> None:
    """Of overlapping operations only the first is used: what two do to one byte at once is not defined."""
    oracle = bytearray(path.read_bytes())
    taken = np.zeros(FILE_BYTES, dtype=bool)
    started = []
    for operation in sequence:
        span = slice(operation.offset, operation.offset + operation.nbytes)
        if not taken[span].any():
            taken[span] = True
            started.append((operation, span, *start(file, operation)))
    for operation, span, future, buffer in started:
        assert future.result() == operation.nbytes
        if operation.write:
            oracle[span] = buffer.tobytes()
        assert buffer.tobytes() == oracle[span]
    assert path.read_bytes() == oracle


Check = Callable[[Path, File, list[Operation]], None]


@pytest.mark.parametrize("check", [check_sequence, check_at_once])
@pytest.mark.parametrize("kind", PATH_OF_KIND)
def test_any_operations(kind: str, check: Check) -> None:
    # Tasks of two blocks: nearly every request is cut.
    with drive_of_kind(kind, threads=3, task_bytes=8192) as drive:
        path = drive.directory / "file"
        path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
        file = drive.backend.open(path, writable=True)

        @given(st.lists(operations(), min_size=1, max_size=12))
        def run(sequence: list[Operation]) -> None:
            check(path, file, sequence)

        run()


@pytest.mark.parametrize("check", [check_sequence, check_at_once])
def test_any_operations_with_short_interrupted_and_late_calls(tmp_path: Path, check: Check) -> None:
    with drive_of_kind("posix-direct", threads=3, task_bytes=8192) as drive:
        path = drive.directory / "file"
        path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
        file = drive.backend.open(path, writable=True)

        @given(st.lists(operations(), min_size=1, max_size=6), st.integers(0, 1000))
        def run(sequence: list[Operation], seed: int) -> None:
            faulty = FaultySyscalls(interrupt_every(5), delay(seed, max_s=0.0001), short_bytes=997)
            with seam.injected(faulty):
                check(path, file, sequence)

        run()
