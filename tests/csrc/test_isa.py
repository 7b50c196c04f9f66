"""All instruction sets give the same bits, and TIERSTREAM_ISA chooses among those that the CPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support

from tierstream import _native

BEST_FIRST = ("avx512", "avx2", "scalar")
HERE = BEST_FIRST[BEST_FIRST.index(_native.cpu_isa()) :]
SCRIPT = Path(next(iter(support.__path__))) / "isa_results.py"

REFUSED_TWICE = """
from tierstream import _native
for _ in range(2):
    try:
        _native.cpu_isa()
    except ValueError as error:
        print(error)
"""


def python(*args: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TIERSTREAM_ISA": isa}
    command = [sys.executable, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def run(isa: str) -> dict[str, Any]:
    done = python(str(SCRIPT), isa=isa)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("isa", HERE[:-1])
def test_vector_code_equals_scalar_code(isa: str) -> None:
    vector, scalar = run(isa), run("scalar")
    assert (vector["isa"], scalar["isa"]) == (isa, "scalar")
    assert vector["results"] == scalar["results"]


def test_empty_variable_leaves_the_choice() -> None:
    done = python("-c", "from tierstream._native import cpu_isa; print(cpu_isa())", isa="")
    assert done.stdout.strip() in BEST_FIRST


@pytest.mark.parametrize("isa", ["avx9", "AVX2", " "])
def test_unknown_name_is_refused_with_what_the_cpu_offers(isa: str) -> None:
    done = python("-c", REFUSED_TWICE, isa=isa)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert f"TIERSTREAM_ISA is '{isa}'" in first
    assert "scalar" in first
