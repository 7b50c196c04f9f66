"""What the demo makes of what it saw: checks decide its exit status, timings are shown."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its module; whatever it removes and makes lies in a folder of the test."""
    path = Path(__file__).parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path / "demo")
    monkeypatch.setattr(module, "show_sample", lambda: None)
    return module


def steps(seconds: float) -> list[dict[str, Any]]:
    return [{"step_s": seconds} for _ in range(3)]


@pytest.mark.parametrize(
    ("tiered_s", "said"), [(1.2, "1.200 / 1.000 s = 1.20"), (2.03, "2.030 / 1.000 s = 2.03")]
)
@pytest.mark.parametrize("good", [True, False])
def test_checks_decide_and_timings_are_shown(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiered_s: float,
    said: str,
    good: bool,
) -> None:
    monkeypatch.setattr(demo, "run_everything", lambda: (steps(tiered_s), steps(1.0), []))
    monkeypatch.setattr(demo, "checks", lambda *_: [("bits", "all", True), ("memory", "much", good)])
    assert demo.main() == (0 if good else 1)
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert "<= 1.25" in out
    assert ("NOT MET" in out) == (not good)
    assert ("above" in out) == (tiered_s > 1.25)
