"""The picture of a traced step: bars, gaps and causes from made-up spans; a PNG however many there are."""

from __future__ import annotations

import random

import pytest
from support.png import size_of

from tierstream.engine.trace.picture import WAITING, Bar, draw, picture, timeline
from tierstream.engine.trace.trace import Span, Track
from tierstream.tiered.layout import Page


def work(track: Track, what: str, unit: str, begin: float, end: float, enqueued: float = 0.0) -> Span:
    return Span(track, what, unit, begin, end, enqueued_s=(enqueued, enqueued))


def wait(track: Track, cause: str, begin: float, end: float) -> Span:
    return Span(track, cause, "", begin, end, waiting=True)


def page(track: Track, begin: float, end: float) -> Span:
    return Span(track, "nvme read", "", begin, end, page=Page("layers.0", "weight", 0), nbytes=4096)


#: One step from 100 s to 101 s. The lane is idle for 200 ms, for weights, and for 100 ms, for the verdict.
SPANS = [
    Span(Track.STEPS, "step", "7", 100.0, 101.0),
    work(Track.UPLOAD, "weight", "layers.0", 100.15, 100.2, enqueued=100.15),
    work(Track.COMPUTE, "forward", "layers.0", 100.2, 100.5, enqueued=100.19),
    work(Track.COMPUTE, "forward", "layers.1", 100.5, 100.6, enqueued=100.19),
    work(Track.COMPUTE, "backward", "layers.1", 100.6, 100.9, enqueued=100.19),
    wait(Track.HOST, "verdict", 100.9, 101.0),
    wait(Track.UPLOADER, "page", 99.0, 100.15),
    page(Track.READS, 99.5, 100.1),
    page(Track.READS, 100.0, 100.14),
    page(Track.READS, 100.3, 100.4),
    Span(Track.UPDATER, "adamw", "layers.1", 100.2, 100.3),
    Span(Track.UPDATER, "adamw", "layers.2", 101.5, 101.6),  # after the step
]


def rounded(bars: list[Bar]) -> list[tuple[str, float, float]]:
    return [(bar.kind, round(bar.begin_ms, 6), round(bar.end_ms, 6)) for bar in bars]


def test_bars_and_gaps_are_those_of_the_step() -> None:
    line = timeline(SPANS)
    assert (line.step, round(line.length_ms, 6)) == (7, 1000)
    assert {track: rounded(bars) for track, bars in line.rows.items()} == {
        Track.COMPUTE: [("forward", 200, 600), ("backward", 600, 900)],
        Track.UPLOAD: [("weight", 150, 200)],
        Track.HOST: [(WAITING, 900, 1000)],
        Track.UPDATER: [("adamw", 200, 300)],
        Track.UPLOADER: [(WAITING, 0, 150)],
        Track.READS: [("pages", 0, 140), ("pages", 300, 400)],
    }
    assert rounded(line.gaps) == [
        ("weights: page", 0, 150), ("weights: copy", 150, 200), ("verdict", 900, 1000),
    ]  # fmt: skip
    assert {cause: round(lost, 6) for cause, lost in line.idle_ms.items()} == {
        "weights: page": 150, "verdict": 100, "weights: copy": 50,
    }  # fmt: skip
    assert list(line.idle_ms) == ["weights: page", "verdict", "weights: copy"]


def test_the_step_in_the_middle_is_shown() -> None:
    lengths = [3.0, 1.0, 2.0, 9.0]
    steps = [Span(Track.STEPS, "step", str(n), 10.0 * n, 10.0 * n + s) for n, s in enumerate(lengths)]
    assert timeline(steps).step == 2
    assert timeline(steps[:3]).step == 2
    assert timeline(steps[:1]).step == 0


def test_the_legend_says_what_was_lost() -> None:
    figure = draw(timeline(SPANS), "tiny")
    (axes,) = figure.axes
    what, causes = figure.legends
    assert [text.get_text() for text in causes.get_texts()] == [
        "weights: page: 150 ms, 15.0%", "verdict: 100 ms, 10.0%", "weights: copy: 50 ms, 5.0%",
    ]  # fmt: skip
    assert causes.get_title().get_text() == "compute waits 300 ms, for"
    assert {text.get_text() for text in what.get_texts()} == {
        "forward", "backward", "adamw", "weight", "pages", "waiting",
    }  # fmt: skip
    assert axes.get_title("left") == "tiny: step 7: 1000 ms, of which the lane compute works 70 %"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["compute", "upload", "compute host", "updater", "uploader", "nvme reads"]
    assert [text.get_text() for text in axes.texts] == ["weights:\npage", "weights:\ncopy", "verdict"]


def test_a_cause_that_would_read_nothing_is_not_in_the_legend() -> None:
    spans = [span for span in SPANS if span.what != "verdict"]
    spans += [wait(Track.HOST, "gradients", 100.9, 100.9002), wait(Track.HOST, "verdict", 100.9002, 101.0)]
    line = timeline(spans)
    assert round(line.idle_ms["gradients"], 6) == 0.2
    _, causes = draw(line).legends
    assert [text.get_text().split(":")[-1] for text in causes.get_texts()][-1] == " 50 ms, 5.0%"
    assert not any("gradients" in text.get_text() for text in causes.get_texts())


def test_tens_of_thousands_of_spans_are_few_collections() -> None:
    random.seed(0)
    spans = [*SPANS]
    for _ in range(20_000):
        begin = random.uniform(100.0, 101.0)
        spans.append(page(Track.WRITES, begin, begin + random.uniform(0.0, 1e-4)))
    line = timeline(spans)
    assert len(line.rows[Track.WRITES]) < 2000
    (axes,) = draw(line).axes
    assert len(axes.collections) == len(line.rows) + 2
    width, height = size_of(picture(spans))
    assert width > height > 300


@pytest.mark.parametrize("what", ["checkpoint", "something new"])
def test_what_it_does_not_know_is_shown_too(what: str) -> None:
    spans = [*SPANS, Span(Track.HOST, what, "", 100.5, 100.6)]
    assert ("other", 500, 600) in rounded(timeline(spans).rows[Track.HOST])
    assert size_of(picture(spans))
