"""A run that has come to its end is left as it is by a further resume."""

from __future__ import annotations

from pathlib import Path

from support.runs import make_run, records, train


def test_a_resume_with_nothing_left_keeps_the_result(tmp_path: Path) -> None:
    config = make_run(tmp_path, steps=2)
    train(config)
    result = Path(config.run_dir) / "result.json"
    before, steps = result.read_text(), records(config)
    config.checkpoint.resume = "auto"
    train(config)
    assert result.read_text() == before
    assert records(config) == steps
