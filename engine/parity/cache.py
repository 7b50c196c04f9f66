"""Verdicts that were given already: one file each, under the name of all that they depend on."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tierstream.engine.parity.verdict import Verdict
from tierstream.io import durable
from tierstream.io.errors import StorageError


def cache_directory() -> Path:
    """Of this user: $XDG_CACHE_HOME/tierstream/models, by itself in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tierstream" / "models"


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
    known = {
        "config": flags,
        "attention": twin.config._attn_implementation,
        "code": [_hash(Path(inspect.getfile(type(of))).parent.glob("*.py")) for of in (twin, twin.config)],
        "engine": _hash(Path(__file__).parents[1].rglob("*.py")),
        "versions": [version("tierstream"), transformers.__version__, torch.__version__],
        "device": device.partition(":")[0],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _hash(files: Iterable[Path]) -> str:
    contents = (hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))
    return hashlib.sha256(b"".join(contents)).hexdigest()


def find(key: str) -> Verdict | None:
    """None: not known yet, or not readable."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Verdict.from_plain(json.loads((cache_directory() / f"{key}.json").read_text()))
    return None


def keep(key: str, verdict: Verdict) -> None:
    """Where that cannot be written, the next run compares again."""
    with suppress(StorageError):
        durable.make_directories(cache_directory())
        durable.write_file(cache_directory() / f"{key}.json", json.dumps(verdict.to_plain()).encode())
