"""Carries out a verdict: AdamW over the planes of every unit, page after page, ahead of the units' next
upload.

The update of a step is deferred into the next forward, in forward order, just ahead of the uploads
(docs/design.md section 5). Its result is the same to the bit as an update at the end of the step, since
nothing reads a weight in between.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np

from tierstream import _native
from tierstream.engine.optimizer import OptimizerConfig, Verdict
from tierstream.engine.trace import Trace, Track
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import ITEM_BYTES, Layout, Page, Unit
from tierstream.tiered.store import Intent, Store

#: The update may run this many units ahead of the last unit whose weights were asked for: enough to hide it,
#: little enough that updated weights are still in DRAM when they are uploaded.
UNITS_AHEAD = 2

_PLANE_VIEWS = {"bfloat16": np.uint16, "uint16": np.uint16, "float32": np.float32}


class _AdamW(TypedDict):
    """The settings of one call of the kernel (tierstream._native)."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    threads: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the kernel: elements `[start, end)`; `pieces`: plane -> (index into the lease, first and
    last byte there).
    """

    decay: bool
    pieces: dict[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Granule:
    """What is updated under one lease: one page of the weight plane and the pages of the other planes over
    the same elements.
    """

    uses: tuple[tuple[Page, Intent], ...]
    calls: tuple[_Call, ...]


def granules(layout: Layout, unit: Unit) -> list[Granule]:
    """Cut a unit's update into granules, and each granule into calls that cross no page and no decay rule."""
    planes = [plane for name, plane in layout.planes if name == unit.name]
    per_page = {plane: layout.page_bytes // layout.spec(unit.name, plane).item_bytes for plane in planes}
    result = []
    for weight_page in layout.pages(unit.name, "weight"):
        start, end = layout.page_span(weight_page)
        uses: list[tuple[Page, Intent]] = []
        for plane in planes:
            intent = Intent.CONSUME if plane == "grad" else Intent.UPDATE
            uses += [(page, intent) for page in layout.pages_over(unit.name, plane, start, end)]
        index_of = {page: i for i, (page, _) in enumerate(uses)}
        cuts = {start, end}
        cuts.update(k for n in per_page.values() for k in range(-(-start // n) * n, end, n))
        cuts.update(first for first, _, _ in unit.decay_runs() if start < first < end)
        edges = sorted(cuts)
        calls = []
        for first, last in pairwise(edges):
            decay = next(rule for begin, stop, rule in unit.decay_runs() if begin <= first < stop)
            pieces = {}
            for plane in planes:
                item = ITEM_BYTES[layout.spec(unit.name, plane).dtype]
                page = Page(unit.name, plane, first // per_page[plane])
                offset = (first - page.index * per_page[plane]) * item
                pieces[plane] = (index_of[page], offset, offset + (last - first) * item)
            calls.append(_Call(decay, pieces))
        result.append(Granule(tuple(uses), tuple(calls)))
    return result


class UpdateDriver:
    """Runs deferred updates in a thread; `wait(unit)` is the gate of the unit's next upload.

    Args:
        units: in forward order, the order in which they are updated.
        threads: CPU threads of the kernel.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        units: Sequence[Unit],
        config: OptimizerConfig,
        threads: int,
        trace: Trace,
    ) -> None:
        self._store, self._config, self._threads, self._trace = store, config, threads, trace
        self._order = [unit.name for unit in units]
        self._granules = {unit.name: granules(layout, unit) for unit in units}
        self._dtypes = {
            (unit.name, plane): _PLANE_VIEWS[layout.spec(unit.name, plane).dtype]
            for unit in units
            for name, plane in layout.planes
            if name == unit.name
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="updater")
        self._state = threading.Condition()
        self._done = len(self._order)
        self._allowed = 0
        self._job: Future[None] | None = None
        self._error: BaseException | None = None
        self._aborted = False

    def uses(self, unit: Unit) -> list[tuple[Page, Intent]]:
        """Page uses of the unit's update, in order."""
        return [use for granule in self._granules[unit.name] for use in granule.uses]

    def grad_pages(self) -> list[Page]:
        return [
            page
            for name in self._order
            for granule in self._granules[name]
            for page, intent in granule.uses
            if intent is Intent.CONSUME
        ]

    def begin(self, verdict: Verdict, *, unlimited: bool = False) -> None:
        """Start the update of all units. `unlimited`: do not wait for uploads (a flush)."""
        if self._job is not None:
            raise InvariantError("an update began before the one before it was finished")
        with self._state:
            self._done = 0
            self._allowed = len(self._order) if unlimited else UNITS_AHEAD
        self._job = self._thread.submit(self._run, verdict)

    def wait(self, unit_name: str) -> None:
        """Block until the unit's pending update, if any, has been applied; lets the update run further
        ahead.
        """
        position = self._order.index(unit_name)
        with self._state:
            self._allowed = max(self._allowed, position + 1 + UNITS_AHEAD)
            self._state.notify_all()
            self._state.wait_for(lambda: self._done > position or self._error is not None)
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """Wait until every unit is updated; raises what made the update fail."""
        if self._job is None:
            return
        with self._state:
            self._allowed = len(self._order)
            self._state.notify_all()
        job, self._job = self._job, None
        job.result()

    def close(self) -> None:
        with self._state:
            self._aborted = True
            self._state.notify_all()
        self._thread.shutdown(wait=True)

    def _run(self, verdict: Verdict) -> None:
        try:
            for position, name in enumerate(self._order):
                with self._trace.wait(Track.UPDATER, "permission", name), self._state:
                    self._state.wait_for(lambda position=position: self._aborted or position < self._allowed)  # type: ignore[misc]
                    if self._aborted:
                        raise InvariantError("the update was aborted")
                for granule in self._granules[name]:
                    self._apply(name, granule, verdict)
                with self._state:
                    self._done = position + 1
                    self._state.notify_all()
        except BaseException as error:
            with self._state:
                self._error = error
                self._state.notify_all()
            raise

    def _apply(self, name: str, granule: Granule, verdict: Verdict) -> None:
        with self._trace.wait(Track.UPDATER, "page", name):
            lease = self._store.acquire(granule.uses)
        with lease, self._trace.span(Track.UPDATER, "adamw", name):
            for call in granule.calls:
                views = {
                    plane: lease.arrays[index][first:last].view(self._dtypes[name, plane])
                    for plane, (index, first, last) in call.pieces.items()
                }
                self._adamw(views, verdict, self._config.weight_decay if call.decay else 0.0)

    def _adamw(self, views: dict[str, np.ndarray], verdict: Verdict, weight_decay: float) -> None:
        config = self._config
        settings: _AdamW = {
            "step": verdict.update, "lr": verdict.lr, "beta1": config.beta1, "beta2": config.beta2,
            "eps": config.eps, "weight_decay": weight_decay, "grad_scale": verdict.clip_factor,
            "threads": self._threads,
        }  # fmt: skip
        moments = views["exp_avg"], views["exp_avg_sq"], views["grad"]
        if "master_low" in views:
            _native.adamw_split(views["weight"], views["master_low"], *moments, **settings)
        elif "master" in views:
            _native.adamw_fp32(views["master"], views["weight"], *moments, **settings)
        else:
            _native.adamw_fp32(views["weight"], None, *moments, **settings)
