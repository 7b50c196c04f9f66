"""Writes snapshot after snapshot until it is killed: `python snapshot_writer.py <directory> <first step>`.

Each is named `step-<n>`; its planes and its state are functions of the step, which is printed after each.
While one is written the planes already change to those of the next.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

from tierstream.tiered.layout import Layout, PlaneSpec
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_capture
from tierstream.tiered.store import Store

PAGE_BYTES = 16 << 10
LAYOUT = Layout(
    PAGE_BYTES,
    {
        (unit, plane): PlaneSpec(unit, plane, dtype, 50_000, durable=True)
        for unit in ("layers.0", "layers.1")
        for plane, dtype in (("weight", "bfloat16"), ("exp_avg", "float32"))
    },
)


def values(key: tuple[str, str], step: int) -> np.ndarray:
    """Bits of a plane at a step."""
    spec = LAYOUT.spec(*key)
    seed = [step, *map(ord, key[0] + key[1])]
    dtype = np.dtype("uint16" if spec.dtype == "bfloat16" else spec.dtype)
    return np.frombuffer(np.random.default_rng(seed).bytes(spec.nbytes), dtype=dtype)


def check(path: Path, step: int) -> None:
    """The snapshot at `path` is that of `step`, whole and undamaged."""
    snapshot = Snapshot.open(path)
    snapshot.verify()
    assert snapshot.state == {"step": step}
    for key in LAYOUT.planes:
        expected = values(key, step)
        out = np.empty_like(expected)
        snapshot.read_range(*key, 0, out)
        assert out.tobytes() == expected.tobytes()


def make_store() -> Store:
    return Store(
        LAYOUT, dram_bytes=2 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0,
        copy_bytes=4 * PAGE_BYTES,
    )  # fmt: skip


def set_values(store: Store, step: int) -> None:
    for key in LAYOUT.planes:
        store.write_range(*key, 0, values(key, step))


def write(directory: Path, first: int) -> None:
    with make_store() as store, ThreadPoolExecutor(1) as pool:
        set_values(store, first)
        print("ready", flush=True)
        for step in count(first):
            with store.capture() as capture:
                written = pool.submit(write_capture, capture, directory / f"step-{step}", {"step": step})
                set_values(store, step + 1)
                written.result()
            print(step, flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
