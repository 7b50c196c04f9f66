"""fio beside our own measurement: the same file, pattern, block, depth and kind of I/O, in the same rounds.

fio (https://fio.readthedocs.io) is what people trust; a ratio to it says how far our path is from what
another program gets out of the drive.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tierstream.io.drive_rates import DriveTarget, Setting
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.measure import Case, Labels, Sample

_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
#: The fastest way that fio has here; containers often forbid the first one.
_ENGINES = ("io_uring", "libaio", "psync")
_TRIAL_BYTES = 1 << 20
_OPEN_FILES_MAX = 32


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
        count = max(4 * under_way, amount_bytes // tuning.task_bytes)
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
        return Case(labels, "B", lambda: self._run(target.paths, options))

    def _run(self, paths: Sequence[str], options: dict[str, Any]) -> Sample:
        job = run_fio(self.program, self.engine, paths, options)
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return Sample(moved, seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


def run_fio(program: str, engine: str, paths: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The figures of one job. A Ctrl-C ends fio with us.

    Raises:
        StorageError: fio failed; with what it said.
    """
    fixed = {
        "name": "tierstream",
        # fio takes ":" for the end of a file name
        "filename": ":".join(path.replace(":", r"\:") for path in paths),
        "ioengine": engine,
        "rwmixread": 50,
        "allow_file_create": 0,
        "fallocate": "none",
        "group_reporting": 1,
    }
    if engine == "psync":  # it has one request under way per job
        jobs = options["iodepth"]
        part = options["size"] // jobs // options["bs"] * options["bs"]
        options = options | {"numjobs": jobs, "thread": 1, "size": part, "offset_increment": part}
        options["io_size"] = max(options["bs"], options["io_size"] // jobs)
    command = [program, "--output-format=json"]
    command += [f"--{key}={value}" for key, value in (fixed | options).items()]
    # Buffers in huge pages, as training has them: direct I/O is faster from those, whoever does it.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
    )
    try:
        # Some versions print a note before the JSON.
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        job = {"error": done.returncode or 1}
    if done.returncode or job["error"]:
        said = (done.stderr.strip() or done.stdout.strip())[-500:]
        detail = f"fio ended with status {done.returncode}: {said}"
        raise StorageError("measuring with fio", paths[0], detail=detail)
    return job


@lru_cache(maxsize=1)
def find_fio(trial_path: str) -> Fio:
    """fio as it works on this machine.

    Args:
        trial_path: a file of at least 1 MiB that fio may read.

    Raises:
        ConfigError: it is not installed, or none of its engines works here.
    """
    program = shutil.which("fio")
    if program is None:
        raise ConfigError(
            "--compare fio needs fio, which is not installed: apt-get install fio, or leave the option out"
        )
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
