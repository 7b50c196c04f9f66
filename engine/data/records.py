"""The records of a job, one after another in bounded memory: JSON lines, JSON, CSV, TSV, Parquet, Arrow."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstream.engine.data.files import Job, read_text
from tierstream.io.errors import DataError

#: A line or a field of more bytes is a fault of the file (a quotation mark that nothing closes).
LINE_BYTES_MAX = 1 << 30
#: A JSON token other than a string that is cut by the end of a text begins at most so far before it.
_TOKEN_CHARS = 16
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|NaN|-?Infinity', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `line`: where it begins in the file, from 1; in parquet and arrow its row."""

    value: dict[str, Any]
    path: str
    line: int


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used. `column`: in characters, from 1; 0 where there is none to name."""

    path: str
    line: int
    column: int
    reason: str

    def __str__(self) -> str:
        column = f":{self.column}" if self.column else ""
        return f"{self.path}:{self.line}{column}: {self.reason}"

    def error(self) -> DataError:
        return DataError(f"{self}; correct the record, or leave such ones out with data.bad_lines: skip")


OnBad = Callable[[BadRecord], None]


def read_records(job: Job, on_bad: OnBad | None = None) -> Iterator[Record]:
    """The records of a job in their order.

    Args:
        on_bad: is told of each record that cannot be read, which is then left out; None: it is an error.

    Raises:
        DataError: a record that cannot be read, with file, line and column; a file that cannot be read, or
            that is damaged so that what follows cannot be found.
    """
    numbered = _READERS[job.kind](job, on_bad or _refuse)
    for line, value in numbered:
        if isinstance(value, dict):
            yield Record(value, job.path, line)
        else:
            named = f"{_JSON_NAMES.get(type(value), 'a value')} where an object {{...}} is expected"
            (on_bad or _refuse)(BadRecord(job.path, line, 1, named))


_JSON_NAMES: dict[type, str] = {list: "an array", str: "a string", int: "a number", float: "a number"}


def _refuse(bad: BadRecord) -> None:
    raise bad.error()


class _Fault(ValueError):
    """A JSON text that the decoder of the standard library lets pass. Where it is shows `_fault_at`."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Fault("the same key twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise _Fault(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def parse_json(text: str) -> Any:
    """A strict `json.loads`. Raises ValueError: no JSON, a key twice, NaN or Infinity."""
    value = _DECODER.decode(text)
    _check_characters(value, text, 0, len(text))
    return value


def _fault_at(text: str, begin: int) -> int:
    """Where the value that begins at `begin` has a key twice, NaN or Infinity."""
    keys: list[set[str] | None] = []  # of each open object; None: an array
    before = ""
    for token in _TOKEN.finditer(text, begin):
        word = token[0]
        if word[0] in "NI-":
            return token.start()
        if word[0] == '"' and before in ("{", ",") and keys and (open_keys := keys[-1]) is not None:
            key = json.loads(word)
            if key in open_keys:
                return token.start()
            open_keys.add(key)
        elif word in "{[":
            keys.append(set() if word == "{" else None)
        elif word in "}]" and keys:
            keys.pop()
        before = word
    return begin


def _check_characters(value: Any, text: str, begin: int, end: int) -> None:
    """Raises _Fault: half of a surrogate pair. Python holds it, but it is no character and has no UTF-8."""
    if _SURROGATE.search(text, begin, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise _Fault(f"the lone surrogate \\u{half:04x} is no character") from error


def _json_lines(job: Job, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
    """Lines end at the byte \\n and nowhere else."""
    try:
        with open(job.path, "rb") as handle:
            line = job.line
            if job.start:
                handle.seek(job.start - 1)
                skipped = handle.readline()
                line += len(skipped) > 1  # its own end is not yet counted
            while handle.tell() < job.stop and (data := handle.readline(LINE_BYTES_MAX)):
                line += 1
                if len(data) == LINE_BYTES_MAX:
                    raise DataError(f"{job.path}:{line}: a line of more than {LINE_BYTES_MAX >> 30} GiB")
                if line == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                if data.strip(b" \t\r\n"):
                    yield from _json_line(data, BadRecord(job.path, line, 0, ""), on_bad)
    except OSError as error:
        raise DataError(f"{job.path} cannot be read: {error.strerror}") from error


def _json_line(data: bytes, here: BadRecord, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
    def bad(column: int, reason: str) -> None:
        on_bad(BadRecord(here.path, here.line, column, reason))

    try:
        text = data.decode().rstrip("\r\n")
        value = _DECODER.decode(text)
        _check_characters(value, text, 0, len(text))
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode()) + 1
        bad(column, f"byte 0x{data[error.start]:02x} is no UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        bad(error.pos + 1, f"this is no JSON: {error.msg}")
    except _Fault as error:
        bad(_fault_at(text, 0) + 1 if "surrogate" not in str(error) else 0, str(error))
    except RecursionError:
        bad(0, "too many brackets within brackets")
    except ValueError as error:  # a number of thousands of digits
        bad(0, str(error))
    else:
        yield here.line, value


class _JsonText:
    """The text of a JSON file, of which only a part is held. `line`: of what comes next, from 1."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 1
        self._pieces = read_text(Path(path))
        self._held, self._at = "", 0
        self._line_begin = 0  # position in `_held` where the line of `_at` begins
        self._ended = False

    def peek(self) -> str:
        """The next character that is no white space; empty: there is none."""
        while True:
            self._advance(_SPACE.match(self._held, self._at).end())  # type: ignore[union-attr]
            if self._at < len(self._held):
                return self._held[self._at]
            if self._ended:
                return ""
            self._more()

    def take(self) -> None:
        """Go past the character that `peek` gave."""
        self._at += 1

    def value(self) -> Any:
        """The value that begins here."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
                if end < len(self._held) or self._ended:  # else a number might go on
                    _check_characters(value, self._held, self._at, end)
                    self._advance(end)
                    return value
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._held) - _TOKEN_CHARS or error.msg.startswith("Unterminated")
                if self._ended or not cut:
                    raise self.error(f"this is no JSON: {error.msg}", error.pos) from error
            except _Fault as error:
                raise self.error(str(error), _fault_at(self._held, self._at)) from error
            except (RecursionError, ValueError) as error:
                raise self.error(str(error), self._at) from error
            self._more()

    def error(self, reason: str, at: int | None = None) -> DataError:
        self._advance(self._at if at is None else at)
        return DataError(f"{BadRecord(self.path, self.line, self._at - self._line_begin + 1, reason)}")

    def _advance(self, at: int) -> None:
        if lines := self._held.count("\n", self._at, at):
            self.line += lines
            self._line_begin = self._held.rindex("\n", self._at, at) + 1
        self._at = at

    def _more(self) -> None:
        """Read on, as much again as is held, so that a long value is not parsed too often."""
        self._held = self._held[self._at :]
        self._line_begin -= self._at
        self._at = 0
        wanted = 2 * len(self._held) + 1
        pieces, size = [self._held], len(self._held)
        while size < wanted and not self._ended:
            piece = next(self._pieces, "")
            self._ended = not piece
            pieces.append(piece)
            size += len(piece)
        self._held = "".join(pieces)


def _json(job: Job, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
    """The values of an array, or values one after another (JSON lines by another name). A fault ends it:
    where the next value begins cannot be known.
    """
    text = _JsonText(job.path)
    if text.peek() != "[":
        while text.peek():
            yield text.line, text.value()
        return
    text.take()
    if text.peek() == "]":
        text.take()
    else:
        while True:
            text.peek()
            line = text.line
            yield line, text.value()
            separator = text.peek()
            if separator not in (",", "]"):
                raise text.error("this is no JSON: Expecting ',' or ']'")
            text.take()
            if separator == "]":
                break
    if text.peek():
        raise text.error("this is no JSON: Extra data after the array")


def _csv(job: Job, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
    """Fields by the names in the first line; all are texts."""
    csv.field_size_limit(LINE_BYTES_MAX)
    try:
        with open(job.path, encoding="utf-8-sig", newline="") as handle:
            rows = csv.reader(handle, delimiter="\t" if job.kind == "tsv" else ",", strict=True)
            names: list[str] = []
            while True:
                line = rows.line_num + 1
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    on_bad(BadRecord(job.path, line, 0, str(error)))
                    continue
                if row is None:
                    return
                if not names:
                    names = row
                    if len(set(names)) < len(names):
                        raise DataError(f"{job.path}:{line}: a name twice in the first line: {names}")
                elif len(row) == len(names):
                    yield line, dict(zip(names, row, strict=True))
                elif row:
                    reason = f"{len(row)} fields, but the first line names {len(names)}"
                    on_bad(BadRecord(job.path, line, 0, reason))
    except UnicodeDecodeError:
        for _ in read_text(Path(job.path)):  # raises, with the offset
            pass
    except OSError as error:
        raise DataError(f"{job.path} cannot be read: {error.strerror}") from error


def _table(job: Job, on_bad: OnBad) -> Iterator[tuple[int, Any]]:
    from tierstream.engine.data.tables import read  # pyarrow takes a moment

    return read(job)


_READERS: dict[str, Callable[[Job, OnBad], Iterator[tuple[int, Any]]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "csv": _csv,
    "tsv": _csv,
    "parquet": _table,
    "arrow": _table,
}
