"""`tierstream bench storage`: what is measured, what it is called, and that nothing stays."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.drive_kinds import drive_of_kind, open_descriptors, small_ext4
from support.faults import FaultySyscalls, fail, refuse_direct_open
from support.storage_bench import TINY, StorageBench, rows, unexpected

from tierstream.engine.measure.streaming import StreamedStore
from tierstream.engine.plan import STATE_FOLDER
from tierstream.io import seam
from tierstream.io.drives import DirectoryLock
from tierstream.io.posix import create_file
from tierstream.io.scratch import ScratchFolder
from tierstream.tools.bench import storage

MIB = 1 << 20
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def figure_rows(result: dict[str, Any]) -> list[list[str]]:
    """Rate and CPU seconds of every measurement, with three digits, as the tables must show them."""
    return [
        [f"{entry['median'] / 1e9:#.3g}".rstrip("."), f"{entry['cpu_s_per_giga']:#.3g}".rstrip(".")]
        for entry in result["measurements"]
        if min(entry["median"] / 1e9, entry["cpu_s_per_giga"]) > 0.001
    ]


def test_screen_json_and_report_say_the_same(bench: StorageBench, direct: Path, tmp_path: Path) -> None:
    target, report = tmp_path / "result.json", tmp_path / "report"
    status, out, err = bench.run("storage", direct, *TINY, "--json", target, "--report", report)
    assert (status, unexpected(err)) == (0, [])
    assert [path for path in open_descriptors() if str(direct) in path] == []
    assert os.listdir(direct) == []
    plain = json.loads(target.read_text())
    assert json.loads((report / "result.json").read_text()) == plain
    names = ["plot-best.png", "plot-tuning.png", "report.html", "result.json"]
    assert sorted(path.name for path in report.iterdir()) == names
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", (report / "report.html").read_text(), re.DOTALL)
    in_page = Counter(unescape(cell).strip() for cell in cells)
    on_screen = Counter(out.split())
    figures = Counter(itertools.chain.from_iterable(figure_rows(plain)))
    assert len(figure_rows(plain)) > 8
    assert figures <= in_page
    assert figures <= on_screen
    for note in plain["notes"]:
        assert note in " ".join(out.split())
        assert note in unescape((report / "report.html").read_text())
    outputs = ["--json", str(target), "--report", str(report)]
    assert plain["command"] == ["tierstream", "bench", "storage", str(direct), *TINY, *outputs]
    assert plain["title"] == f"Storage at {direct}"


def test_every_combination_is_tried_once(bench: StorageBench, direct: Path) -> None:
    options = [*TINY, *shlex.split("--block 64KiB 128KiB --page 128KiB --queue-depth 2 4")]
    tuned = rows(bench.measured(direct, *options), "tuning")
    keys = ("access", "block_bytes", "threads", "queue_depth")
    wanted = itertools.product(("read", "write", "mixed"), (65536, 131072), (1, 2), (2, 4))
    assert Counter(tuple(entry[key] for key in keys) for entry in tuned) == Counter(wanted)
    assert {(entry["backend"], entry["path"], entry["buffer"]) for entry in tuned} == {
        ("posix", "posix-direct", "host")
    }
    assert all(len(entry["rates"]) == 2 for entry in tuned)


def test_only_what_is_asked_for_is_measured(bench: StorageBench, direct: Path) -> None:
    plain = bench.measured(direct, *TINY, "--access", "read")
    assert {entry["access"] for entry in rows(plain, "tuning")} == {"read"}
    # The store's passes say what training gets, whatever else is asked.
    assert [entry["access"] for entry in rows(plain, "best")] == ["stream", "update", "read", "read"]


DIRECT_BEST = [
    ("stream", "store, posix", "posix-direct"),
    ("update", "store, posix", "posix-direct"),
    ("read", "posix", "posix-direct"),
    ("read", "posix", "posix-buffered"),
    ("write", "posix", "posix-direct"),
    ("write", "posix", "posix-buffered"),
    ("mixed", "posix", "posix-direct"),
    ("first write", "posix", "posix-direct"),
]


def test_the_best_tuning_is_measured_in_every_way(bench: StorageBench, direct: Path) -> None:
    plain = bench.measured(direct, *TINY)
    best = rows(plain, "best")
    assert [(entry["access"], entry["backend"], entry["path"]) for entry in best] == DIRECT_BEST
    assert {entry["note"] for entry in best if entry["path"] == "posix-direct"} == {""}
    tunings = {(entry["threads"], entry["block_bytes"], entry["queue_depth"]) for entry in best}
    assert len(tunings) == 1
    ((threads, _, depth),) = tunings
    assert f"best there: {threads} threads, blocks of 64.00 KiB, queue depth {depth}" in plain["notes"]
    assert f"{direct}, posix to host memory: posix-direct" in plain["notes"]


@needs_fio
def test_fio_stands_beside_every_plain_access(bench: StorageBench, direct: Path) -> None:
    plain = bench.measured(direct, *TINY, "--compare", "fio")
    best = rows(plain, "best")
    by_fio = [entry for entry in best if entry["backend"].startswith("fio ")]
    assert [(entry["access"], entry["path"]) for entry in by_fio] == [
        (access, "direct") for access in ("read", "write", "mixed")
    ]
    ours = [entry for entry in best if entry not in by_fio]
    like_fio = [entry for entry in ours if entry["buffer"] == "host, reused"]
    assert [(entry["access"], entry["path"]) for entry in like_fio] == [
        (access, "posix-direct") for access in ("read", "write", "mixed")
    ]
    usual = [(e["access"], e["backend"], e["path"]) for e in ours if e not in like_fio]
    assert usual == DIRECT_BEST
    beside = [note for note in plain["notes"] if "of what fio" in note]
    assert [note.split(":")[0] for note in beside] == ["read", "write", "mixed"]
    for note, theirs in zip(beside, by_fio, strict=True):
        (mine,) = (entry["median"] for entry in like_fio if entry["access"] == theirs["access"])
        assert f": {mine / theirs['median']:.2f} of what {theirs['backend']} gets" in note
    assert os.listdir(direct) == []


def test_a_memory_file_system_is_called_what_it_is(bench: StorageBench) -> None:
    with drive_of_kind("posix-tmpfs") as drive:
        plain = bench.measured(drive.directory, *TINY)
        assert os.listdir(drive.directory) == []
    assert {entry["path"] for entry in plain["measurements"]} == {"posix-buffered"}
    for entry in plain["measurements"]:
        reads = entry["access"] in ("read", "mixed", "stream", "update")
        assert entry["note"].startswith("cached: ") == reads, entry
    # Nothing is measured twice under one name.
    best = [(entry["access"], entry["backend"]) for entry in rows(plain, "best")]
    assert len(set(best)) == len(best)


@needs_fio
def test_what_fio_reads_from_memory_is_said_too(bench: StorageBench) -> None:
    with drive_of_kind("posix-tmpfs") as drive:
        plain = bench.measured(drive.directory, *TINY, "--compare", "fio")
    by_fio = [entry for entry in plain["measurements"] if entry["backend"].startswith("fio ")]
    assert {entry["path"] for entry in by_fio} == {"buffered"}
    assert [("cached: " in entry["note"], entry["access"]) for entry in by_fio] == [
        (True, "read"), (False, "write"), (True, "mixed")
    ]  # fmt: skip


def test_refused_direct_io_is_called_buffered(bench: StorageBench, tmp_path: Path) -> None:
    with seam.injected(FaultySyscalls(refuse_direct_open())):
        plain = bench.measured(tmp_path, *TINY)
    assert {entry["path"] for entry in plain["measurements"]} == {"posix-buffered"}
    assert plain["notes"][0].startswith(f"{tmp_path}, posix to host memory: posix-buffered (")
    assert os.listdir(tmp_path) == []


def test_a_failing_drive_is_named_and_nothing_stays(bench: StorageBench, direct: Path) -> None:
    with seam.injected(FaultySyscalls(fail(errno.EIO, on="pwritev", path="*/store-*", at=5))):
        status, out, err = bench.run("storage", direct, *TINY)
    assert (status, out) == (2, "")
    (message,) = unexpected(err)
    assert [text for text in (str(direct), "Input/output error", "dmesg") if text not in message] == []
    assert os.listdir(direct) == []


@pytest.fixture
def written(direct: Path) -> Path:
    """A file of 2 MiB that lies on the drive."""
    with ScratchFolder(direct) as folder:
        path = Path(folder.new_file("file", 2 * MIB)).rename(direct / "file")
    return path


def test_a_file_is_only_read(bench: StorageBench, written: Path) -> None:
    content, status = written.read_bytes(), written.stat()
    watched = FaultySyscalls()
    with seam.injected(watched):
        plain = bench.measured(written, *TINY)
    assert {entry["access"] for entry in plain["measurements"]} == {"read"}
    assert [(entry["backend"], entry["path"]) for entry in rows(plain, "best")] == [
        ("posix", "posix-direct"),
        ("posix", "posix-buffered"),
    ]
    assert written.read_bytes() == content
    assert written.stat().st_mtime_ns == status.st_mtime_ns
    assert os.listdir(written.parent) == ["file"]
    touching = {call.name for call in watched.calls if call.path == str(written)}
    assert touching & {"pwritev", "ftruncate", "posix_fallocate", "unlink", "rename"} == set()


def test_a_file_that_may_not_be_written_is_read_all_the_same(bench: StorageBench, written: Path) -> None:
    written.chmod(0o444)
    assert len(rows(bench.measured(written, *TINY), "best")) == 2


def test_files_that_would_measure_nothing_are_refused(bench: StorageBench, direct: Path) -> None:
    sparse, reserved = direct / "sparse", direct / "reserved"
    with sparse.open("wb") as file:
        file.truncate(2 * MIB)
    create_file(str(reserved), 2 * MIB)
    remedy = "use a file whose bytes were really written"
    bench.refused("storage", sparse, *TINY, said=[str(sparse), "2.00 MiB are holes (a sparse file)", remedy])
    bench.refused("storage", reserved, *TINY, said=[str(reserved), "never written (fallocate)", remedy])
    missing = direct / "missing"
    said = [str(missing), "No such file or directory", "create it or name another"]
    bench.refused("storage", missing, *TINY, said=said)
    (direct / "small").write_bytes(b"x" * 65535)
    said = [f"{direct / 'small'} has 65535 bytes", "a block of 64 KiB", "larger file"]
    bench.refused("storage", direct / "small", *TINY, said=said)
    (direct / "empty").touch()
    bench.refused("storage", direct / "empty", *TINY, said=["empty has 0 bytes", "larger file"])
    bench.refused("storage", "/dev/null", *TINY, said=["/dev/null", "name a directory, not a file"])


@pytest.mark.parametrize("access", ["write", "mixed"])
def test_writes_to_a_file_are_refused(bench: StorageBench, written: Path, access: str) -> None:
    content = written.read_bytes()
    said = [f"{written} is a file, which is only read", "name a directory to measure writes"]
    bench.refused("storage", written, *TINY, "--access", access, said=said)
    assert written.read_bytes() == content


class Weights:
    """Notes the drives of every store that is streamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[tuple[str, float]]] = []
        open_store = StreamedStore.__init__

        def opening(store: StreamedStore, drives: Any, **sizes: int) -> None:
            self.seen.append([(str(drive.directory), drive.weight) for drive in drives])
            open_store(store, drives, **sizes)

        monkeypatch.setattr(StreamedStore, "__init__", opening)


