"""How much memory a snapshot takes, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """96 MiB of state through 4 MiB of DRAM, written and restored: the process grows by far less."""
    child = subprocess.run(
        [sys.executable, "-c", _BIG_SNAPSHOT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(child.stdout) < 40 << 10


_BIG_SNAPSHOT = """
import resource, sys
from pathlib import Path
import numpy as np
from tierstream.io.drives import Drive
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Layout, PlaneSpec
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store
from tierstream.tiered.zarrdir import ZarrDirectory

root = Path(sys.argv[1])
backend = PosixBackend(threads=2)

def store(name, page_bytes):
    planes = {(f"u{i}", "w"): PlaneSpec(f"u{i}", "w", "float32", 3 << 20, True) for i in range(8)}
    layout = Layout(page_bytes, planes)
    directory = ZarrDirectory.create([Drive(str(root / name), backend)], layout, {})
    return Store(layout, dram_bytes=4 << 20, directory=directory, prefetch_bytes=0, writeback_bytes=1 << 20)

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

with store("a", 512 << 10) as one:
    part = np.ones(1 << 18, np.float32)
    for unit, plane in one.layout.planes:
        for start in range(0, 3 << 20, len(part)):
            one.write_range(unit, plane, start, part)
    before = peak_kib()
    write_snapshot(one, root / "snapshot", {})
with store("b", 768 << 10) as two:
    snapshot = Snapshot.open(root / "snapshot")
    snapshot.restore(two)
    snapshot.verify()
    out = np.empty(100, np.float32)
    two.read_range("u7", "w", (3 << 20) - 100, out)
    assert (out == 1).all()
print(peak_kib() - before)
"""
