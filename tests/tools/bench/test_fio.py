"""fio beside our own measurement: what it is told, which engine it gets, what is said when it fails."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tierstream.io.drive_rates import DriveTarget, Setting, Tuning
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import measure
from tierstream.io.scratch import ScratchFolder
from tierstream.io.workload import Access
from tierstream.tools.bench import fio
from tierstream.tools.bench.fio import Fio, find_fio

MIB = 1 << 20
SETTING = Setting(access="read", tuning=Tuning(threads=4, task_bytes=65536, queue_depth=8))
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")

#: As fio 3.33 prints it, cut to what is looked at.
RECORDED = {
    "fio version": "fio-3.33",
    "jobs": [
        {
            "jobname": "job-0",
            "error": 0,
            "job_runtime": 400,
            "read": {"io_bytes": 3 * MIB, "runtime": 90},
            "write": {"io_bytes": MIB, "runtime": 100},
            "usr_cpu": 5.0,
            "sys_cpu": 15.0,
        }
    ],
}
#: A program that notes what it is told, and where the files that it is to work on lie.
PROGRAM = """\
#!/bin/sh
[ "$1" = --version ] && {{ echo fio-3.33; exit 0; }}
for argument; do
    printf '%s\\n' "$argument" >> {log}
    case "$argument" in
    --directory=*) directory=$(printf %s "${{argument#--directory=}}" | sed 's/\\\\:/:/g') ;;
    --ioengine=*) engine="${{argument#--ioengine=}}" ;;
    esac
