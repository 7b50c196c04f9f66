"""The runs whose figures README's performance table shows: each is one `tierstream bench train` on one GPU.

    python benchmarks/executor.py OUT [RUN ...] [--nvme-dir DIR] [--profile machine.json] [--reports]
        [--commit HASH]

Writes OUT/<run>.json for each, ready to be published: copy it to docs/measurements under a name that begins
with the date and the machine, and run benchmarks/performance_table.py. Without RUN: all, one after the other.
A run that fails is told at the end; the others are done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_FUSED = ("--kernels", "liger", "--deterministic", "false")
#: Kernels that give the same bits every time, and every loss compared with what fits on the device.
_CHECKED = ("--kernels", "liger", "--check", "true")
_FREE = ("--clip-norm", "null", "--check-finite", "false")
_CLIPPED_AND_FREE = ("--clip-norm", "1.0", "null", "--check-finite", "false")
_32K_TOKENS = ("--rows", "32", "--seq-len", "1024", "--grad-dtype", "bfloat16")
_3B, _7B = (("--shape", shape, *_32K_TOKENS) for shape in ("qwen2.5-3b", "qwen2.5-7b"))
_RESIDENT = ("--baseline", "resident")
_SHORT = ("--steps", "2", "--rounds", "3")
_ONE_BY_ONE = ("--steps", "1", "--rounds", "3")
_DEEPSPEED_NVME = ("--baseline", "deepspeed-nvme", "--peer-nvme-dir", "{nvme}", "--turns", "blocks")
_ONCE = ("--steps", "1", "--rounds", "1")
#: Name -> options of `tierstream bench train`; {nvme} is the directory that was given.
RUNS: Mapping[str, Sequence[str]] = {
    # All state in DRAM, layer inputs too, in as little of the GPU as it takes; then with more of it.
    "3b": (*_3B, *_FUSED, *_CLIPPED_AND_FREE, *_RESIDENT, "--placement", "cpu", "both", *_SHORT),
    "3b-gpu-30gib": (*_3B, *_FUSED, *_CLIPPED_AND_FREE, *_RESIDENT, *_SHORT, "--gpu", "30GiB"),
    "3b-checked": (*_3B, *_CHECKED, *_CLIPPED_AND_FREE, *_RESIDENT, *_SHORT),
    "3b-131k-tokens": (
        *_3B, "--rows", "128", "--rows-per-chunk", "16", *_FUSED, *_CLIPPED_AND_FREE, *_RESIDENT,
        *_ONE_BY_ONE,
    ),
    "7b": (
        *_7B, "--rows-per-chunk", "16", *_FUSED, *_FREE, *_RESIDENT,
        *_SHORT, "--dram", "112GiB", "--gpu", "48GiB",
    ),
    "7b-clipped": (
        *_7B, "--rows-per-chunk", "16", *_FUSED, *_RESIDENT, *_SHORT, "--dram", "112GiB", "--gpu", "72GiB",
    ),
    # Peers have the machine for themselves: their memory and ours do not fit at once.
    "3b-deepspeed-cpu": (
        *_3B, *_FUSED, "--gpu", "null", "30GiB", "--baseline", "deepspeed-cpu", "--turns", "blocks", *_SHORT,
    ),
    "3b-fsdp2-offload": (*_3B, *_FUSED, "--baseline", "fsdp2-offload", "--turns", "blocks", *_SHORT),
    # DeepSpeed's steps on the drive take as long with clipping as without. First with as little of the GPU as
    # it takes, then with what a card of 24 GB has.
    "3b-12gib-dram": (
        *_3B, *_FUSED, *_FREE, "--dram", "12GiB", "--nvme-dirs", "{nvme}", *_DEEPSPEED_NVME, *_ONE_BY_ONE,
    ),
    "3b-12gib-dram-24gb-gpu": (
        *_3B, *_CHECKED, *_FREE, "--dram", "12GiB", "--gpu", "12GiB", "--activations", "gpu", "--nvme-dirs",
        "{nvme}", *_DEEPSPEED_NVME, *_ONE_BY_ONE,
    ),
    "3b-6gib-dram": (*_3B, *_CHECKED, "--dram", "6GiB", "--nvme-dirs", "{nvme}", *_ONE_BY_ONE),
    # Losses alone: a step of each kind, beside the same steps with all that fits on the device.
    "3b-131k-tokens-checked": (
        *_3B, "--rows", "128", "--rows-per-chunk", "16", *_CHECKED, *_CLIPPED_AND_FREE, *_ONCE,
    ),
    "3b-gpu-30gib-checked": (*_3B, *_CHECKED, *_CLIPPED_AND_FREE, "--gpu", "30GiB", *_ONCE),
    "7b-checked": (
        *_7B, "--rows-per-chunk", "16", *_CHECKED, *_CLIPPED_AND_FREE, "--dram", "112GiB", "--gpu", "48GiB",
        *_ONCE,
    ),
    # Two layers of 128 experts, 91 GB of state: single experts, and whole layers in the same run.
    "gpt-oss-2-layers": (
        "--shape", "gpt-oss-120b", "--layers", "2", *_32K_TOKENS, "--deterministic", "false",
        "--clip-norm", "null", "--check-finite", "false", "--dram", "112GiB", "--stream", "experts", "layers",
        *_SHORT,
    ),
    "gpt-oss-2-layers-131k-tokens": (
        "--shape", "gpt-oss-120b", "--layers", "2", *_32K_TOKENS, "--rows", "128", "--deterministic", "false",
        "--clip-norm", "null", "--check-finite", "false", "--dram", "112GiB", "--expert-cache", "1GiB",
        *_ONE_BY_ONE,
    ),
    "olmoe-7b": (
        "--shape", "olmoe-7b", *_32K_TOKENS, "--deterministic", "false", "--clip-norm", "null",
        "--check-finite", "false", "--dram", "112GiB", "--stream", "experts", "layers", *_SHORT,
    ),
    # Depth changes neither the GPU's memory nor the speed per layer.
    "depth": (
        "--shape", "qwen2.5-1.5b", "--layers", "28", "56", "112", *_32K_TOKENS, *_FUSED, *_SHORT,
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--nvme-dir", default="/tmp", help="a drive for runs that need one")
    parser.add_argument("--profile", help="machine profile of tierstream bench --profile; default: measured")
    parser.add_argument("--reports", action="store_true", help="a report with traces in OUT/<run> for each")
    parser.add_argument("--commit", help="what is installed; default: that of this checkout")
    args = parser.parse_args(argv)
    if unknown := set(args.runs) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; choose from {', '.join(RUNS)}")
    commit = args.commit or _head()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.runs or RUNS:
        file = args.out / f"{name}.json"
        options = [option.format(nvme=args.nvme_dir) for option in RUNS[name]]
        profile = ["--profile", args.profile] if args.profile else []
        report = ["--trace-steps", "2", "--report", str(args.out / name)] if args.reports else []
        begin = time.monotonic()
        status = subprocess.run(
            ["tierstream", "bench", "train", *options, *profile, *report, "--json", str(file)], check=False
        ).returncode
        print(f"{name}: exit status {status} after {time.monotonic() - begin:.0f} s", flush=True)
        if status:
            failed.append(name)
        if file.exists():
            result = json.loads(file.read_text()) | {"publish": {"commit": commit}}
            file.write_text(json.dumps(result, indent=1))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _head() -> str:
    root = Path(__file__).parents[1]
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
