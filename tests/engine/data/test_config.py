"""The data section: what is refused before any file is read."""

from __future__ import annotations

from typing import Any

import pytest

from tierstream.engine.data.config import DataConfig
from tierstream.io.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"files": []}, "name at least one"),
        ({"text_field": ""}, "data.text_field is empty; name the field"),
        ({"chat_template": ""}, "data.chat_template is empty; name a file"),
        ({"tokenizer": ""}, "data.tokenizer is empty; name a directory"),
        ({"vocab_size": 257}, "must be at least 258"),
        ({"seq_len": 1}, "must be at least 2 tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(**{"files": ["a.txt"], **keys})
