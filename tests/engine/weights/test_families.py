"""Every family, exact in and exact out: what loads is what `from_pretrained` loads, to the bit, and what is
exported is what `save_pretrained` writes.
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
import torch
import transformers
from support.exports import Loaded, stored
from support.families import FAMILIES, save_family
from support.models import different

BOTH = ["bfloat16", "float32"]


@dataclass
class Trip:
    """A model directory in several shards, what transformers and we load from it, and what we export."""

    source: Path
    out: Path
    reference: Any
    loaded: Loaded


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, dtype: str) -> Trip:
        root = tmp_path_factory.mktemp(f"{family}-{dtype}")
        source, out = root / "source", root / "out"
        save_family(source, family, getattr(torch, dtype), shard="30KB")
        reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        loaded = Loaded(source, dtype, low_bits=False)
        loaded.export(out, source=loaded.plan, buffer_bytes=1000)
        return Trip(source, out, reference, loaded)

    return make


def wrong(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in type, shape or a bit."""
    types = [name for name in got.keys() & expected.keys() if got[name].dtype != expected[name].dtype]
    return different(got, expected) + types


def buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_load_equals_from_pretrained(trip: Any, family: str, dtype: str) -> None:
    made = trip(family, dtype)
    assert len(list(made.source.glob("*.safetensors"))) > 1
    model, reference = made.loaded.model, made.reference
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert types == {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert different(made.loaded.flat.tensors(), dict(reference.named_parameters())) == []
    assert wrong(buffers(model), buffers(reference)) == []


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_that_of_save_pretrained(trip: Any, family: str, dtype: str, tmp_path: Path) -> None:
    """Files, names, shapes, types and bits; transformers computes the same logits from it."""
    made = trip(family, dtype)
    made.reference.save_pretrained(tmp_path / "theirs")
    assert wrong(stored(made.out), stored(tmp_path / "theirs")) == []
    assert places(made.out) == places(made.source)
    back = transformers.AutoModelForCausalLM.from_pretrained(made.out, dtype=getattr(torch, dtype))
    assert wrong(dict(back.named_parameters()), dict(made.reference.named_parameters())) == []
    assert wrong(buffers(back), buffers(made.reference)) == []
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = made.reference.eval()(ids).logits
        assert logits.std() > 0.1
        assert torch.equal(back.eval()(ids).logits, logits)


def places(path: Path) -> dict[str, str]:
    """Tensor -> its file, by the index."""
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


CLEAN_PROCESS = """
import json, sys, torch, transformers
made = {}
for path in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.arange(3, 9)[None]
    made[path] = model.generate(ids, do_sample=False, max_new_tokens=5, min_new_tokens=5).tolist()
print(json.dumps(made))
"""


def test_a_clean_process_generates_the_same_tokens_offline(trip: Any, tmp_path: Path) -> None:
    trips = [trip(family, "bfloat16") for family in FAMILIES]
    paths = [str(path) for made in trips for path in (made.source, made.out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "no-cache")}
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS, *paths],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    tokens = json.loads(done.stdout)
    for made in trips:
        assert tokens[str(made.out)] == tokens[str(made.source)], made.source.parent.name
