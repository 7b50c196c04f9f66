"""Directories and links that take the place of others: at every instant the old one or the new one stands."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.crash import crash_everywhere
from support.faults import FaultySyscalls, fail

from tierstream.io import seam
from tierstream.io.durable import publish_directory, write_link
from tierstream.io.errors import StorageError


def build(directory: Path, content: str) -> None:
    (directory / "inner").mkdir(parents=True)
    for name in ("one", "inner/two"):
        (directory / name).write_text(content * 3000)


def held(directory: Path) -> str:
    """The content that `build` gave it."""
    texts = {(directory / name).read_text() for name in ("one", "inner/two")}
    assert {len(text) for text in texts} == {9000}
    assert len(texts) == 1
    return texts.pop()[:3]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
def test_a_directory_takes_the_place_of_another(tmp_path: Path, exchange: bool) -> None:
    build(tmp_path / "place", "old")
    build(tmp_path / "place.tmp", "new")
    faults = FaultySyscalls(*([] if exchange else [fail(errno.ENOSYS, on="exchange")]))
    with seam.injected(faults):
        publish_directory(tmp_path / "place.tmp", tmp_path / "place", replace=True)
    assert held(tmp_path / "place") == "new"
    assert names(tmp_path) == ["place"]
    assert ("rename" in [call.name for call in faults.calls if call.path.endswith("place")]) != exchange


def test_without_leave_nothing_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "place", "old")
    build(tmp_path / "place.tmp", "new")
    with pytest.raises(StorageError, match=r"publishing .*place failed: File exists"):
        publish_directory(tmp_path / "place.tmp", tmp_path / "place")
    assert (held(tmp_path / "place"), held(tmp_path / "place.tmp")) == ("old", "new")


def test_where_names_cannot_be_swapped_a_failure_puts_the_old_one_back(tmp_path: Path) -> None:
    build(tmp_path / "place", "old")
    build(tmp_path / "place.tmp", "new")
    faults = FaultySyscalls(
        fail(errno.EINVAL, on="exchange"), fail(errno.EIO, on="rename", path="*/place", times=1)
    )
    with seam.injected(faults), pytest.raises(StorageError, match="renaming"):
        publish_directory(tmp_path / "place.tmp", tmp_path / "place", replace=True)
    assert (held(tmp_path / "place"), held(tmp_path / "place.tmp")) == ("old", "new")


def test_a_power_cut_while_a_directory_is_replaced(tmp_path: Path) -> None:
    def prepare(place: Path) -> None:
        build(place / "place", "old")
        build(place / "place.tmp", "new")

    found = crash_everywhere(
        tmp_path, prepare, lambda place: publish_directory(place / "place.tmp", place / "place", replace=True)
    )
    assert {held(place / "place") for place in found} == {"old", "new"}
    assert held(found[-1] / "place") == "new"


def test_a_link_is_made_and_moved(tmp_path: Path) -> None:
    (tmp_path / "best.tmp").symlink_to("left by a crash")
    for target in ("one", "two"):
        write_link(tmp_path / "best", target)
        assert os.readlink(tmp_path / "best") == target
    assert names(tmp_path) == ["best"]
    with (
        seam.injected(FaultySyscalls(fail(errno.EIO, on="symlink"))),
        pytest.raises(StorageError, match=r"linking .*best failed"),
    ):
        write_link(tmp_path / "best", "three")
    assert os.readlink(tmp_path / "best") == "two"


def test_a_power_cut_while_a_link_is_moved(tmp_path: Path) -> None:
    found = crash_everywhere(
        tmp_path,
        lambda place: (place / "best").symlink_to("one"),
        lambda place: write_link(place / "best", "two"),
    )
    assert {os.readlink(place / "best") for place in found} == {"one", "two"}
    assert os.readlink(found[-1] / "best") == "two"
