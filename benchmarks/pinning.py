"""How long it takes until host memory is pinned, and how much it takes: our arena against torch's pin_memory.

    python benchmarks/pinning.py [--size 48GiB] [--rounds 3] [--run 64GiB] [--register-threads 1]

Both in turn, in one process. "waste" is what is resident beyond what was asked for (ours: as the kernel
counts it; torch: as its allocator does). `--run` is the most that one cudaHostRegister takes; with
`--register-threads` several run side by side. Without a CUDA device nothing is registered, and torch has
nothing to compare with. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.device.device import Device
from tierstream.io.host_memory import allocate
from tierstream.io.memory import current_rss_bytes
from tierstream.io.sizes import format_bytes
from tierstream.tiered.arena import REGISTER_BYTES_MAX


class Pinned(NamedTuple):
    seconds: dict[str, float]
    resident_bytes: int


def ours(nbytes: int, device: Device, run_bytes: int, threads: int) -> Pinned:
    before, begin = current_rss_bytes(), time.perf_counter()
    memory = allocate(nbytes)
    populated = time.perf_counter()
    register, unregister = device.pinning()
    runs = [
        (memory.ctypes.data + offset, min(run_bytes, nbytes - offset))
        for offset in range(0, nbytes, run_bytes)
    ]
    if register is None or unregister is None:
        return Pinned({"populate": populated - begin}, current_rss_bytes() - before)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(register, *run) for run in runs]:
            done.result()
    end = time.perf_counter()
    taken = current_rss_bytes() - before
    assert torch.from_numpy(memory[-4096:]).is_pinned()
    for address, _ in runs:
        unregister(address)
    seconds = {"populate": populated - begin, "register": end - populated, "total": end - begin}
    return Pinned(seconds, taken)


def torch_pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def torchs(nbytes: int) -> Pinned:
    before, begin = torch_pinned_bytes(), time.perf_counter()
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - begin
    taken = torch_pinned_bytes() - before
    assert memory.is_pinned()
    del memory
    torch._C._host_emptyCache()  # or the next round gets the same memory again, at once
    return Pinned({"total": seconds}, taken)


def plain_touch(nbytes: int) -> Pinned:
    """What the CPU does without us: one thread touches new memory."""
    before, begin = current_rss_bytes(), time.perf_counter()
    memory = np.empty(nbytes, np.uint8)
    memory[::4096] = 0
    return Pinned({"total": time.perf_counter() - begin}, current_rss_bytes() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pinning: our arena against torch's pin_memory.")
    parser.add_argument("--size", type=ByteSize, default=ByteSize("48GiB"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=ByteSize, default=ByteSize(REGISTER_BYTES_MAX))
    parser.add_argument("--register-threads", type=int, default=1)
    args = parser.parse_args()
    device = Device("cuda" if torch.cuda.is_available() else "cpu")
    device.buffer(1)  # the driver starts with the first use
    variants: dict[str, Callable[[], Pinned]] = {
        "ours": lambda: ours(args.size, device, args.run, args.register_threads)
    }
    if device.is_cuda:
        variants["torch pin_memory"] = lambda: torchs(args.size)
    else:
        print("no CUDA device: nothing is registered; compared with one thread that touches new memory")
        variants["one thread"] = lambda: plain_touch(args.size)
    taken: dict[str, list[Pinned]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, run in variants.items():
            taken[name].append(run())
            print(f"{name}: {taken[name][-1].seconds}", flush=True)
    cores = len(os.sched_getaffinity(0))
    print(f"{args.size} asked for, {cores} cores, {args.rounds} rounds in turn, medians")
    report = {}
    for name, all_pinned in taken.items():
        seconds = {
            part: statistics.median(pinned.seconds[part] for pinned in all_pinned)
            for part in all_pinned[0].seconds
        }
        resident_bytes = int(statistics.median(pinned.resident_bytes for pinned in all_pinned))
        waste = resident_bytes / args.size - 1
        shown = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
        print(f"{name}: {shown}; {format_bytes(resident_bytes)} resident, waste {100 * waste:.1f} %")
        report[name] = {"seconds": seconds, "resident_bytes": resident_bytes}
    first, second = (list(part["seconds"].values())[-1] for part in report.values())
    print(f"{' : '.join(report)} = 1 : {second / first:.2f}")
    print(json.dumps({"asked_bytes": int(args.size), "run_bytes": int(args.run), "variants": report}))


if __name__ == "__main__":
    main()
