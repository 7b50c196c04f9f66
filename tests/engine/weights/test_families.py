"""Every family in what the gate (tests/engine/parity) does not compare of loading and export: shards,
and what a clean process makes of an export.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.exports import Loaded
from support.families import FAMILIES, save_family


@dataclass
class Trip:
    """A model directory in several shards, and what we export of it."""

    source: Path
    out: Path


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str) -> Trip:
        root = tmp_path_factory.mktemp(family)
        source, out = root / "source", root / "out"
        save_family(source, family, shard="30KB")
        loaded = Loaded(source, low_bits=False)
        loaded.export(out, source=loaded.plan, buffer_bytes=1000)
        return Trip(source, out)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_tensors_lie_in_the_shards_of_the_source(trip: Any, family: str) -> None:
    made = trip(family)
    assert len(list(made.source.glob("*.safetensors"))) > 1
    assert places(made.out) == places(made.source)


def places(path: Path) -> dict[str, str]:
    """Tensor -> its file, by the index."""
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


CLEAN_PROCESS = """
import hashlib, itertools, json, sys, torch, transformers
made = {}
for path in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    values = {}
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        flat = value.detach().reshape(-1).view(torch.uint8).numpy()
        values[name] = [str(value.dtype), list(value.shape), hashlib.sha256(flat).hexdigest()]
    ids = torch.arange(3, 9)[None]
    tokens = model.generate(ids, do_sample=False, max_new_tokens=5, min_new_tokens=5).tolist()
    made[path] = [values, tokens]
print(json.dumps(made))
"""


def test_a_clean_process_has_the_same_bits_and_tokens_offline(trip: Any, tmp_path: Path) -> None:
    trips = [trip(family) for family in FAMILIES]
    paths = [str(path) for made in trips for path in (made.source, made.out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "no-cache")}
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS, *paths],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    found = json.loads(done.stdout)
    for made in trips:
        assert found[str(made.out)] == found[str(made.source)], made.source.parent.name
