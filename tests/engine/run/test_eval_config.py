"""What the eval section refuses, in words that help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import make_run

from tierstream.engine.run.eval_config import EvalConfig
from tierstream.io.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"files": []}, r"eval\.files is \[\]"),
        ({"files": ["a", ""]}, r"none empty"),
        ({"files": ["a"], "share": 0.1}, r"eval\.files and eval\.share \(0\.1\) are both given"),
        ({"share": 0.0}, r"eval\.share is 0\.0; it must be between 0 and 1"),
        ({"share": 1.0}, r"eval\.share is 1\.0"),
        ({"every_steps": 5}, r"eval\.every_steps is 5, but there is nothing to evaluate on"),
        ({"files": ["a"], "every_steps": 0}, r"eval\.every_steps is 0; it must be >= 1"),
        ({"files": ["a"], "patience": 2}, r"eval\.patience is 2, and eval\.every_steps is null"),
        ({"files": ["a"], "min_delta": -1.0}, r"eval\.min_delta is -1\.0"),
        ({"files": ["a"], "at_end": False}, r"nothing would be evaluated"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvalConfig(**values)


def test_no_section_is_no_evaluation() -> None:
    assert not EvalConfig().wanted


def test_what_other_sections_ask_of_it(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"keep_best is true, but there is no evaluation"):
        replace(config, checkpoint=replace(config.checkpoint, keep_best=True))
    streaming = replace(config.data, streaming=True)
    with pytest.raises(ConfigError, match=r"eval\.share is 0\.5 and data\.streaming is true"):
        replace(config, data=streaming, eval=EvalConfig(share=0.5))
