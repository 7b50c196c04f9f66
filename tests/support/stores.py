"""Small layouts, a directory in memory, and contents by which a page is known."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstream.io.backend import Backend
from tierstream.io.drives import Drive
from tierstream.tiered.layout import Layout, Page, PlaneSpec, TensorSpec

PAGE_BYTES = 4096

Frame = NDArray[np.uint8]


def layout_of(*planes: tuple[str, str, str, int, bool], page_bytes: int = PAGE_BYTES) -> Layout:
    """A layout of `(unit, plane, dtype, numel, durable)`; each plane holds one tensor."""
    specs = [
        PlaneSpec(unit, plane, dtype, numel, durable, (TensorSpec(f"{unit}.{plane}", (numel,), 0, 0),))
        for unit, plane, dtype, numel, durable in planes
    ]
    return Layout(page_bytes, {(spec.unit, spec.plane): spec for spec in specs})


def mixed_layout(units: int = 3, page_bytes: int = PAGE_BYTES) -> Layout:
    """Every dtype, planes of whole pages, planes with a padded last page, and planes smaller than a page."""
    planes: list[tuple[str, str, str, int, bool]] = []
    for index in range(units):
        unit = f"layers.{index}"
        planes += [
            (unit, "weight", "bfloat16", 6144 + 700, True),
            (unit, "master_low", "uint16", 6144 + 700, True),
            (unit, "exp_avg", "float32", 4096, True),
            (unit, "norm", "float32", 37, True),
            (unit, "grad", "bfloat16", 6144 + 700, False),
            (unit, "activation", "uint8", 5001, False),
        ]
    return layout_of(*planes, page_bytes=page_bytes)


def uniform_layout(pages: int, *, durable: bool = True) -> Layout:
    """One plane of so many whole pages."""
    return layout_of(("unit", "weight", "uint8", pages * PAGE_BYTES, durable))


def all_pages(layout: Layout, *, durable: bool | None = None) -> list[Page]:
    return [
        page
        for key, spec in layout.planes.items()
        if durable is None or spec.durable == durable
        for page in layout.pages(*key)
    ]


def drives_in(roots: Iterable[Path], backend: Backend) -> list[Drive]:
    """Drives of one weight with one backend."""
    return [Drive(str(root), backend) for root in roots]


def content_bytes(layout: Layout, page: Page) -> int:
    """Bytes of a page without its padding."""
    start, end = layout.page_span(page)
    return (end - start) * layout.spec(page.unit, page.plane).item_bytes


def pattern(layout: Layout, page: Page, version: int) -> bytes:
    """Content that no other page and no other version has."""
    seed = hash((page.index, version, sum(map(ord, page.unit + "/" + page.plane)))) & 0xFFFFFFFF
    return np.random.default_rng(seed).bytes(content_bytes(layout, page))


class MemoryDirectory:
    """A `Directory` in memory, with threads like a real one's. `written` and `read` list the pages in order.

    Args:
        hold: transfers wait while this event is not set.
    """

    def __init__(self, *, threads: int = 2, hold: threading.Event | None = None) -> None:
        self.files: dict[Page, bytes] = {}
        self.read_pages: list[Page] = []
        self.written_pages: list[Page] = []
        self.hold = hold
        self.closed = False
        self._pool = ThreadPoolExecutor(threads)

    def read(self, page: Page, frame: Frame) -> Future[int]:
        self.read_pages.append(page)
        return self._pool.submit(self._read, page, frame)

    def write(self, page: Page, frame: Frame) -> Future[int]:
        self.written_pages.append(page)
        return self._pool.submit(self._write, page, frame)

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown()

    def _read(self, page: Page, frame: Frame) -> int:
        self._wait()
        frame[:] = np.frombuffer(self.files[page], dtype=np.uint8)
        return len(frame)

    def _write(self, page: Page, frame: Frame) -> int:
        self._wait()
        self.files[page] = frame.tobytes()
        return len(frame)

    def _wait(self) -> None:
        if self.hold is not None:
            self.hold.wait()
