"""The whole job in a few minutes on a CPU: train with the state on NVMe, train again resident, compare every
bit, export, generate.

    make demo            (or: python examples/demo.py, from the repository root)

Everything is done by the `tierstream` command in processes of its own; this script only starts it, reads what
it wrote, and compares.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tierstream.tiered.snapshot import Snapshot

ROOT = Path("runs/demo")
RUN_FILE = Path(__file__).with_name("demo.yaml")
TIERSTREAM = Path(sys.executable).with_name("tierstream")
#: What the demo must show.
LEAST_FALL_NATS = 2.5
MOST_TIERED_OVER_RESIDENT = 1.25

SAMPLE = """
import sys, torch, transformers
transformers.logging.set_verbosity_error()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = tokenizer("def __init__(self", return_tensors="pt").input_ids
torch.manual_seed(0)
out = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0)
print(tokenizer.decode(out[0]))
"""

MIB = 1 << 20
console = Console()


def tierstream(*arguments: str) -> None:
    console.print(f"\n[bold]$ tierstream {' '.join(arguments)}[/bold]", soft_wrap=True)
    subprocess.run([TIERSTREAM, *arguments], check=True)


def train(name: str, *overrides: str) -> list[dict]:
    """Run `tierstream train` into runs/demo/<name>; the records of its steps."""
    sources = str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
    tierstream("train", str(RUN_FILE), "--run-dir", str(ROOT / name), "--data.files", sources, *overrides)
    return [json.loads(line) for line in (ROOT / name / "metrics.jsonl").read_text().splitlines()]


def different_planes(one: Path, other: Path) -> list[str]:
    """Durable planes of two checkpoints that differ in any bit."""
    a, b = Snapshot.open(one), Snapshot.open(other)
    different = [f"{unit}/{plane}" for unit, plane in a.planes.keys() ^ b.planes.keys()]
    for (unit, plane), spec in a.planes.items():
        left, right = (
            np.empty(spec.nbytes, np.uint8).view({2: np.uint16, 4: np.float32}[spec.item_bytes]) for _ in "ab"
        )
        a.read_range(unit, plane, 0, left)
        b.read_range(unit, plane, 0, right)
        if left.tobytes() != right.tobytes():
            different.append(f"{unit}/{plane}")
    return different


def newest_checkpoint(name: str) -> Path:
    return max((ROOT / name / "checkpoints").iterdir())


def main() -> int:
    shutil.rmtree(ROOT, ignore_errors=True)
    (ROOT / "drive").mkdir(parents=True)
    resident_tiers = [
        "--tiers.dram",
        "null",
        "--tiers.nvme-dirs",
        "null",
        "--tiers.gpu",
        "8GiB",
        "--tiers.activations",
        "gpu",
    ]
    tiered = train("tiered")
    resident = train("resident", *resident_tiers)
    one_layer = ROOT / "one-layer-model"
    shutil.copytree(Path(__file__).with_name("demo-model"), one_layer)
    config = json.loads((one_layer / "config.json").read_text())
    (one_layer / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    fixed = train("one-layer", *resident_tiers, "--model.config", str(one_layer), "--train.steps", "5")

    exported = ROOT / "exported"
    tierstream("export", str(ROOT / "tiered"), str(exported))
    console.print("\n[bold]a sample of the exported model, from a clean process[/bold]")
    sample = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(exported)], check=True, capture_output=True, text=True
    )
    console.print(sample.stdout, markup=False)

    plan = json.loads((ROOT / "tiered" / "result.json").read_text())
    vocabulary = config["vocab_size"]
    budget = 64 << 20
    peak, base = tiered[-1]["host_peak_bytes"], fixed[-1]["host_peak_bytes"]
    state = sum(spec.nbytes for spec in Snapshot.open(newest_checkpoint("tiered")).planes.values())
    differing = different_planes(newest_checkpoint("tiered"), newest_checkpoint("resident"))
    same = [
        (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
        for a, b in zip(tiered, resident, strict=True)
    ]
    step_s = {
        name: statistics.median(m["step_s"] for m in run)
        for name, run in (("tiered", tiered), ("resident", resident))
    }
    ratio = step_s["tiered"] / step_s["resident"]
    nvme_bytes = plan["tiers"]["nvme"]["bytes_read"] + plan["tiers"]["nvme"]["bytes_written"]
    last = statistics.mean(m["loss"] for m in tiered[-10:])
    fall = math.log(vocabulary) - last

    checks = [
        (
            "loss, from ln(vocabulary) to the mean of the last 10 steps",
            f"{math.log(vocabulary):.2f} -> {last:.2f} nats (falls by {fall:.2f})",
            fall >= LEAST_FALL_NATS,
        ),
        (
            "state on NVMe > state in DRAM",
            f"{state / MIB:.0f} MiB, DRAM budget {budget / MIB:.0f} MiB",
            state > 2 * budget,
        ),
        (
            "bytes moved to and from NVMe",
            f"{nvme_bytes / 1e9:.1f} GB",
            nvme_bytes > state * len(tiered),
        ),
        (
            "peak resident memory <= budget + 10 % + a 1-layer resident run",
            f"{peak / MIB:.0f} <= {(1.1 * budget + base) / MIB:.0f} MiB",
            peak <= 1.1 * budget + base,
        ),
        (
            "steps whose loss and grad norm equal the resident run's, to the bit",
            f"{sum(same)} of {len(same)}",
            all(same),
        ),
        ("final planes that differ from the resident run's", f"{len(differing)}", not differing),
        (
            "step time, tiered / resident (medians)",
            f"{step_s['tiered']:.3f} s / {step_s['resident']:.3f} s = {ratio:.2f}",
            ratio <= MOST_TIERED_OVER_RESIDENT,
        ),
    ]
    table = Table(title="what the demo showed", width=100)
    for column in ("check", "seen", ""):
        table.add_column(column, overflow="fold")
    for text, seen, good in checks:
        table.add_row(text, seen, "[green]ok[/green]" if good else "[red]NOT MET[/red]")
    console.print(table)
    return 0 if all(good for *_, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
