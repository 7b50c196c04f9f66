"""Traces of steps: the file, what is in it, and what it says of waiting."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rig import Setup, batches, rig, tiny_config
from support.runs import make_run

from tierstream.engine import plan_report
from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.measure import machine
from tierstream.engine.metrics import TracedStep
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trace.file import write_trace
from tierstream.engine.trace.summary import summarise
from tierstream.engine.trace.trace import Span, Trace, TracedDirectory, Track
from tierstream.engine.trainer import Trainer
from tierstream.tiered.layout import Page

STEPS = 4


@dataclass
class Traced:
    """What a traced run left behind."""

    spans: list[Span]
    stalls: list[dict[str, float]]
    units: list[str]
    stays: bool
    """All units have their state on the device."""
    bytes_read: int
    bytes_written: int
    file: dict[str, Any]

    def on(self, track: Track) -> list[Span]:
        return sorted((span for span in self.spans if span.track is track), key=lambda span: span.begin_s)

    def by_step(self, track: Track) -> list[list[Span]]:
        """Those of every step."""
        steps = self.on(Track.STEPS)
        return [
            [span for span in self.on(track) if step.begin_s <= span.begin_s < step.end_s] for step in steps
        ]


def traced(setup: Setup, folder: Path) -> Traced:
    stalls = []
    with rig(setup.but(trace=True)) as run:
        for batch in batches(STEPS):
            run.train([batch])
            stalls.append(run.trace.take_stalls())
        run.runtime.flush()
    # Transfers have ended, now that the store is closed.
    spans, stats = run.trace.stop(), run.store.stats
    write_trace(spans, folder / "trace.json")
    return Traced(
        spans,
        stalls,
        [unit.name for unit in run.units.in_forward_order],
        bool(run.plan.device.resident),
        stats.nvme_bytes_read,
        stats.nvme_bytes_written,
        json.loads((folder / "trace.json").read_text()),
    )


@pytest.fixture(scope="module", params=["nvme", "nvme, tied", "resident"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("traced")
    setup = Setup(config=tiny_config(tied="tied" in request.param), rows_per_chunk=2)
    if request.param == "resident":
        setup = setup.but(gpu_all=True, activations="gpu")
    else:
        setup = setup.but(nvme=folder / "drive", dram=24 * setup.page)
    return traced(setup, folder)


def test_the_file_is_a_chrome_trace(run: Traced) -> None:
    assert run.file.keys() == {"traceEvents", "displayTimeUnit"}
    assert run.file["displayTimeUnit"] in ("ms", "ns")
    more = {
        "M": {"args"}, "X": {"cat", "args", "ts", "dur"}, "C": {"ts", "args"},
        "b": {"cat", "id", "ts", "args"}, "e": {"cat", "id", "ts"},
    }  # fmt: skip
    pairs = defaultdict(list)
    for event in run.file["traceEvents"]:
        assert event.keys() == {"ph", "name", "pid", "tid"} | more[event["ph"]], event
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["pid"] == 1
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] in "be":
            pairs[event["cat"], event["id"], event["name"]].append(event)
    for begin, end in pairs.values():
        assert begin["ph"] + end["ph"] == "be"
        assert begin["ts"] <= end["ts"]
        assert begin["args"].keys() == {"unit", "plane", "page", "bytes"}


def test_tracks_have_names_and_an_order(run: Traced) -> None:
    metadata = [event for event in run.file["traceEvents"] if event["ph"] == "M" and event["tid"]]
    names = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"}
    assert [names[thread] for thread in sorted(names, key=order.__getitem__)] == [
        "steps", "compute", "upload", "expert upload", "download", "compute host", "updater", "updater 2",
        "device updater", "device updates", "uploader", "expert uploader", "downloader", "nvme reads",
        "nvme writes",
    ]  # fmt: skip
    assert {event["tid"] for event in run.file["traceEvents"] if event["ph"] == "X"} <= names.keys()


def test_spans_of_one_track_never_overlap(run: Traced) -> None:
    for track in Track:
        if not track.overlaps:
            for one, other in itertools.pairwise(run.on(track)):
                assert one.end_s <= other.begin_s, (one, other)
    in_file = defaultdict(list)
    for event in run.file["traceEvents"]:
        if event["ph"] == "X":
            in_file[event["tid"]].append(event)
    for events in in_file.values():
        for first, second in itertools.pairwise(events):
            assert first["ts"] + first["dur"] <= second["ts"] + 0.002  # ns, rounded


def test_every_unit_computes_once_forward_and_once_backward(run: Traced) -> None:
    layers = [unit for unit in run.units if unit.startswith("layers.")]
    head = "head" if "head" in run.units else "head embed"
    expected = [
        *(f"forward {unit}" for unit in ["embed", *layers]),
        head,
        *(f"backward {unit}" for unit in [*reversed(layers), "embed"]),
    ]
    steps = run.by_step(Track.COMPUTE)
    assert len(steps) == STEPS
    for number, spans in enumerate(steps):
        updates = [f"adamw {unit}" for unit in run.units] if run.stays and number > 0 else []
        assert [span.name for span in spans] == [*updates, *expected]


def test_bytes_are_there_before_they_are_used(run: Traced) -> None:
    """Updates come before uploads, those before the computation, and it before the downloads. What stays on
    the device does not move.
    """
    if run.stays:
        assert run.on(Track.UPLOAD) == run.on(Track.DOWNLOAD) == []
        return
    for number, computed in enumerate(run.by_step(Track.COMPUTE)):
        uploads = run.by_step(Track.UPLOAD)[number]
        first = {unit: next(s for s in computed if s.unit == unit) for unit in run.units}
        last = {span.unit: span for span in computed}
        sent = {unit: next(u for u in uploads if u.unit == unit) for unit in run.units}
        for unit in run.units:
            assert sent[unit].end_s <= first[unit].begin_s
            updates = [
                span
                for track in (Track.UPDATER, Track.SECOND_UPDATER)
                for span in run.by_step(track)[number]
                if (span.what, span.unit) == ("adamw", unit)
            ]
            assert bool(updates) == (number > 0)
            # An upload follows the update page by page.
            assert all(update.end_s <= sent[unit].end_s for update in updates)
            # The last ones may be downloaded after the step.
            gradient = [span for span in run.on(Track.DOWNLOAD) if span.name == f"grad {unit}"][number]
            assert gradient.begin_s >= last[unit].end_s
        downloads = {d.name: d for d in run.by_step(Track.DOWNLOAD)[number]}
        for boundary in (u for u in uploads if u.what == "activation"):
            assert downloads[boundary.name].end_s <= boundary.end_s
            assert boundary.end_s <= last[boundary.unit.replace("boundary", "layers")].begin_s


def test_idle_time_is_what_the_stall_clock_counts(run: Traced) -> None:
    """On the CPU the lane `compute` is the thread that stalls; weights and activations that are not there yet
    count as well while it does something else.
    """
    steps = summarise(run.spans)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    waits = [[span for span in spans if span.waiting] for spans in run.by_step(Track.HOST)]
    for step, stalls, spans in zip(steps, run.stalls, waits, strict=True):
        for cause, seconds in stalls.items():
            found = [span.end_s - span.begin_s for span in spans if span.what == cause]
            assert sum(found) == pytest.approx(seconds, abs=1e-9)
        assert step.busy_s + sum(step.idle_s.values()) == pytest.approx(step.step_s)
        assert min(step.idle_s.values()) >= 0
        by_stall: Counter[str] = Counter()
        for cause, seconds in step.idle_s.items():
            by_stall[cause.split(":")[0]] += seconds  # type: ignore[assignment]
        assert by_stall.pop("host") > 0
        assert by_stall.keys() == stalls.keys()
        for cause, seconds in stalls.items():
            more = 0.0 if cause in ("gradients", "verdict") else math.inf
            assert seconds - 1e-4 <= by_stall[cause] <= seconds + more + 1e-4


def test_every_transfer_of_a_drive_is_there(run: Traced) -> None:
    for track, expected in ((Track.READS, run.bytes_read), (Track.WRITES, run.bytes_written)):
        spans = run.on(track)
        assert sum(span.nbytes for span in spans) == expected
        assert all(span.page is not None and span.end_s > span.begin_s for span in spans)
        counted = [e for e in run.file["traceEvents"] if e["ph"] == "C" and e["name"].startswith(track)]
        assert len(counted) == 2 * len(spans)
        values = [event["args"]["bytes"] for event in counted]
        assert not values or (min(values) == values[-1] == 0 < max(values))


def lane_span(track: Track, what: str, unit: str, begin: float, end: float, enqueued: float) -> Span:
    return Span(track, what, unit, begin, end, enqueued_s=(enqueued, enqueued + 0.1))


def wait(track: Track, cause: str, begin: float, end: float) -> Span:
    return Span(track, cause, "", begin, end, waiting=True)


def test_a_device_that_waits_while_the_host_runs_ahead() -> None:
    """The host has enqueued all at 1; the lane waits for what the uploader waits for."""
    spans = [
        Span(Track.STEPS, "step", "3", 0.0, 60.0),
        lane_span(Track.UPLOAD, "weight", "layers.0", 10.0, 18.0, 15.0),
        lane_span(Track.COMPUTE, "forward", "layers.0", 20.0, 30.0, 16.0),
        lane_span(Track.COMPUTE, "head", "head", 31.0, 32.0, 17.0),
        lane_span(Track.UPLOAD, "activation", "boundary.0", 30.0, 36.0, 34.0),
        lane_span(Track.COMPUTE, "backward", "layers.0", 37.0, 50.0, 36.5),
        wait(Track.UPLOADER, "update", 1.0, 9.0),
        wait(Track.UPDATER, "page", 3.0, 5.0),
        wait(Track.UPLOADER, "slot", 9.0, 10.0),
        wait(Track.UPLOADER, "page", 11.0, 14.0),
        wait(Track.UPLOADER, "slot", 15.5, 19.0),  # for the next upload: no matter here
        wait(Track.HOST, "weights", 0.5, 15.2),
        wait(Track.HOST, "gradients", 36.0, 36.25),
        wait(Track.HOST, "verdict", 51.0, 58.0),
    ]
    (step,) = summarise(spans)
    assert (step.step, step.step_s, step.busy_s) == (3, 60.0, 24.0)
    assert step.idle_s == pytest.approx({
        "weights: copy": 1.0 + 1.0 + 4.0,
        "weights: update": 6.0,
        "weights: page of the update": 2.0,
        "weights: slot": 1.0,
        "weights: page": 3.0,
        "activations": 4.0,
        "gradients": 0.25,
        "verdict": 7.0,
        "host": 2.0 + 1.0 + 0.75 + 1.0 + 2.0,
    })  # fmt: skip
    assert list(step.idle_s.values()) == sorted(step.idle_s.values(), reverse=True)


def test_a_failed_transfer_ends_its_span() -> None:
    class Failing:
        def read(self, page: Page, frame: np.ndarray) -> Future[int]:
            future: Future[int] = Future()
            future.set_exception(OSError("gone"))
            return future

    trace = Trace()
    trace.start(1)
    directory = TracedDirectory(Failing(), trace)  # type: ignore[arg-type]
    future = directory.read(Page("layers.0", "weight", 3), np.zeros(512, np.uint8))
    assert isinstance(future.exception(), OSError)
    (span,) = trace.stop()
    assert (span.track, span.page, span.nbytes) == (Track.READS, ("layers.0", "weight", 3), 512)


class Events(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Makes configurations of runs on a drive; the machine is not measured."""
    rates = Rates(flop_per_s=1e9, upload=None, update_parameters_per_s=1e9)
    monkeypatch.setattr(plan_report, "machine_rates", lambda *_: rates)
    monkeypatch.setattr(machine, "measure_drive", lambda *_: None)
    (tmp_path / "drive").mkdir()

    def make(name: str, *, steps: int, trace_steps: int) -> RunConfig:
        config = make_run(tmp_path / name, steps=steps)
        config.tiers.nvme_dirs, config.tiers.dram = [str(tmp_path / "drive")], ByteSize(40 * 8192)
        config.train.trace_steps = trace_steps
        return config

    return make


