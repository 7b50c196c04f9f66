"""The committed table of families, and that a few of its rows are what the gate says now."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.families import FAMILIES, family_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    path = ROOT / "benchmarks" / "families_table.py"
    spec = importlib.util.spec_from_file_location("families_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> dict[str, list[str]]:
    """Family -> the cells after it."""
    lines = (ROOT / "docs" / "families.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {name: rest for name, *rest in cells[2:]}


def test_most_decoders_bind_and_those_of_the_tests_are_green() -> None:
    found = rows()
    assert sum(cells[0] == "yes" for cells in found.values()) >= 60
    of_tests = {family_config(family).model_type for family in FAMILIES}
    for name in (*of_tests, "llama, tied", "gemma4_text, experts"):
        binds, loss, gradients, packs, load, export, _ = found[name]
        assert {binds, loss, gradients.partition(";")[0], load, export} == {"yes"}, name
        assert (packs == "yes") == (name != "qwen3_next")
    assert [name for name, cells in found.items() if "no" in cells[:6] and not cells[6]] == []


@pytest.mark.parametrize("name", ["bart", "gpt2", "mamba", "gemma3"])
def test_rows_are_what_the_gate_says(script: Any, name: str) -> None:
    if f"transformers {version('transformers')}," not in (ROOT / "docs" / "families.md").read_text():
        pytest.skip("the table is of another version of transformers")
    made = script.table_row(name, script.verdict_of(name, script.configurations()[name]))
    assert [cell.strip() for cell in made.split("|")[2:-1]] == rows()[name]
