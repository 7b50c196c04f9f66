"""fio beside our own measurement: the same file, pattern, block, depth and kind of I/O, in the same rounds.

fio (https://fio.readthedocs.io) is what people trust; a ratio to it says how far our path is from what
another program gets out of the drive.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any

from tierstream.io.drive_rates import DriveTarget, Setting
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import Case, Labels, Sample
from tierstream.io.workload import cached_note

_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
#: The fastest way that fio has here; containers often forbid the first one.
_ENGINES = ("io_uring", "libaio", "psync")
_TRIAL_BYTES = 1 << 20
_OPEN_FILES_MAX = 32
#: Shorter runs of fio are off by more than 5 %.
_MILLISECONDS_MIN = 20
_RUSAGE_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Fio:
    """The program, and the I/O engine that works with it on this machine.

    Use `find_fio`.
    """

    program: str
    version: str
    engine: str

    def case(self, target: DriveTarget, setting: Setting, amount_bytes: int) -> Case:
        """fio with this setting on the target's files, as something that `measure` runs.

        As many requests are under way as our setting keeps there: the lesser of its threads and its queue
        depth. The labels are those of our setting.
        """
        tuning = setting.tuning
        under_way = min(tuning.threads, tuning.queue_depth)
        count = max(2 * tuning.queue_depth, amount_bytes // tuning.task_bytes)
        labels: Labels = {
            "access": setting.access,
            "backend": f"fio {self.engine}",
            "path": "direct" if setting.direct else "buffered",
            "buffer": setting.buffer,
            "block_bytes": tuning.task_bytes,
            "threads": tuning.threads,
            "queue_depth": tuning.queue_depth,
        }
        options = {
            "rw": _PATTERNS[setting.access],
            "bs": tuning.task_bytes,
            "iodepth": under_way,
            "direct": int(setting.direct),
            "io_size": count * tuning.task_bytes,
            "size": target.file_bytes // tuning.task_bytes * tuning.task_bytes * len(target.paths),
            "file_service_type": "sequential",
            "openfiles": min(len(target.paths), _OPEN_FILES_MAX),
            "end_fsync": int(not setting.direct),
        }
        return Case(labels, "B", lambda: run_fio(self.program, self.engine, target.paths, options))


@dataclass(frozen=True)
class _Job:
    """A job of one run: its files, and what it does otherwise than the others."""

    paths: Sequence[str]
    options: dict[str, Any]


def run_fio(program: str, engine: str, paths: Sequence[str], options: dict[str, Any]) -> Sample:
    """One run of fio. A Ctrl-C ends it with us.

    Args:
        options: bs, iodepth, size (of all files) and io_size, and whatever else fio is to be told.

    Raises:
        StorageError: fio failed; with what it said.
    """
    jobs = _synchronous_jobs(paths, options) if engine == "psync" else [_Job(paths, {})]
    # Files by short links with numbers: fio takes 4096 bytes of names at most, and ":" for the end of one.
    with TemporaryDirectory(prefix="tierstream-fio-") as links:
        sections: list[dict[str, Any]] = [
            {
                "name": "global",
                "ioengine": engine,
                "directory": links.replace(":", r"\:"),
                "rwmixread": 50,
                "allow_file_create": 0,
                "fallocate": "none",
                "group_reporting": 1,
                "thread": 1,  # a job of its own process would outlive fio when that is killed
                **options,
            }
        ]
        for number, job in enumerate(jobs):
            for index, path in enumerate(job.paths):
                os.symlink(os.path.abspath(path), os.path.join(links, f"{number}.{index}"))
            files = {"nrfiles": len(job.paths), "filename_format": f"{number}.$filenum"}
            sections.append({"name": f"job-{number}", **files, **job.options})
        return _run(program, sections, paths[0])


def _run(program: str, sections: Sequence[dict[str, Any]], path: str) -> Sample:
    command = [program, "--output-format=json"]
    command += [f"--{key}={value}" for section in sections for key, value in section.items()]
    # Buffers in huge pages, as training has them: direct I/O is faster from those, whoever does it.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    before = _fetched_bytes()
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=environment
    )
    try:
        # Some versions print a note before the JSON.
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        failed, sample = bool(done.returncode or found["error"]), _sample(found, _fetched_bytes() - before)
    except (ValueError, KeyError, IndexError, TypeError):
        failed = True
    if failed:
        said = " ".join((done.stderr.strip() or done.stdout.strip())[-500:].split())
        detail = f"fio ended with status {done.returncode} and said: {said or 'nothing'}"
        raise StorageError("measuring with fio", path, detail=detail)
    return sample


def fio_program() -> str:
    """Its path.

    Raises:
        ConfigError: it is not installed.
    """
    program = shutil.which("fio")
    if program is None:
        raise ConfigError(
            "--compare fio needs fio, which is not installed: apt-get install fio, or leave the option out"
        )
    return program


def _synchronous_jobs(paths: Sequence[str], options: dict[str, Any]) -> list[_Job]:
    """A job for each request under way, of which the engine has one per job: parts of the file, or files."""
    block, size, several = options["bs"], options["size"], len(paths) > 1
    count = min(options["iodepth"], len(paths) if several else size // block)
    part = size // count // block * block
    io_size = max(block, options["io_size"] // count)
    if not several:
        places = ({"offset": index * part, "size": part} for index in range(count))
        return [_Job(paths, {**place, "io_size": io_size}) for place in places]
    shares = [paths[index::count] for index in range(count)]
    per_file = size // len(paths)
    return [_Job(share, {"size": per_file * len(share), "io_size": io_size}) for share in shares]


def _sample(job: dict[str, Any], fetched_bytes: int) -> Sample:
    milliseconds = max(1, job["read"]["runtime"], job["write"]["runtime"])
    read_bytes, written_bytes = job["read"]["io_bytes"], job["write"]["io_bytes"]
    if not read_bytes + written_bytes:
        raise ValueError("it moved nothing")
    # Its shares are of the time of all jobs together.
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    notes = [cached_note("read", read_bytes, fetched_bytes)]
    if milliseconds < _MILLISECONDS_MIN:
        notes.append("short: fio counts whole milliseconds")
    return Sample(read_bytes + written_bytes, milliseconds / 1000, cpu_s, "; ".join(filter(None, notes)))


def _fetched_bytes() -> int:
    """What all programs that this process has run to their end had fetched from storage (getrusage(2))."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * _RUSAGE_BLOCK_BYTES


@lru_cache(maxsize=1)
def find_fio(trial_path: str) -> Fio:
    """fio as it works on this machine.

    Args:
        trial_path: a file of at least 1 MiB that fio may read.

    Raises:
        ConfigError: it is not installed, or none of its engines works here.
    """
    program = fio_program()
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    refusals = []
    for engine in _ENGINES:
        trial = {"rw": "read", "bs": 4096, "iodepth": 2, "direct": 0, "io_size": 65536, "size": _TRIAL_BYTES}
        try:
            run_fio(program, engine, [trial_path], trial)
        except StorageError as error:
            refusals.append(f"{engine}: {error}")
        else:
            return Fio(program, version, engine)
    raise ConfigError(f"{version} works with none of its engines here: {'; '.join(refusals)}")