done
for link in "$directory"/*; do printf '> %s %s\\n' "${{link##*/}}" "$(readlink "$link")" >> {log}; done
echo --- >> {log}
case " {broken} " in *" $engine "*) echo "fio: engine $engine not loadable" >&2; exit 1 ;; esac
cat {answer}
exit {status}
"""


@dataclass
class FakeFio:
    """A program called fio, the only one on PATH beside the usual ones."""

    folder: Path

    def answers(self, text: str, *, status: int = 0, broken: str = "") -> str:
        """Makes it print `text` and end with `status`; with the engines of `broken` it fails."""
        (self.folder / "answer").write_text(text)
        names = {"log": self.folder / "log", "answer": self.folder / "answer"}
        program = self.folder / "fio"
        program.write_text(PROGRAM.format(**names, broken=broken, status=status))
        program.chmod(0o755)
        return str(program)

    def told(self) -> list[list[dict[str, str]]]:
        """Of every run its sections: the options for all jobs, then those of each job. `files` are links and
        what they lead to.
        """
        runs = []
        for text in (self.folder / "log").read_text().split("---\n")[:-1]:
            sections: list[dict[str, str]] = [{}]
            links = {}
            for line in text.splitlines():
                if line.startswith("> "):
                    name, _, place = line[2:].partition(" ")
                    links[name] = place
                    continue
                key, _, value = line.removeprefix("--").partition("=")
                if key == "name" and sections[-1].get("name"):
                    sections.append({})
                sections[-1][key] = value
            for section in sections[1:]:
                pattern, count = section.pop("filename_format"), int(section.pop("nrfiles"))
                names = [pattern.replace("$filenum", str(index)) for index in range(count)]
                section["files"] = "\n".join(links.pop(name) for name in names)
            assert links == {}
            runs.append(sections)
        return runs


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFio:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    find_fio.cache_clear()
    made = FakeFio(tmp_path)
    made.answers(json.dumps(RECORDED))
    return made


def program(engine: str, path: str = "fio") -> Fio:
    return Fio(path, "fio-3.33", engine)


def target(folder: Path, count: int, nbytes: int = MIB) -> DriveTarget:
    """Files that are there; nothing of them is looked at."""
    paths = [folder / f"file-{index}" for index in range(count)]
    for path in paths:
        path.touch()
    return DriveTarget(list(map(str, paths)), nbytes)


@pytest.mark.parametrize("access", ["read", "write", "mixed"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("threads", "depth"), [(4, 8), (8, 2)])
def test_fio_is_told_what_we_do(
    fake: FakeFio, tmp_path: Path, access: Access, direct: bool, threads: int, depth: int
) -> None:
    files = target(tmp_path, 3, MIB + 4096)
    tuning = Tuning(threads=threads, task_bytes=131072, queue_depth=depth)
    setting = replace(SETTING, access=access, direct=direct, tuning=tuning)
    case = program("io_uring").case(files, setting, 10 * MIB)
    assert case.labels == {
        "access": access, "backend": "fio io_uring", "path": "direct" if direct else "buffered",
        "buffer": "host", "block_bytes": 131072, "threads": threads, "queue_depth": depth,
    }  # fmt: skip
    case.run()
    ((common, job),) = fake.told()
    assert common.pop("directory")
    under_way = min(threads, depth)
    assert common == {
        "output-format": "json", "name": "global", "ioengine": "io_uring", "thread": "1",
        "rw": {"read": "read", "write": "write", "mixed": "rw"}[access], "rwmixread": "50",
        "bs": "131072", "iodepth": str(under_way), "direct": str(int(direct)),
        # whole blocks of every file; as much as asked for
        "size": str(3 * MIB), "io_size": str(10 * MIB),
        "file_service_type": "sequential", "openfiles": "3", "end_fsync": str(int(not direct)),
        "allow_file_create": "0", "fallocate": "none", "group_reporting": "1",
    }  # fmt: skip
    assert job == {"name": "job-0", "files": "\n".join(files.paths)}


def test_little_is_raised_to_what_keeps_the_queue_full(fake: FakeFio, tmp_path: Path) -> None:
    program("io_uring").case(target(tmp_path, 1), SETTING, 1).run()
    ((common, _),) = fake.told()
    assert int(common["io_size"]) == 4 * 4 * 65536


@pytest.mark.parametrize(("count", "jobs"), [(1, 4), (3, 3), (10, 4)])
def test_the_synchronous_engine_gets_a_job_for_each_request(
    fake: FakeFio, tmp_path: Path, count: int, jobs: int
) -> None:
    files = target(tmp_path, count)
    program("psync").case(files, SETTING, 12 * MIB).run()
    ((_, *sections),) = fake.told()
    assert [section["name"] for section in sections] == [f"job-{index}" for index in range(jobs)]
    assert sum(int(section["io_size"]) for section in sections) == 12 * MIB
    assert sum(int(section["size"]) for section in sections) == count * MIB
    if count == 1:
        assert [int(section["offset"]) for section in sections] == [n * MIB // 4 for n in range(4)]
        assert {section["files"] for section in sections} == {files.paths[0]}
    else:
        shares = [section["files"].split("\n") for section in sections]
        assert sorted(itertools.chain.from_iterable(shares)) == sorted(files.paths)
        assert [len(share) * MIB for share in shares] == [int(section["size"]) for section in sections]


def test_what_fio_says_is_taken_over(fake: FakeFio, tmp_path: Path) -> None:
    sample = program("io_uring").case(target(tmp_path, 1), SETTING, MIB).run()
    assert (sample.amount, sample.seconds) == (4 * MIB, 0.1)
    assert sample.cpu_s == pytest.approx(0.2 * 0.4)
    # The fake has read nothing from a drive.
    assert sample.note.startswith("cached: the kernel fetched only 0 %")


@pytest.mark.parametrize("milliseconds", [0, 1, 19])
def test_runs_that_are_too_short_for_fio_say_so(fake: FakeFio, tmp_path: Path, milliseconds: int) -> None:
    recorded = json.loads(json.dumps(RECORDED))
    for access in ("read", "write"):
        recorded["jobs"][0][access]["runtime"] = milliseconds
    fake.answers("fio: a note before the JSON\n" + json.dumps(recorded))
    sample = program("io_uring").case(target(tmp_path, 1), SETTING, MIB).run()
    assert sample.seconds == max(1, milliseconds) / 1000
    assert "short: fio counts whole milliseconds" in sample.note


@pytest.mark.parametrize("broken", ["", "io_uring", "io_uring libaio"])
def test_the_fastest_engine_that_works_is_taken(fake: FakeFio, tmp_path: Path, broken: str) -> None:
    path = fake.answers(json.dumps(RECORDED), broken=broken)
    engines = ["io_uring", "libaio", "psync"]
    taken = engines[len(broken.split())]
    assert find_fio(str(tmp_path / "answer")) == Fio(path, "fio-3.33", taken)
    assert [run[0]["ioengine"] for run in fake.told()] == engines[: len(broken.split()) + 1]
    assert all(run[0]["rw"] == "read" for run in fake.told())


def test_fio_without_any_engine_is_told(fake: FakeFio, tmp_path: Path) -> None:
    fake.answers("", broken="io_uring libaio psync")
    with pytest.raises(ConfigError) as caught:
        find_fio(str(tmp_path / "answer"))
    assert "fio-3.33 works with none of its engines here" in str(caught.value)
    assert all(f"engine {name} not loadable" in str(caught.value) for name in ("io_uring", "libaio", "psync"))


FAILED_JOB = {"jobs": [RECORDED["jobs"][0] | {"error": 5}]}  # type: ignore[index]
IDLE_JOB = {"jobs": [RECORDED["jobs"][0] | {"read": {"io_bytes": 0, "runtime": 0}}]}  # type: ignore[index]
IDLE_JOB["jobs"][0]["write"] = IDLE_JOB["jobs"][0]["read"]


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("", 0, "status 0 and said: nothing"),
        ("", 1, "status 1 and said: nothing"),
        ("segmentation\nfault", 139, "status 139 and said: segmentation fault"),
        ("{", 0, "said: {"),
        ("[]", 0, "said: []"),
        ("{}", 0, "said: {}"),
        ('{"jobs": []}', 0, "said: "),
        ('{"jobs": 7}', 0, "said: "),
        ('{"jobs": [{"error": 0}]}', 0, "said: "),
        ('{"jobs": [{"error": 0, "read": 3, "write": 4}]}', 0, "said: "),
        (json.dumps(FAILED_JOB), 0, "status 0"),
        (json.dumps(IDLE_JOB), 0, "status 0"),
        (json.dumps(RECORDED), 3, "status 3"),
    ],
)
def test_rubbish_gets_one_clear_message(
    fake: FakeFio, tmp_path: Path, text: str, status: int, said: str
) -> None:
    fake.answers(text, status=status)
    files = target(tmp_path, 1)
    with pytest.raises(StorageError) as caught:
        program("io_uring").case(files, SETTING, MIB).run()
    message = str(caught.value)
    assert message.startswith(f"measuring with fio {files.paths[0]} failed; fio ended with status ")
    assert said in message
    assert len(message.splitlines()) == 1
    assert len(message) < 1000


def test_nothing_stays_of_a_run(fake: FakeFio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links:1"
    links.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(links))
    files = target(tmp_path, 2)
    program("io_uring").case(files, SETTING, MIB).run()
    assert os.listdir(links) == []
    ((common, job),) = fake.told()
    assert common["directory"].startswith(f"{tmp_path}/links\\:1/")
    assert job["files"] == "\n".join(files.paths)


@needs_fio
@pytest.mark.parametrize("engine", ["io_uring", "libaio", "psync"])
@pytest.mark.parametrize(("count", "nbytes"), [(1, MIB), (3, MIB // 2), (60, 65536)])
def test_fio_moves_what_we_move(tmp_path: Path, engine: str, count: int, nbytes: int) -> None:
    """Also files with odd names, and more of them than fits on fio's command line."""
    folder = tmp_path / ("a:b" * 20)
    folder.mkdir()
    try:
        fio.run_fio(
            "fio", engine, [__file__], {"rw": "read", "bs": 512, "iodepth": 1, "size": 4096, "io_size": 4096}
        )
    except StorageError:
        pytest.skip(f"{engine} does not work here")
    with ScratchFolder(folder) as scratch:
        files = DriveTarget([scratch.new_file(f"f:{i}", nbytes) for i in range(count)], nbytes)
        before = [Path(path).read_bytes() for path in files.paths]
        read, write, mixed = (
            program(engine).case(files, replace(SETTING, access=access), count * nbytes)
            for access in ("read", "write", "mixed")
        )
        (found,) = measure([read], rounds=1, warmups=0)
        assert [Path(path).read_bytes() for path in files.paths] == before
        assert "cached" not in found.note
        # What does not divide evenly among jobs makes a few blocks.
        for case in (read, mixed, write):
            assert case.run().amount == pytest.approx(max(count * nbytes, 16 * 65536), rel=0.2)
        # Every file was written, none has grown, and there are no others.
        changed = [Path(path).read_bytes() != old for path, old in zip(files.paths, before, strict=True)]
        assert all(changed)
        assert {os.path.getsize(path) for path in files.paths} == {nbytes}
        assert len([name for name in os.listdir(scratch.path) if name.startswith("f:")]) == count