def median(plain: dict[str, Any], drive: Path, access: str) -> float:
    (found,) = (
        entry["median"]
        for entry in rows(plain, "best")
        if (entry["drive"], entry["access"], entry["backend"]) == (str(drive), access, "posix")
        and entry["path"] != "posix-buffered"
    )
    return float(found)


def check_several(bench: StorageBench, places: list[Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    weights = Weights(monkeypatch)
    plain = bench.measured(*places, *TINY)
    names = list(map(str, places))
    assert [os.listdir(place) for place in places] == [[], []]
    assert Counter(entry["drive"] for entry in rows(plain, "tuning")) == dict.fromkeys(names, 6)
    best = Counter(entry["drive"] for entry in rows(plain, "best"))
    assert best == {**dict.fromkeys(names, len(DIRECT_BEST)), "all of them": 2}
    together = [entry for entry in rows(plain, "best") if entry["drive"] == "all of them"]
    assert [(entry["access"], entry["backend"]) for entry in together] == [
        ("stream", "store, posix"), ("update", "store, posix")
    ]  # fmt: skip
    *_, last = weights.seen
    assert len(weights.seen) == 3
    assert [weight for _, weight in last] == [median(plain, place, "mixed") for place in places]
    assert [Path(root).parents[1] for root, _ in last] == places
    return plain


def test_two_directories_of_one_drive(
    bench: StorageBench, direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [direct / "a", direct / "b"]
    for place in places:
        place.mkdir()
    plain = check_several(bench, places, monkeypatch)
    assert f"{places[0]}, {places[1]} lie on one drive: together they give what it gives" in plain["notes"]


def test_two_drives(
    bench: StorageBench, direct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_ext4(tmp_path, 64 * MIB) as other:
        (other / "lost+found").rmdir()
        plain = check_several(bench, [direct, other], monkeypatch)
    assert not [note for note in plain["notes"] if "lie on one drive" in note]


def test_space_is_shared_by_directories_of_one_drive(bench: StorageBench, tmp_path: Path) -> None:
    """Each alone would have room."""
    with small_ext4(tmp_path, 32 * MIB) as drive:
        for name in "ab":
            (drive / name).mkdir()
        options = [*TINY, "--file-size", "4MiB"]
        said = [str(drive / "b"), "32.50 MiB", "are free"]
        bench.refused("storage", drive / "a", drive / "b", *options, said=said)
        assert [os.listdir(drive / name) for name in "ab"] == [[], []]
        assert bench.run("storage", drive / "a", *options)[0] == 0


def test_the_file_takes_an_eighth_of_what_is_free(
    bench: StorageBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    new_file = ScratchFolder.new_file

    def noted(folder: ScratchFolder, name: str, nbytes: int, **options: int) -> str:
        made.append(nbytes)
        return new_file(folder, name, nbytes, **options)

    monkeypatch.setattr(ScratchFolder, "new_file", noted)
    with small_ext4(tmp_path, 64 * MIB) as drive:
        (drive / "lost+found").rmdir()
        usage = os.statvfs(drive)
        bench.measured(drive, *TINY, "--file-size", "null", "--access", "read")
        assert os.listdir(drive) == []
    free_bytes = usage.f_bavail * usage.f_frsize
    assert made == [free_bytes // 8 // 65536 * 65536]


def test_the_plots_tell_all_series_apart() -> None:
    assert [plot.name for plot in storage.storage_plots([])] == ["tuning", "best"]


def test_a_neighbour_is_mentioned(bench: StorageBench, direct: Path) -> None:
    """What two benches get from one drive is what neither would get alone."""
    options = [*TINY, "--access", "read", "--threads", "1"]
    with ScratchFolder(direct):
        notes = bench.measured(direct, *options)["notes"]
    assert f"another program of ours was at work in {direct}: the drive gives more than this" in notes
    state = direct / STATE_FOLDER
    state.mkdir()
    with DirectoryLock(state):
        notes = bench.measured(direct, *options)["notes"]
    assert [note for note in notes if "was at work" in note]
    assert not [note for note in bench.measured(direct, *options)["notes"] if "was at work" in note]


def test_memory_is_not_compared_with_itself(bench: StorageBench) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        notes = bench.measured(folder, *TINY)["notes"]
    assert f"{folder} is memory, not a drive" in notes
    assert not [note for note in notes if "of the plain" in note]


def test_json_goes_into_a_pipe_and_through_a_link(bench: StorageBench, direct: Path, tmp_path: Path) -> None:
    """What stands there is written to, not replaced."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    options = [*TINY, "--access", "read", "--threads", "1"]
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert bench.run("storage", direct, *options, "--json", pipe)[0] == 0
    assert json.loads(os.read(reader, 1 << 20))["kind"] == "storage"
    os.close(reader)
    assert pipe.is_fifo()
    assert bench.run("storage", direct, *options, "--json", link)[0] == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["kind"] == "storage"