def test_a_run_traces_the_steps_that_it_is_asked_for(small_run: Callable[..., RunConfig]) -> None:
    config, events = small_run("one", steps=6, trace_steps=2), Events()
    config.checkpoint.every_steps = 3
    summary = Trainer(config, [events]).run()
    path = Path(config.run_dir) / "trace.json"
    picture = path.with_suffix(".png")
    assert f"trace of steps 3 to 4: {path}, a picture of one: {picture}" in events.texts
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    names = Counter(event["name"] for event in json.loads(path.read_text())["traceEvents"])
    assert names["step 3"] == names["step 4"] == names["checkpoint"] == names["head embed"] / 2 == 1
    assert names["nvme read"] > 0
    assert "step 5" not in names
    result = json.loads((Path(config.run_dir) / "result.json").read_text())
    assert result["trace"] == str(path)
    assert [TracedStep(**step) for step in result["traced"]] == summary.traced
    assert [step.step for step in summary.traced] == [3, 4]
    assert all(math.isfinite(step.busy_s) and step.busy_s > 0 for step in summary.traced)


@pytest.mark.parametrize(("steps", "traced_steps"), [(4, [3, 4]), (2, [])])
def test_a_run_that_ends_early_writes_what_there_is_or_says_why_not(
    small_run: Callable[..., RunConfig], steps: int, traced_steps: list[int]
) -> None:
    config, events = small_run("short", steps=steps, trace_steps=5), Events()
    summary = Trainer(config, [events]).run()
    assert [step.step for step in summary.traced] == traced_steps
    assert (Path(config.run_dir) / "trace.json").exists() == bool(traced_steps)
    warned = [text for text in events.texts if text.startswith("warning: no trace was written")]
    assert len(warned) == (not traced_steps)
    shortened = [text for text in events.texts if text.startswith("trace of steps 3 to 4, not 5: ")]
    assert len(shortened) == bool(traced_steps)


def test_a_resumed_run_may_be_traced(small_run: Callable[..., RunConfig]) -> None:
    """From the third step of its own process on; tracing is no setting that a resume compares."""
    config = small_run("resumed", steps=6, trace_steps=0)
    config.checkpoint.every_steps, config.checkpoint.keep = 2, 3
    Trainer(config).run()
    for later in ("step-00000004", "step-00000006"):
        (Path(config.run_dir) / "checkpoints" / later).rename(Path(config.run_dir) / later)
    config.train.trace_steps, config.checkpoint.resume = 1, "auto"
    assert [step.step for step in Trainer(config).run().traced] == [5]
