"""Rows of Parquet and Arrow files: all, in order, few at a time, whatever their types (C45)."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tierstream.engine.data import tables
from tierstream.engine.data.files import Job, cut_jobs, find_files, fingerprint_files
from tierstream.engine.data.records import read_records
from tierstream.io.errors import DataError

ROWS = [{"text": f"row {i}", "n": i, "nested": [{"a": "x" * i, "b": None}]} for i in range(50)]


def jobs_of(path: Path, job_bytes: int) -> list[Job]:
    (source,) = fingerprint_files([path])
    return cut_jobs(source, job_bytes)


def read(path: Path, job_bytes: int = 1 << 20) -> list[tuple[int, dict[str, Any]]]:
    jobs = jobs_of(path, job_bytes)
    return [(record.line, record.value) for job in jobs for record in read_records(job)]


def arrow_stream(path: Path, table: pa.Table, rows: int) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def arrow_file(path: Path, table: pa.Table, rows: int) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def parquet(path: Path, table: pa.Table, rows: int) -> Path:
    pq.write_table(table, path, row_group_size=rows)
    return path


WRITERS = {"a.arrow": arrow_stream, "b.arrow": arrow_file, "c.parquet": parquet}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("job_bytes", "jobs"), [(1, 8), (1 << 20, 1)])
def test_jobs_have_each_row_once_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, job_bytes: int, jobs: int
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", 3)
    path = WRITERS[name](tmp_path / name, pa.Table.from_pylist(ROWS), 7)
    assert len(jobs_of(path, job_bytes)) == jobs
    assert read(path, job_bytes) == list(enumerate(ROWS, 1))
    empty = WRITERS[name](tmp_path / f"empty.{name}", pa.Table.from_pylist(ROWS)[:0], 7)
    assert read(empty) == []


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = (parquet if name == "a.parquet" else arrow_file)(tmp_path / name, pa.Table.from_pylist(ROWS), 7)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"{name} cannot be read; it is damaged or cut: "):
        read(path)
    path.write_bytes(b"no such format at all")
    with pytest.raises(DataError, match=rf"{name} cannot be read; it is damaged or cut: "):
        read(path)


def test_a_column_that_is_no_text_is_named(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(),
        2,
        [None, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"a\xff")],
    )
    path = parquet(tmp_path / "a.parquet", pa.table({"n": [1, 2], "text": broken}), 5)
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'text' \(string\) cannot be read after row 0: .*0xff"
    ):
        read(path)


def test_parts_of_different_types_are_all_read(tmp_path: Path) -> None:
    """`system` null in one part, string in another, large_string in a third."""
    for number, kind in enumerate((pa.null(), pa.string(), pa.large_string(), pa.string_view())):
        values = [None, None if number == 0 else f"s{number}"]
        table = pa.table({"text": [f"a{number}", f"b{number}"], "system": pa.array(values, kind)})
        parquet(tmp_path / f"part-{number}.parquet", table[: 0 if number == 3 else 2], 1)
    found = [value for path in find_files([f"{tmp_path}/*.parquet"]) for _, value in read(path)]
    assert [value["text"] for value in found] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [value["system"] for value in found] == [None, None, None, "s1", None, "s2"]


def test_one_large_row_group_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = pa.array([f"{i:06} " + "x y z " * 700 for i in range(16_000)])  # 64 MB
    pq.write_table(pa.table({"text": text}), path, use_dictionary=False, data_page_size=1 << 18)
    del text
    (job,) = jobs_of(path, 64 << 20)
    before = pa.total_allocated_bytes()
    peak, rows = 0, 0
    tracemalloc.start()
    for record in read_records(job):
        assert record.value["text"].startswith(f"{rows:06}")
        rows += 1
        if rows % 500 == 0:
            peak = max(peak, pa.total_allocated_bytes() - before)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 16_000
    assert peak < 24 << 20, peak
    assert python_peak < 16 << 20, python_peak


def test_a_dataset_saved_to_disk_is_its_files(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    names = [path.name for path in find_files([str(tmp_path / "one")])]
    assert names == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    rows = [value for path in find_files([str(tmp_path / "one")]) for _, value in read(path)]
    assert rows == ROWS
    datasets.DatasetDict(train=saved).save_to_disk(str(tmp_path / "dict"))
    assert [path.parent.name for path in find_files([str(tmp_path / "dict")])] == ["train"]
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"several splits \(train, test\); name those .*two/train"):
        find_files([str(tmp_path / "two")])
    assert len(find_files([str(tmp_path / "two/train")])) == 1
    (tmp_path / "one/state.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="one is a damaged dataset directory"):
        find_files([str(tmp_path / "one")])
