"""Files of records, one JSON object a line: appended while a run goes on, cut where it resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from tierstream.io.errors import ConfigError, storage_errors


class Record:
    """A dataclass that is a line of such a file. `step`: after which step it was made, from 1."""

    __slots__ = ()
    step: int

    def to_json(self) -> str:
        """One line. Not-a-number stays visible as the token `NaN` (`Infinity`, `-Infinity`).

        Python's json reads these tokens; a strict JSON reader refuses the line, which is better than a loss
        of null or 0 that nobody notices.
        """
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises ValueError or TypeError if `line` is no such record."""
        return cls(**json.loads(line))


class RecordWriter:
    """Appends lines; each is handed to the kernel at once, so it survives the process.

    A resumed run repeats the steps after its checkpoint: their old lines are cut off first. Lines are in the
    order of steps, so one `truncate` does it, and a crash at any instant leaves a file that the next resume
    cuts at the same place. No record is ever in the file twice.

    Args:
        path: created if missing.
        kind: of its records.
        last_step: the step of the checkpoint that the run resumes from; 0: a new run.

    Raises:
        ConfigError: the file holds something else than such lines.
        StorageError: it cannot be read or written.
    """

    def __init__(self, path: Path, kind: type[Record], *, last_step: int) -> None:
        self._path = path
        with storage_errors("opening", path):
            end = _end_of_step(path, kind, last_step) if path.exists() else 0
            self._file = path.open(
                "ab", buffering=0
            )  # so that a failed write leaves nothing for `close` to try again
            self._file.truncate(end)

    def write(self, record: Record) -> None:
        """Append one line. Raises StorageError."""
        rest = record.to_json().encode() + b"\n"
        with storage_errors("writing", self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def each_record(path: Path, kind: type[Any]) -> Iterator[Any]:
    """All complete lines; a last line without its end is the mark of a killed process.

    Raises:
        ConfigError: a line that is no such record.
        OSError: the file cannot be read.
    """
    return (record for record, _ in _records(path, kind))


def _end_of_step(path: Path, kind: type[Record], last_step: int) -> int:
    """Offset behind the lines of `last_step`, or of the last step before it."""
    return max((end for record, end in _records(path, kind) if record.step <= last_step), default=0)


def _records(path: Path, kind: type[Record]) -> Iterator[tuple[Record, int]]:
    """(record, offset behind its line)"""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = kind.from_json(line.decode())
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"{path}:{number}: is not the record of a step; move the file away"
                ) from error
            yield record, end
