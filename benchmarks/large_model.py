"""A billion-parameter model on one GPU, its state mostly on disk: equality with the resident run, memory
against depth, time / bound.

    python benchmarks/large_model.py --drive /mnt/nvme --out results/ [--part equality|depth] [--steps 20]
    [--dram 8GiB]

The model is Qwen2.5-1.5B's shape with random weights, the text Python's own standard library. `equality`
trains it tiered and resident with the same seed and compares every loss and gradient norm, bit for bit;
`depth` runs the shape and one twice as deep for three steps and compares the peak of GPU memory. Every run is
a `tierstream train` process of its own. Results are printed and written to <out>/large_model_<part>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536,
    "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
WARM_UP_STEPS = 3


def train(out: Path, name: str, layers: int, options: list[str]) -> dict:
    """One run; what its files and its plan say."""
    run_dir, model = out / name, out / f"{name}-model"
    shutil.rmtree(run_dir, ignore_errors=True)
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    run_file = out / f"{name}.yaml"
    sources = str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
    run_file.write_text(
        json.dumps({"run_dir": str(run_dir), "model": {"config": str(model)}, "data": {"files": [sources]}})
    )
    command = ["tierstream", "train", str(run_file), "--checkpoint.at-end", "false", *options]
    begin = time.time()
    entry = [sys.executable, "-c", "import sys; from tierstream.tools.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*entry, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(f"$ {' '.join(command)}\n{done.stdout}", flush=True)
    if done.returncode:
        raise SystemExit(f"{name} failed with status {done.returncode}")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    settled = steps[WARM_UP_STEPS:] or steps
    return {
        "command": " ".join(command),
        "wall_s": time.time() - begin,
        "losses": [m["loss"] for m in steps],
        "grad_norms": [m["grad_norm"] for m in steps],
        "step_s_median": statistics.median(m["step_s"] for m in settled),
        "nvme_read_bytes_median": statistics.median(m["bytes_read"]["nvme"] for m in settled),
        "nvme_written_bytes_median": statistics.median(m["bytes_written"]["nvme"] for m in settled),
        "stall_s_last": steps[-1]["stall_s"],
        "gpu_peak_bytes": steps[-1]["gpu_peak_bytes"],
        "host_peak_bytes": steps[-1]["host_peak_bytes"],
        "result": json.loads((run_dir / "result.json").read_text()),
    }


def machine() -> dict:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit or "not a git checkout",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drive", required=True, help="directory on the drive that holds the state")
    parser.add_argument("--out", required=True, type=Path, help="directory for runs and results")
    parser.add_argument("--part", choices=["equality", "depth"], default="equality")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="rows of 1024 tokens per step")
    parser.add_argument("--dram", default="8GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    common = [
        "--train.device", given.device, "--train.rows-per-step", str(given.rows),
        "--train.loss-chunk-tokens", "1024", "--optimizer.lr", "1e-4", "--optimizer.warmup-steps", "5",
    ]  # fmt: skip
    tiered = ["--tiers.dram", given.dram, "--tiers.nvme-dirs", given.drive]
    resident = ["--tiers.gpu", "100GiB", "--tiers.activations", "gpu"]
    results: dict = {"machine": machine(), "part": given.part}
    if given.part == "equality":
        steps = ["--train.steps", str(given.steps)]
        results["tiered"] = train(given.out, "tiered", given.layers, [*common, *steps, *tiered])
        results["resident"] = train(given.out, "resident", given.layers, [*common, *steps, *resident])
        a, b = results["tiered"], results["resident"]
        results["equal_to_the_bit"] = a["losses"] == b["losses"] and a["grad_norms"] == b["grad_norms"]
    else:
        for name, layers in (("shallow", given.layers), ("deep", 2 * given.layers)):
            results[name] = train(given.out, name, layers, [*common, "--train.steps", "3", *tiered])
        results["gpu_peak_ratio"] = results["deep"]["gpu_peak_bytes"] / results["shallow"]["gpu_peak_bytes"]
    target = given.out / f"large_model_{given.part}.json"
    target.write_text(json.dumps(results, indent=1))
    print(
        json.dumps({k: v for k, v in results.items() if k not in ("tiered", "resident", "shallow", "deep")})
    )
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
