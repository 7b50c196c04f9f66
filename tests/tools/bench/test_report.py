"""The report directory: complete or not there, opens without anything else, replaces only reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.html_page import Page

from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import Measurement
from tierstream.tools.bench import report
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import OutputOptions, TracedCase, check_output, write_report
from tierstream.tools.bench.result import Result, grids

PLOTS = [PlotSpec("copies", "Copies", "size_bytes", ("memory",)), PlotSpec("more", "More", "memory", ())]


def made(title: str = "Copies <of> & bytes") -> Result:
    measurements = [
        Measurement({"memory": memory, "size_bytes": size}, "B", (1e9, 2e9), 0.5, "<b>note</b>")
        for memory in ("arena", "torch")
        for size in (4096, 8192)
    ]
    return Result(
        "copy", title, ["tierstream", "bench", "copy"], {"cpu": "AMD & co"}, measurements, ["a note"]
    )


def test_a_report_is_a_page_of_its_own_a_json_and_a_png_per_plot(tmp_path: Path) -> None:
    result, directory = made(), tmp_path / "new" / "report"
    write_report(result, PLOTS, directory)
    names = ["plot-copies.png", "plot-more.png", "report.html", "result.json"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert [path.name for path in directory.parent.iterdir()] == ["report"]
    assert json.loads((directory / "result.json").read_text()) == result.to_json()
    page = Page((directory / "report.html").read_text())
    assert page.open == []
    assert page.links == []
    assert page.images == [(directory / name).read_bytes() for name in names[:2]]
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in page.images)
    (grid,) = grids(result)
    assert page.rows == [grid.columns, *grid.rows]
    for text in (result.title, "AMD & co", "tierstream bench copy", result.date, "a note", grid.caption):
        assert text in page.text


def test_an_earlier_report_is_replaced_as_a_whole(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    write_report(made("first"), PLOTS, directory)
    check_output(OutputOptions(report=str(directory)))
    write_report(made("second"), PLOTS[:1], directory)
    assert "second" in (directory / "report.html").read_text()
    assert not (directory / "plot-more.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_traces_are_files_and_pictures_of_the_page(tmp_path: Path) -> None:
    traces = [
        TracedCase(title, b'{"traceEvents":[]}', b"\x89PNG" + title.encode())
        for title in ("tiered, clip 0.5, 4 layers", "tiered, no clipping, 4 layers")
    ]
    write_report(made(), PLOTS[:1], tmp_path / "report", traces)
    names = [f"trace-tiered-{part}-4-layers" for part in ("clip-0.5", "no-clipping")]
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(
        ["plot-copies.png", "report.html", "result.json"]
        + [f"{name}.{suffix}" for name in names for suffix in ("json", "png")]
    )
    page = Page((tmp_path / "report" / "report.html").read_text())
    assert page.images[1:] == [trace.png for trace in traces]
    check_output(OutputOptions(report=str(tmp_path / "report")))
    write_report(made(), PLOTS[:1], tmp_path / "report")
    assert not list((tmp_path / "report").glob("trace-*"))


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    check_output(OutputOptions(report=str(tmp_path)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_report(made(), PLOTS, (tmp_path / "link").resolve())
    assert (tmp_path / "link" / "report.html").is_file()


@pytest.mark.parametrize("names", [["thesis.tex"], ["report.html"], ["report.html", "result.json", "me.png"]])
def test_a_directory_with_something_else_is_refused_and_kept(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text(name)
    with pytest.raises(ConfigError, match=r"is no earlier report; name a new directory"):
        check_output(OutputOptions(report=str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_report_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    directory, written = tmp_path / "report", []
    write_report(made("first"), PLOTS, directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    write_file = report.write_file

    def full(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) == fails_at:
            raise StorageError("writing", path, OSError(28, "full"))
        write_file(path, data)

    monkeypatch.setattr(report, "write_file", full)
    with pytest.raises(StorageError, match="the drive is full"):
        write_report(made("second"), PLOTS, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_places_that_cannot_take_the_json_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        check_output(OutputOptions(json=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"there is no directory .*absent; make it first"):
        check_output(OutputOptions(json=str(tmp_path / "absent" / "x.json")))
    check_output(OutputOptions(json="-"))
    check_output(OutputOptions(json=str(tmp_path / "x.json"), report=str(tmp_path / "a" / "b")))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        check_output(OutputOptions(report=str(tmp_path / "file")))
