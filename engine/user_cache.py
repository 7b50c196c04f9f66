"""What was found once and holds until something that it depends on changes: JSON files in the user's cache,
each under a name for all that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tierstream.io import durable
from tierstream.io.errors import StorageError


def digest_of(known: Any) -> str:
    """A name for what JSON can hold; of what it cannot, for its text."""
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """A name for their contents. Raises OSError."""
    contents = (hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))
    return hashlib.sha256(b"".join(contents)).hexdigest()


def digest_of_engine() -> str:
    """A name for our own code."""
    return digest_of_files(Path(__file__).parent.rglob("*.py"))


def find(kind: str, key: str) -> Any:
    """None: not known yet, or not readable."""
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_text())
    return None


def keep(kind: str, key: str, found: Any) -> None:
    """Where that cannot be written, it is found anew next time."""
    file = _file(kind, key)
    with suppress(StorageError):
        durable.make_directories(file.parent)
        durable.write_file(file, json.dumps(found).encode())


def _file(kind: str, key: str) -> Path:
    """In $XDG_CACHE_HOME/tierstream, by itself in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tierstream" / kind / f"{key}.json"
