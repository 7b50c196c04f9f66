from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.steps import record

from tierstream.engine.data.progress import Progress
from tierstream.engine.metrics import PlanReport, RunSummary, StepMetrics
from tierstream.tools.live import ConsoleCallback, LiveLine, progress_line, step_line


class Terminal(io.StringIO):
    """Remembers what a terminal of any width would show: one string per line, after all redraws."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown = [""]
        for part in re.split(r"(\r\x1b\[2K|\n)", self.getvalue()):
            if part == "\r\x1b[2K":
                shown[-1] = ""
            elif part == "\n":
                shown.append("")
            else:
                shown[-1] += part
        return shown


def short(step: int, **changed: Any) -> StepMetrics:
    """A record whose line fits a terminal."""
    return record(step, clip_factor=1.0, stall_s={}, **changed)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


TYPICAL = record(
    120,
    loss=2.34567,
    grad_norm=1.2345,
    clip_factor=1.0,
    epoch=0.314,
    tokens_per_s=12345.0,
    step_s=4.21,
    stall_s={"weights": 0.9, "nvme_read": 0.1},
)


def test_the_line_says_everything() -> None:
    assert step_line(TYPICAL, 1000, 3.7) == (
        "step 120/1000  loss 2.346  norm 1.23  12.3k tok/s  4.21 s  88% bound  epoch 0.31"
        "  wait weights 21%"
    )


def test_a_step_that_is_faster_than_possible() -> None:
    assert "  4.21 s  >100% bound (measured slower)  epoch" in step_line(TYPICAL, 1000, 4.3)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (91, "step 120/1000 loss 2.346 norm 1.23 12.3k tok/s 4.21 s 88% bound epoch 0.31 wait weights 21%"),
        (80, "120/1000 loss 2.346 norm 1.23 12.3k tok/s 4.21 s 88% bound epoch 0.31"),
        (60, "120/1000 loss 2.346 norm 1.23 12.3k tok/s 4.21 s 88% bound"),
        (20, "120/1000 loss 2.346"),
        (5, "120/1"),
    ],
)
def test_what_matters_least_goes_first(columns: int, line: str) -> None:
    assert step_line(TYPICAL, 1000, 3.7, columns) == line


metrics_strategy = st.builds(
    lambda step, **changed: record(step, **changed),
    step=st.integers(1, 10**9),
    loss=st.floats(),
    grad_norm=st.floats(),
    tokens_per_s=st.floats(0, 1e15),
    step_s=st.floats(0, 1e9),
    skipped=st.booleans(),
    stall_s=st.dictionaries(
        st.sampled_from(["weights", "gradients", "nvme_read", "dram_frame"]), st.floats(0, 1e9)
    ),
)


@given(metrics_strategy, st.none() | st.floats(1e-9, 1e9), st.integers(1, 80))
def test_the_line_is_never_wider_than_allowed(
    metrics: StepMetrics, bound_s: float | None, columns: int
) -> None:
    line = step_line(metrics, 10**9, bound_s, columns)
    assert 0 < len(line) <= columns
    assert line.isprintable()


def test_without_bound_and_waits_the_line_is_short() -> None:
    bare = record(1, stall_s={}, clip_factor=1.0)
    assert step_line(bare, 2, None) == "step 1/2  loss 10.00  norm 2  256 tok/s  0.5 s  epoch 0.10"


def test_a_clipped_step_shows_its_factor_and_routers_their_losses() -> None:
    """C05: the norm is that before clipping."""
    line = step_line(record(1, router_aux_loss=1.02, router_z_loss=0.5, stall_s={}), 2, None)
    assert line == "step 1/2  loss 10.00  aux 1.02  z 0.5  norm 2 x0.5  256 tok/s  0.5 s  epoch 0.10"


def test_not_a_number_is_shown_as_such() -> None:
    line = step_line(record(1, loss=math.nan, grad_norm=math.inf, clip_factor=1.0, skipped=True), 2, None)
    assert line.startswith("step 1/2  SKIPPED  loss nan  norm inf  ")


def shown_steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"step (\d+)/", text)]


def test_a_file_gets_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LiveLine(stream, last_step=100, clock=clock)
    for step in range(1, 101):
        progress.step(short(step, skipped=step == 42))
        clock.now_s += 0.25
    progress.close()
    # The first, one in two seconds (eight steps) since the one before, the skipped one, and the last.
    assert shown_steps(stream.getvalue()) == [1, 9, 17, 25, 33, 41, 42, 50, 58, 66, 74, 82, 90, 98, 100]
    assert stream.getvalue().isascii()
    assert "\r" not in stream.getvalue()


def test_a_run_that_ends_early_still_shows_its_last_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LiveLine(stream, last_step=100, clock=clock)
    for step in (1, 2, 3):
        progress.step(short(step))
    progress.close()
    progress.close()
    assert shown_steps(stream.getvalue()) == [1, 3]


def test_a_terminal_keeps_one_line() -> None:
    stream, clock = Terminal(), Clock()
    progress = LiveLine(stream, last_step=100, bound_s=0.4, clock=clock)
    for step in range(1, 51):
        progress.step(short(step))
        assert len(stream.lines()) == 1
        assert len(stream.lines()[0]) <= 79
        clock.now_s += 0.06
    progress.close()
    assert shown_steps("\n".join(stream.lines())) == [50]
    assert stream.lines()[-1] == ""


def test_events_and_skipped_steps_stay_above_the_live_line() -> None:
    stream, clock = Terminal(), Clock()
    progress = LiveLine(stream, last_step=9, clock=clock)
    progress.event("resumed")
    for step in range(1, 6):
        progress.step(short(step, skipped=step == 3))
        if step == 4:
            progress.event("checkpoint written")
        clock.now_s += 1
    lines = stream.lines()
    assert [line.split("  ")[0] for line in lines] == [
        "resumed",
        "step 3/9",
        "checkpoint written",
        "step 5/9",
    ]
    progress.close()
    assert stream.lines() == [*lines, ""]


def test_a_skipped_last_step_leaves_no_blank_line() -> None:
    stream = Terminal()
    progress = LiveLine(stream, last_step=2, clock=Clock())
    progress.step(short(2, skipped=True))
    progress.close()
    assert len(stream.lines()) == 2
    assert stream.lines()[1] == ""


def test_a_narrow_terminal_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    LiveLine(stream, last_step=1000, clock=Clock()).step(TYPICAL)
    assert stream.lines() == ["120/1000 loss 2.346 norm 1.23"]


PLAN = PlanReport(
    parameters=1000, tokens_per_step=128, first_step=1, last_step=2, dtypes={"weight": "bfloat16"}, tiers=(),
    bound_s={"nvme": 0.25},
)  # fmt: skip


def test_the_observer_tells_the_whole_story() -> None:
    stream, summary = io.StringIO(), RunSummary()
    with ConsoleCallback(stream) as observer:
        observer.on_event("state: random")
        observer.on_plan(PLAN)
        for step in (1, 2):
            summary.add(record(step))
            observer.on_step(short(step))
        observer.on_end(summary)
    text = stream.getvalue()
    order = [
        "state: random",
        "1.00k parameters",
        "at least 0.25 s",
        "step 1/2",
        "50% bound",
        "step 2/2",
        "Traffic",
    ]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)
    assert max(map(len, text.splitlines())) <= 80


def test_an_error_leaves_the_cursor_on_a_new_line() -> None:
    stream = Terminal()

    def fail_in_step_2() -> None:
        with ConsoleCallback(stream) as observer:
            observer.on_plan(PLAN)
            observer.on_step(short(1))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_in_step_2()
    assert stream.getvalue().endswith("\n")
    assert shown_steps(stream.getvalue())[-1] == 1


def test_steps_before_the_plan_are_a_bug() -> None:
    with pytest.raises(RuntimeError, match="on_step before on_plan"):
        ConsoleCallback(io.StringIO()).on_step(record(1))


@pytest.mark.parametrize(
    ("progress", "elapsed_s", "line"),
    [
        (Progress("tokenising a.jsonl", 1 << 30, 4 << 30), 10.0,
         "tokenising a.jsonl  25%  1.00 GiB of 4.00 GiB  107 MB/s  30 s left"),
        (Progress("tokenising a.jsonl", 4 << 30, 4 << 30), 10.0,
         "tokenising a.jsonl  100%  4.00 GiB of 4.00 GiB  429 MB/s"),
        (Progress("reading", 12345, None, "rows"), 2.0, "reading  12,345 rows  6.17k rows/s"),
        (Progress("reading", 0, 36000, "rows"), 0.0, "reading  0%  0 of 36,000 rows"),
        (Progress("reading", 1, 36000, "rows"), 1.0, "reading  0%  1 of 36,000 rows  1 rows/s  10.0 h left"),
        (Progress("reading", 0, 0), 1.0, "reading  0%  0 B of 0 B"),
    ],
)  # fmt: skip
def test_a_preparation_in_one_line(progress: Progress, elapsed_s: float, line: str) -> None:
    assert progress_line(progress, elapsed_s) == line


def test_what_was_done_before_took_no_time() -> None:
    assert progress_line(Progress("loading", 2 << 30, 3 << 30), 10.0, begun=1 << 30) == (
        "loading  67%  2.00 GiB of 3.00 GiB  107 MB/s  10 s left"
    )
    stream, clock = io.StringIO(), Clock()
    live = LiveLine(stream, clock=clock)
    live.progress(Progress("loading", 1 << 30, 3 << 30))
    clock.now_s += 10
    live.progress(Progress("loading", 2 << 30, 3 << 30))
    assert "  107 MB/s  10 s left" in stream.getvalue()


@given(
    st.builds(
        Progress,
        st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=200),
        st.integers(0, 10**15),
        st.none() | st.integers(0, 10**15),
        st.sampled_from(["bytes", "rows"]),
    ),
    st.floats(0, 1e9),
    st.integers(1, 80),
)
def test_the_line_of_a_preparation_fits(progress: Progress, elapsed_s: float, columns: int) -> None:
    assert 0 < len(progress_line(progress, elapsed_s, columns)) <= columns


def prepare(live: LiveLine, clock: Clock, seconds: int) -> None:
    for done in range(seconds + 1):
        live.progress(Progress("tokenising", done, seconds))
        clock.now_s += 1


def test_a_file_hears_of_a_preparation_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    live = LiveLine(stream, clock=clock)
    prepare(live, clock, 9)
    assert stream.getvalue() == ""
    live.prepared()
    prepare(live, clock, 25)
    assert re.findall(r"(\d+)%", stream.getvalue()) == ["40", "80"]
    assert "\r" not in stream.getvalue()


def test_a_preparation_leaves_no_line_on_a_terminal() -> None:
    stream, clock = Terminal(), Clock()
    live = LiveLine(stream, clock=clock, last_step=3)
    prepare(live, clock, 3)
    assert [line.split("  ")[:2] for line in stream.lines()] == [["tokenising", "100%"]]
    live.event("data: 3 tokens")
    prepare(live, clock, 2)
    live.prepared()
    live.step(short(1))
    assert [line.split("  ")[0] for line in stream.lines()] == ["data: 3 tokens", "step 1/3"]
    live.event("sampling")
    prepare(live, clock, 2)
    live.close()
    assert stream.lines()[-1] == ""
