"""How much host memory loading, initialising and exporting take beside the store, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 32}
CONFIGS = {
    "dense": transformers.LlamaConfig(  # the embedding is the largest unit, 20 MB in bf16; 6 layers of 3 MB
        **SIZES, vocab_size=40_000, hidden_size=256, intermediate_size=1600, num_hidden_layers=6
    ),
    "experts": transformers.MixtralConfig(  # an expert is, 12 MB; there are 8
        **SIZES, vocab_size=2000, hidden_size=256, intermediate_size=8000, num_hidden_layers=2,
        num_local_experts=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_at_most_three_times_the_largest_unit(tmp_path: Path, kind: str) -> None:
    """Through 8 MiB of DRAM, a small part of the state."""
    CONFIGS[kind].save_pretrained(tmp_path / "new")
    # What is freed goes back to the system at once: glibc would keep blocks of these sizes for later.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    child = subprocess.run(
        [sys.executable, "-c", _ALL_OF_IT, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    measured = json.loads(child.stdout)
    unit, dram = measured.pop("largest_unit"), measured.pop("dram")
    assert measured.pop("state") > 8 * dram
    for phase, extra in measured.items():
        in_fp32 = phase in ("export masters", "load masters")  # the unit as the files have it
        of_store = dram if phase in ("init", "load", "load masters") else 0
        assert extra - of_store < 3 * unit * (1 + in_fp32), (phase, measured, unit)


_ALL_OF_IT = """
import json, sys
from pathlib import Path
import torch
from tierstream.engine.export.export import export_model, snapshot_reader
from tierstream.engine.model.initialise import init_weights
from tierstream.engine.model.meta_model import build_meta_model, materialise_buffers
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.source import load_weights, plan_load
from tierstream.engine.weights.state import PlaneWriter
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import build_layout
from tierstream.io.drives import Drive
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import ITEM_BYTES
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store
from tierstream.tiered.zarrdir import ZarrDirectory

root = Path(sys.argv[1])
torch.set_num_threads(2)
backend = PosixBackend(threads=2)
DRAM = 8 << 20

def status(key):
    return 1024 * int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

def measured(phase, work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    result = work()
    found[phase] = status("VmHWM") - before
    return result

def model_of(path):
    model, _ = build_meta_model(ModelConfig(config=str(path)))
    return model, find_units(model)

def store(name, units):
    layout = build_layout(
        units, page_bytes=512 << 10, master="split", grad_dtype="float32", boundary_nbytes=None
    )
    directory = ZarrDirectory.create([Drive(str(root / name), backend)], layout, {})
    made = Store(layout, dram_bytes=DRAM, directory=directory, prefetch_bytes=0, writeback_bytes=1 << 20)
    return made, PlaneWriter(made, layout)

found = {}
model, units = model_of(root / "new")
materialise_buffers(model, None, "cpu")
in_order = units.in_forward_order
found["dram"] = DRAM
found["largest_unit"] = max(unit.numel * ITEM_BYTES[unit.dtype] for unit in in_order)
found["state"] = 12 * units.numel

# One after the other in one process: what a phase keeps, the next one begins with.
first, write = store("a", units)
measured("init", lambda: init_weights(model, in_order, 1, write))
measured("snapshot", lambda: write_snapshot(first, root / "snapshot", {}))
first.close()
read = snapshot_reader(Snapshot.open(root / "snapshot"))
measured("export", lambda: export_model(read, model, in_order, root / "out"))
measured("export masters", lambda: export_model(read, model, in_order, root / "fp32", dtype="float32"))
for phase, name in (("load", "out"), ("load masters", "fp32")):
    plan = plan_load(model, open_checkpoint(root / name))
    second, write = store(name + "-state", units)
    measured(phase, lambda: load_weights(plan, in_order, write))
    second.close()
print(json.dumps(found))
"""
