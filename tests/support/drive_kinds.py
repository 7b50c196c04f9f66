"""Backends on the kinds of drives that the tests know, and a small drive of their own."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import FaultySyscalls, refuse_direct_open, refuse_direct_transfer

from tierstream.io import seam
from tierstream.io.backend import Backend, open_backend
from tierstream.io.kvikio_backend import kvikio_problem
from tierstream.io.throttle import Limits, ThrottledBackend

#: Kind -> the name of the path that its files must take.
PATH_OF_KIND = {
    "posix-direct": "posix-direct",
    "posix-open-refused": "posix-buffered",
    "posix-transfer-refused": "posix-buffered",
    "posix-tmpfs": "posix-buffered",
    "kvikio": "kvikio-compat",
    "throttled": "posix-direct",
}
#: Slower than the drives of most machines, so that requests do wait for their time; not by much, as tests do.
THROTTLED = Limits(read=3e9, write=3e9, total=4e9, latency_s=1e-5)
_libc = ctypes.CDLL(None, use_errno=True)
POSIX_KINDS = tuple(kind for kind in PATH_OF_KIND if kind.startswith("posix"))


@dataclass
class Drive:
    """A backend and an empty directory for it. `options` reach the backend when it is opened anew."""

    kind: str
    directory: Path
    backend: Backend

    def reopen(self, **options: Any) -> Backend:
        self.backend.close()
        self.backend = _backend_of_kind(self.kind, **options)
        return self.backend


def _backend_of_kind(kind: str, **options: Any) -> Backend:
    if kind == "throttled":
        return ThrottledBackend(open_backend("posix", **options), THROTTLED)
    return open_backend(kind.partition("-")[0], **options)


@contextmanager
def drive_of_kind(kind: str, **options: Any) -> Iterator[Drive]:
    """A drive of this kind, or a skip that says what the machine lacks."""
    if kind == "kvikio" and kvikio_problem():
        pytest.skip(kvikio_problem())
    with ExitStack() as stack:
        where = "/dev/shm" if kind == "posix-tmpfs" else None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstream-", dir=where)))
        if kind == "posix-open-refused":
            stack.enter_context(seam.injected(FaultySyscalls(refuse_direct_open())))
        if kind == "posix-transfer-refused":
            stack.enter_context(seam.injected(FaultySyscalls(refuse_direct_transfer())))
        drive = Drive(kind, directory, _backend_of_kind(kind, **options))
        stack.callback(lambda: drive.backend.close())
        if PATH_OF_KIND[kind] == "posix-direct" and not drive.backend.transfer_path(directory).direct:
            pytest.skip(f"{directory} does not take direct I/O")
        yield drive


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def small_ext4(directory: Path, nbytes: int, *, options: str = "") -> Iterator[Path]:
    """A drive of its own with `nbytes`, mounted in `directory`; skips where mounting is not permitted."""
    image, point = directory / "drive.img", directory / "drive"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    mount = ["mount", "-o", f"loop,{options}".rstrip(","), str(image), str(point)]
    if not (_runs(["mkfs.ext4", "-q", str(image)]) and _runs(mount)):
        pytest.skip("mounting an ext4 image is not permitted here")
    try:
        yield point
    finally:
        _runs(["umount", str(point)])


def in_page_cache(path: Path) -> bool:
    """Whether the kernel holds the file's first byte in its page cache: the witness of buffered I/O.

    It asks mincore(2), which reads nothing; a read with RWF_NOWAIT may begin to read ahead.
    """
    held = ctypes.c_ubyte()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as mapped:
        address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
        if _libc.mincore(address, ctypes.c_size_t(1), ctypes.byref(held)) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return bool(held.value & 1)


def open_descriptors() -> list[str]:
    """What the descriptors of this process point to."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(targets)
