"""Verdicts that were given already: one file each, under the name of all that they depend on."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tierstream.engine import user_cache
from tierstream.engine.parity.verdict import Verdict

_KIND = "models"


def fingerprint(twin: Any, device: str) -> str:
    """Of an architecture, sizes apart: the twin's configuration, the code of its classes and ours, versions,
    the kind of device.

    Args:
        twin: the meta model.
    """
    import torch
    import transformers

    flags = json.loads(twin.config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", "dtype"):
        flags.pop(key, None)
    places = (Path(inspect.getfile(type(of))).parent for of in (twin, twin.config))
    known = {
        "config": flags,
        "attention": twin.config._attn_implementation,
        "code": [user_cache.digest_of_files(place.glob("*.py")) for place in places],
        "engine": user_cache.digest_of_engine(),
        "versions": [version("tierstream"), transformers.__version__, torch.__version__],
        "device": device.partition(":")[0],
    }
    return user_cache.digest_of(known)


def find(key: str) -> Verdict | None:
    """None: not known yet, or not readable."""
    with suppress(KeyError, TypeError):
        return Verdict.from_plain(user_cache.find(_KIND, key))
    return None


def keep(key: str, verdict: Verdict) -> None:
    """Where that cannot be written, the next run compares again."""
    user_cache.keep(_KIND, key, verdict.to_plain())
