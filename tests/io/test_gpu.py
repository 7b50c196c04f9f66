"""Device buffers through kvikio and pinned host buffers through every backend, with a CUDA device."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drive_kinds import Drive, drive_of_kind

from tierstream.io.backend import open_backend
from tierstream.io.errors import InvariantError, StorageError

pytestmark = pytest.mark.gpu
MIB, GIB = 1 << 20, 1 << 30
SIZES = [1, 511, 512, 513, 4095, 4096, 4097, 16 << 10, 65536, MIB - 1, MIB, MIB + 1, 28_824_000]
#: Of the device's clock; a tenth of a second or so.
LONG_CYCLES = 200_000_000


@pytest.fixture
def drive() -> Iterator[Drive]:
    with drive_of_kind("kvikio", threads=4, task_bytes=MIB) as found:
        yield found


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def filled_file(directory: Path, nbytes: int) -> tuple[Path, bytearray]:
    path = directory / "file"
    content = bytearray(random_bytes(nbytes, seed=1).tobytes())
    path.write_bytes(content)
    return path, content


@pytest.mark.parametrize("misalignment", [0, 1, 512])
@pytest.mark.parametrize("offset", [0, 1, 511, 4096, 4097])
@pytest.mark.parametrize("nbytes", SIZES)
def test_round_trip_of_device_memory(drive: Drive, nbytes: int, offset: int, misalignment: int) -> None:
    path, oracle = filled_file(drive.directory, offset + nbytes + 5000)
    data = random_bytes(nbytes)
    source = torch.zeros(nbytes + misalignment, dtype=torch.uint8, device="cuda")[misalignment:]
    source.copy_(torch.from_numpy(data))
    target = torch.full((nbytes + misalignment + 64,), 0xA5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    file = drive.backend.open(path, writable=True)
    assert file.write_from(source, offset).result() == nbytes
    oracle[offset : offset + nbytes] = data.tobytes()
    assert path.read_bytes() == oracle
    assert file.read_into(target[misalignment : misalignment + nbytes], offset).result() == nbytes
    back = target.cpu().numpy()
    assert zlib.crc32(back[misalignment : misalignment + nbytes].tobytes()) == zlib.crc32(data)
    assert (back[:misalignment] == 0xA5).all()
    assert (back[misalignment + nbytes :] == 0xA5).all()


def test_more_than_two_gib_of_device_memory(drive: Drive) -> None:
    backend = drive.reopen(threads=2, task_bytes=4 * GIB)
    nbytes = 2 * GIB + 4096
    path = drive.directory / "large"
    backend.create(path, nbytes)
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    source[:5], source[-5:] = 1, 2
    torch.cuda.synchronize()
    file = backend.open(path, writable=True)
    assert file.write_from(source, 0).result() == nbytes
    assert path.stat().st_size == nbytes
    target = torch.full_like(source, 0xA5)
    torch.cuda.synchronize()
    assert file.read_into(target, 0).result() == nbytes
    assert torch.equal(target, source)


def test_a_request_keeps_device_buffer_and_file_alive(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 32 * MIB)
    memory = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    future = drive.backend.open(path, writable=False).read_into(memory[:], 0)
    gc.collect()
    assert future.result() == 32 * MIB
    assert memory.cpu().numpy().tobytes() == oracle

    expected = random_bytes(32 * MIB, seed=4)
    source = torch.from_numpy(expected).cuda()
    torch.cuda.synchronize()
    future = drive.backend.open(path, writable=True).write_from(source, 0)
    del source
    gc.collect()
    # The allocator would give its memory to the next tensor.
    junk = torch.full((32 * MIB,), 0x5A, dtype=torch.uint8, device="cuda")
    assert future.result() == 32 * MIB
    assert path.read_bytes() == expected.tobytes()
    del junk


def test_a_request_waits_for_the_default_stream(drive: Drive) -> None:
    """What torch has enqueued there before the request is in the file, though the host has not waited."""
    path, _ = filled_file(drive.directory, 32 * MIB)
    source = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    file = drive.backend.open(path, writable=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    source.fill_(7)
    assert file.write_from(source, 0).result() == 32 * MIB
    assert path.read_bytes() == b"\x07" * (32 * MIB)


def test_the_caller_orders_requests_with_torch_s_current_stream(drive: Drive) -> None:
    """Before a request the stream is waited for; after its future any stream sees the bytes."""
    path, oracle = filled_file(drive.directory, 32 * MIB)
    side = torch.cuda.Stream()
    file = drive.backend.open(path, writable=True)
    with torch.cuda.stream(side):
        buffer = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(LONG_CYCLES)
        buffer.fill_(9)  # would overwrite what is read if it were not waited for
        torch.cuda.current_stream().synchronize()
        assert file.read_into(buffer, 0).result() == 32 * MIB
        doubled = buffer + buffer  # enqueued after the future: no synchronisation is needed
        torch.cuda._sleep(LONG_CYCLES)
        buffer.copy_(doubled)
        torch.cuda.current_stream().synchronize()
        assert file.write_from(buffer, 0).result() == 32 * MIB
    expected = np.frombuffer(oracle, dtype=np.uint8)
    assert path.read_bytes() == (expected + expected).tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_tensors_of_any_dtype(drive: Drive, dtype: torch.dtype) -> None:
    path, _ = filled_file(drive.directory, 4 * MIB)
    values = torch.randint(-30000, 30000, (300, 1001), device="cuda").to(dtype)
    out = torch.empty_like(values)
    torch.cuda.synchronize()
    file = drive.backend.open(path, writable=True)
    assert file.write_from(values, 4096).result() == values.nbytes
    file.read_into(out, 4096).result()
    assert torch.equal(out, values)
    expected = values.cpu().view(torch.uint8).numpy().tobytes()
    assert path.read_bytes()[4096 : 4096 + values.nbytes] == expected


def test_many_device_requests_at_once(drive: Drive) -> None:
    path, oracle = filled_file(drive.directory, 32 * MIB)
    file = drive.backend.open(path, writable=True)
    tensors = [torch.zeros(MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    torch.cuda.synchronize()
    futures = [file.read_into(tensor, index * MIB) for index, tensor in enumerate(tensors)]
    assert [future.result() for future in futures] == [MIB] * 32
    assert b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors) == oracle


def test_a_short_file_is_an_error_on_the_device_too(drive: Drive) -> None:
    path, _ = filled_file(drive.directory, 100_000)
    target = torch.zeros(200_000, dtype=torch.uint8, device="cuda")
    with pytest.raises(StorageError, match="ends at byte 100000"):
        drive.backend.open(path, writable=False).read_into(target, 0).result()


def test_strided_device_memory_is_refused(drive: Drive) -> None:
    path, _ = filled_file(drive.directory, 4096)
    with pytest.raises(InvariantError, match="not C-contiguous"):
        drive.backend.open(path, writable=True).write_from(torch.zeros(64, 64, device="cuda").T, 0)


def test_the_device_path_is_named_with_its_reason(drive: Drive) -> None:
    path = drive.backend.transfer_path(drive.directory, device=True)
    assert path.name in ("gds", "kvikio-compat")
    assert bool(path.reason) == (path.name == "kvikio-compat")


def test_automatic_choice_is_kvikio() -> None:
    backend = open_backend("auto")
    assert backend.name == "kvikio"
    backend.close()


@pytest.mark.parametrize("kind", ["posix-direct", "kvikio"])
def test_pinned_host_memory_goes_direct(kind: str) -> None:
    with drive_of_kind(kind) as drive:
        path = drive.directory / "page"
        drive.backend.create(path, 8 * MIB)
        pinned = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True).numpy()
        pinned[:] = random_bytes(8 * MIB)
        file = drive.backend.open(path, writable=True)
        file.write_from(pinned, 0).result()
        out = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
        file.read_into(out.numpy(), 0).result()
        assert out.numpy().tobytes() == pinned.tobytes() == path.read_bytes()
        if file.path_taken.direct:
            assert drive.backend.counts().bytes_direct == 16 * MIB


def test_cupy_arrays(drive: Drive) -> None:
    cupy: Any = pytest.importorskip("cupy")
    path, oracle = filled_file(drive.directory, 3 * MIB)
    file = drive.backend.open(path, writable=False)
    out = cupy.zeros((3, MIB), dtype=cupy.uint8)
    cupy.cuda.Device().synchronize()
    assert file.read_into(out, 0).result() == 3 * MIB
    assert out.get().tobytes() == oracle
