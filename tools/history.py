"""The steps of a run, however many, in bounded memory: `metrics.jsonl` in some thousand buckets of steps.

Of every number in it a bucket keeps the least, the greatest and the sum, so that no spike is lost and shares
of the whole are exact. A million steps take some seconds.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.metrics import StepMetrics, each_step
from tierstream.io.errors import ConfigError

Array = NDArray[np.float64]
BUCKETS = 2000
_BLOCK_BYTES = 16 << 20
_SKIPPED_KEPT = 100


class Band:
    """One number of the steps. What is not a number counts nowhere.

    Attributes:
        low, high: least and greatest of each bucket, NaN where it has none: float64 [buckets].
        total, count: their sum and how many they are.
    """

    def __init__(self, buckets: int) -> None:
        self.low, self.high = np.full(buckets, np.nan), np.full(buckets, np.nan)
        self.total, self.count = np.zeros(buckets), np.zeros(buckets, np.int64)

    def add(self, values: Array, starts: NDArray[np.int64], buckets: NDArray[np.int64]) -> None:
        """Values of steps in order.

        Args:
            starts: where in `values` each of `buckets` begins.
        """
        known = ~np.isnan(values)
        self.low[buckets] = np.fmin(self.low[buckets], np.fmin.reduceat(values, starts))
        self.high[buckets] = np.fmax(self.high[buckets], np.fmax.reduceat(values, starts))
        self.total[buckets] += np.add.reduceat(np.where(known, values, 0.0), starts)
        self.count[buckets] += np.add.reduceat(known.astype(np.int64), starts)

    @property
    def mean(self) -> Array:
        return _divided(self.total, self.count)

    def running_mean(self, buckets: int) -> Array:
        """Of each bucket and those before it, so many in all."""
        sums, counts = (np.cumsum(np.insert(each.astype(float), 0, 0.0)) for each in (self.total, self.count))
        first = np.maximum(0, np.arange(len(self.total)) + 1 - buckets)
        last = np.arange(len(self.total)) + 1
        return _divided(sums[last] - sums[first], counts[last] - counts[first])


@dataclass
class History:
    """A run's steps.

    Attributes:
        steps: the first of each bucket: int64 [buckets].
        bands: name -> its numbers. A field of a field is named "bytes_read.nvme".
        totals: name -> sum over all steps.
        first, last: records.
        skipped: records of skipped steps, the first 100.
        shown: some records, evenly spread, first and last among them.
    """

    steps: NDArray[np.int64]
    first: StepMetrics
    last: StepMetrics
    bands: dict[str, Band] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def totals(self) -> Mapping[str, float]:
        return defaultdict(float, {name: float(band.total.sum()) for name, band in self.bands.items()})

    @property
    def count(self) -> int:
        """Steps."""
        return int(self.bands["step"].count.sum())

    def group(self, prefix: str) -> dict[str, Band]:
        """Bands of a field of fields: of "stall_s" cause -> seconds."""
        start = f"{prefix}."
        return {name.removeprefix(start): band for name, band in self.bands.items() if name.startswith(start)}

    def ratio(self, numerator: str, denominator: str) -> Array:
        """Sum over sum, bucket by bucket."""
        return _divided(self.bands[numerator].total, self.bands[denominator].total)


def read_history(path: Path, bound_s: float | None = None, shown: int = 25) -> History:
    """Of a `metrics.jsonl`. A last line without its end is left out.

    Args:
        bound_s: seconds that a step takes at least; gives the band `bound_percent`.
        shown: records to keep.

    Raises:
        ConfigError: there is no step, or a line that is no record of one.
    """
    import pyarrow

    first, last = _ends(path)
    span = last.step - first.step + 1
    buckets = min(BUCKETS, span)
    steps = first.step + np.ceil(np.arange(buckets) * span / buckets).astype(np.int64)
    history = History(steps, first, last)
    wanted = set(np.linspace(first.step, last.step, min(shown, span)).round().astype(int).tolist())
    with path.open("rb") as stream:
        for block in _blocks(stream):
            try:
                _add(history, block, wanted, bound_s, span)
            except (pyarrow.ArrowInvalid, KeyError) as error:
                for _ in each_step(path):  # says which line it is
                    pass
                raise ConfigError(f"{path} cannot be read: {error}") from error
    return history


def _add(history: History, block: bytes, wanted: set[int], bound_s: float | None, span: int) -> None:
    import pyarrow.json

    options = pyarrow.json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    table = pyarrow.json.read_json(pyarrow.BufferReader(block), read_options=options)
    steps = table["step"].to_numpy()
    buckets = (steps - history.first.step) * len(history.steps) // span
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    columns = dict(_numbers(table))
    columns |= _derived(columns, bound_s)
    for name, values in columns.items():
        history.bands.setdefault(name, Band(len(history.steps))).add(values, starts, buckets[starts])
    for index in np.flatnonzero(np.isin(steps, list(wanted))):
        history.shown += table.slice(index, 1).to_pylist()
    for index in np.flatnonzero(columns["skipped"])[: _SKIPPED_KEPT - len(history.skipped)]:
        history.skipped += table.slice(index, 1).to_pylist()


def _numbers(table: Any) -> Iterator[tuple[str, Array]]:
    """The columns of a table that are numbers; what is null is NaN."""
    import pyarrow.types as types

    while any(types.is_struct(column.type) for column in table.columns):
        table = table.flatten()
    for name, column in zip(table.column_names, table.columns, strict=True):
        if types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
            yield name, column.cast("float64").to_numpy()


def _derived(columns: Mapping[str, Array], bound_s: float | None) -> dict[str, Array]:
    """Numbers of a step that follow from its record."""
    step_s = columns["step_s"]
    made = {"clipped": (columns["clip_factor"] < 1).astype(float)}
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        made["perplexity"] = np.exp(columns["loss"])
        if bound_s is not None:
            made["bound_percent"] = 100 * bound_s / step_s
        for name, values in columns.items():
            what, _, key = name.partition(".")
            if what in ("bytes_read", "bytes_written"):
                made[f"{what}_gb_per_s.{key}"] = values / step_s / 1e9
    return made


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines, some MB at a time."""
    while block := stream.read(_BLOCK_BYTES):
        block += stream.readline()
        if whole := block[: block.rfind(b"\n") + 1]:
            yield whole


def _ends(path: Path) -> tuple[StepMetrics, StepMetrics]:
    """The first and the last record."""
    with path.open("rb") as stream:
        first = stream.readline()
        if not first.endswith(b"\n"):
            raise ConfigError(f"{path} holds no step yet; try again when one has ended")
        size, tail = stream.seek(0, os.SEEK_END), b""
        while tail.count(b"\n") < 2 and len(tail) < size:
            stream.seek(size - min(size, max(4096, 2 * len(tail))))
            tail = stream.read(size - stream.tell())
    last = tail[: tail.rfind(b"\n")].rpartition(b"\n")[2]
    try:
        return StepMetrics.from_json(first.decode()), StepMetrics.from_json(last.decode())
    except (ValueError, TypeError, KeyError) as error:
        for _ in each_step(path):  # says which line it is
            pass
        raise ConfigError(f"{path} cannot be read: {json.dumps(str(error))}") from error


def _divided(numerator: Array, denominator: NDArray[Any]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator != 0, numerator / denominator, np.nan)
