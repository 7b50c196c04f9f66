"""Rows of Parquet and Arrow files as Python values, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tierstream.engine.data.files import Job
from tierstream.io.errors import DataError

#: Bytes of rows that are Python values at once, about, as Arrow counts them; and at most so many rows.
BATCH_BYTES, BATCH_ROWS = 4 << 20, 1024
_READ_BYTES = 1 << 20
_FILE_MAGIC = b"ARROW1"


def cut(path: str, kind: str, job_bytes: int) -> list[tuple[int, int, int]]:
    """Row groups or record batches (start, stop) of about `job_bytes`, and the rows before each.

    Raises:
        DataError: the file is damaged or cannot be read.
    """
    parts, start, begin, row, nbytes = [], 0, 0, 0, 0
    with _errors(path):
        sizes = _group_sizes(path) if kind == "parquet" else _batch_sizes(path)
        for number, (rows, size) in enumerate(sizes, 1):
            row, nbytes = row + rows, nbytes + size
            if nbytes >= job_bytes:
                parts.append((start, number, begin))
                start, begin, nbytes = number, row, 0
        if start < len(sizes) or not parts:
            parts.append((start, len(sizes), begin))
    return parts


def read(job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a job by their numbers, from 1. A null stays None, also in a column that has nothing else.

    Raises:
        DataError: the file is damaged or cannot be read, or a column's values cannot; with file and column.
    """
    row = job.line
    batches = _parquet(job) if job.kind == "parquet" else _arrow(job)
    while True:
        with _errors(job.path):
            batch = next(batches, None)
        if batch is None:
            return
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{job.path}: two columns have one name: {names}")
        columns = [_values(batch.column(i), names[i], job.path, row) for i in range(len(names))]
        for values in zip(*columns, strict=True):
            row += 1
            yield row, dict(zip(names, values, strict=True))


def _values(column: pa.Array, name: str, path: str, row: int) -> list[Any]:
    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
        raise DataError(
            f"{path}: column {name!r} ({column.type}) cannot be read after row {row}: {error}"
        ) from error


def _group_sizes(path: str) -> list[tuple[int, int]]:
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def _parquet(job: Job) -> Iterator[pa.RecordBatch]:
    """Pages are read as they are needed: a row group may be larger than memory."""
    with pq.ParquetFile(job.path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
        for number in range(job.start, job.stop):
            group = file.metadata.row_group(number)
            rows = _rows_at_once(group.num_rows, group.total_byte_size)
            yield from file.iter_batches(rows, row_groups=[number], use_threads=False)


def _batch_sizes(path: str) -> list[tuple[int, int]]:
    return [(batch.num_rows, batch.nbytes) for batch in _batches(path, 0, None)]


def _arrow(job: Job) -> Iterator[pa.RecordBatch]:
    for batch in _batches(job.path, job.start, job.stop):
        rows = _rows_at_once(batch.num_rows, batch.nbytes)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


def _batches(path: str, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    """Record batches of a file in the stream format (as datasets writes them) or the file format, mapped."""
    with pa.memory_map(path) as source:
        if source.size() == 0:
            return
        if source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC:
            reader = pa.ipc.open_file(source)
            last = reader.num_record_batches if stop is None else stop
            for number in range(start, last):
                yield reader.get_batch(number)
            return
        for number, batch in enumerate(pa.ipc.open_stream(source)):
            if number == stop:
                return
            if number >= start:
                yield batch


def _rows_at_once(rows: int, nbytes: int) -> int:
    return max(1, min(BATCH_ROWS, rows * BATCH_BYTES // max(nbytes, 1)))


@contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path} cannot be read; it is damaged or cut: {reason}") from error
