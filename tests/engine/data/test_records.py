"""Records come whole and in order; what cannot be read is named to the column (C41, C43)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierstream.engine.data import files, records
from tierstream.engine.data.files import cut_jobs, fingerprint_files
from tierstream.engine.data.records import BadRecord, read_records
from tierstream.io.errors import DataError


def read(path: Path, job_bytes: int = 1 << 20, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    (source,) = fingerprint_files([path])
    jobs = cut_jobs(source, job_bytes)
    return [(record.line, record.value) for job in jobs for record in read_records(job, **options)]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


BAD_LINES = [
    ('{"text": "a" "b"}', 14, "Expecting ',' delimiter"),
    ('{"text": "cut', 10, "Unterminated string"),
    ('{"text": "NaN", "x": [1, NaN]}', 26, "NaN is no JSON"),
    ('{"x": -Infinity}', 7, "-Infinity is no JSON"),
    ('{"a": 1, "b": {"a": [{"c": 1}, {"c": 1}]}, "a": 2}', 44, "the same key twice"),
    ('{"a": {"b": 1, "\\u0062": 2}}', 16, "the same key twice"),
    ("[1, 2]", 1, "an array where an object"),
    ('"x"', 1, "a string where an object"),
    ("null", 1, "a value where an object"),
    ('{"text": "a\x0cb"}', 12, "Invalid control character"),
    ('{"text": "\\ud800"}', 0, r"lone surrogate \\ud800"),
    ('{"\\udfff": ""}', 0, r"lone surrogate \\udfff"),
    ('{"a": ' + "[" * 100_000 + "}", 0, "brackets within brackets"),
]


@pytest.mark.parametrize(("bad", "column", "reason"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_told(tmp_path: Path, bad: str, column: int, reason: str) -> None:
    path = write(tmp_path, "a.jsonl", f'{{"text": "é"}}\n\n  \r\n{bad}\n{{"text": "last"}}\n')
    place = f"a.jsonl:4:{column}: " if column else "a.jsonl:4: "
    with pytest.raises(DataError, match=f"{place}.*{reason}.*bad_lines: skip"):
        read(path)
    told: list[BadRecord] = []
    assert read(path, on_bad=told.append) == [(1, {"text": "é"}), (5, {"text": "last"})]
    assert [(each.line, each.column) for each in told] == [(4, column)]


def test_a_last_line_that_is_cut_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b')
    with pytest.raises(DataError, match=r"a\.jsonl:2:10: this is no JSON: Unterminated string"):
        read(path)


def test_bytes_that_are_no_text_are_named_by_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "é'.encode() + b'\xe9"}\n{"text": "b"}')
    with pytest.raises(DataError, match=r"a\.jsonl:1:12: byte 0xe9 is no UTF-8"):
        read(path)
    assert read(path, on_bad=lambda bad: None) == [(2, {"text": "b"})]


def test_only_the_byte_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\r\ne🙂"
    line = json.dumps({"text": text}, ensure_ascii=False).replace("\\u000b", "\\u000B")
    path = write(tmp_path, "a.jsonl", f"\ufeff{line}\r\n" + json.dumps({"text": text}))
    assert read(path) == [(1, {"text": text}), (2, {"text": text})]


@pytest.mark.parametrize("job_bytes", [1, 2, 7, 13, 14, 15, 64, 1000])
def test_jobs_have_each_line_once_with_its_number(tmp_path: Path, job_bytes: int) -> None:
    values = [{"n": "x" * (i % 9)} for i in range(40)]
    lines = [json.dumps(value) + "\n" * (1 + (i % 5 == 0)) for i, value in enumerate(values)]
    path = write(tmp_path, "a.ndjson", "".join(lines).rstrip("\n"))
    numbers = [1 + sum(line.count("\n") for line in lines[:i]) for i in range(40)]
    assert read(path, job_bytes) == list(zip(numbers, values, strict=True))


def test_a_line_of_50_mb_is_one_record(tmp_path: Path) -> None:
    long = "word " * 10_000_000
    path = write(tmp_path, "a.jsonl", json.dumps({"text": long}) + '\n{"text": "b"}')
    assert read(path, job_bytes=8 << 20) == [(1, {"text": long}), (2, {"text": "b"})]


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_is_read_value_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, indent: int | None
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", read_bytes)
    values = [{"text": "é]},{\n" * i, "n": [1.5e3, True, None, {"x": "\\"}]} for i in range(8)]
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    found = read(write(tmp_path, "a.json", f"\ufeff \n{text}\n "))
    assert [value for _, value in found] == values
    lines = text.split("\n")
    begins = [2 + i for i, line in enumerate(lines) if line == " {"] if indent else [2] * 8
    assert [line for line, _ in found] == begins
    one_by_one = "\n".join(json.dumps(value) for value in values)
    assert read(write(tmp_path, "b.json", one_by_one)) == list(enumerate(values, 1))
    assert read(write(tmp_path, "c.json", " [ ] ")) == read(write(tmp_path, "d.json", "")) == []


@pytest.mark.parametrize("read_bytes", [2, 1 << 20])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"a": 1},\n {"a": tru}]', "2:8: this is no JSON: Expecting value"),
        ('[{"a": 1}\n {"a": 1}]', "2:2: this is no JSON: Expecting ',' or ']'"),
        ('[{"a": 1},\n]', "2:1: this is no JSON: Expecting value"),
        ('[{"a": 1},\n', "2:1: this is no JSON: Expecting value"),
        ('[{"a": 1}] x', "1:12: this is no JSON: Extra data"),
        ('[\n{"a": "b\n"}]', "2:9: this is no JSON: Invalid control character"),
        ('[\n{"a": "b', "2:7: this is no JSON: Unterminated string"),
        ('{"a":\n{"b": 1,\n "b": 2}}', "3:2: the same key twice"),
        ('[{"a": NaN}]', "1:8: NaN is no JSON"),
        ("[1, 2]", "1:1: a number where an object"),
    ],
)
def test_a_fault_in_json_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, text: str, place: str
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", read_bytes)
    with pytest.raises(DataError, match=rf"a\.json:{place}"):
        read(write(tmp_path, "a.json", text))


def test_a_long_json_array_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = 0
    more = records._JsonText._more

    def watched(text: records._JsonText) -> None:
        nonlocal held
        more(text)
        held = max(held, len(text._held))

    monkeypatch.setattr(files, "READ_BYTES", 1000)
    monkeypatch.setattr(records._JsonText, "_more", watched)
    values = [{"text": "x" * 300}] * 2000
    assert len(read(write(tmp_path, "a.json", json.dumps(values)))) == 2000
    assert held < 4000
    # A fault at the start is told at once: what follows is not read for it.
    with pytest.raises(DataError, match=r":1:3: "):
        read(write(tmp_path, "b.json", "[{1" + json.dumps(values)))
    assert held < 4000


def test_csv_has_names_quotes_and_lines_within_fields(tmp_path: Path) -> None:
    text = '\ufefftext,n\r\n"a ""b""\nc,\u2028",1\n\n,2\nbad\nlast,3'
    path = write(tmp_path, "a.csv", text)
    with pytest.raises(DataError, match=r"a\.csv:6: 1 fields, but the first line names 2"):
        read(path)
    told: list[BadRecord] = []
    found = read(path, on_bad=told.append)
    assert found == [
        (2, {"text": 'a "b"\nc,\u2028', "n": "1"}),
        (5, {"text": "", "n": "2"}),
        (7, {"text": "last", "n": "3"}),
    ]
    assert [bad.line for bad in told] == [6]
    assert read(write(tmp_path, "b.tsv", "text\tn\na,b\t2")) == [(2, {"text": "a,b", "n": "2"})]
    assert read(write(tmp_path, "c.csv", "")) == read(write(tmp_path, "d.csv", "a,b\n")) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a,a\n1,2", "a name twice"),
        (b'a\nx\n"open', r"a\.csv:3: unexpected end of data"),
        (b'a\nx\n"y"z', r"a\.csv:3: .* expected after"),
        (b"a\n\xff", "no UTF-8 text: byte 0xff at offset 2"),
    ],
)
def test_a_fault_in_csv_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(write(tmp_path, "a.csv", data))
