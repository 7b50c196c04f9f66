"""The mount table of this process, from /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tierstream.io import seam

#: File systems whose files live in memory: they count against DRAM, not against a drive.
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table. `root`: the directory of the file system that is mounted at `point`; `source`:
    what it was mounted from, e.g. "/dev/nvme0n1p2".
    """

    device: str
    root: str
    point: str
    filesystem: str
    source: str
    super_options: frozenset[str]


def read_mounts(root: str | os.PathLike[str] = "/") -> list[Mount]:
    """The mount table, in order of mounting; empty where there is no /proc. `root`: taken for `/` (tests)."""
    try:
        lines = Path(root, "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [_parse(line) for line in lines]


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, tail = before.split(" "), after.split(" ")
    return Mount(
        device=fields[2],
        root=_unescape(fields[3]),
        point=_unescape(fields[4]),
        filesystem=tail[0],
        source=_unescape(tail[1]),
        super_options=frozenset(tail[2].split(",")),
    )


def _unescape(field: str) -> str:
    """Blanks and backslashes in paths are written as three octal digits."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


@lru_cache(maxsize=64)
def filesystem_of_device(st_dev: int) -> str:
    """Type of the file system with this device number, e.g. "ext4"; empty if unknown (btrfs subvolumes)."""
    device = f"{os.major(st_dev)}:{os.minor(st_dev)}"
    return next((mount.filesystem for mount in read_mounts() if mount.device == device), "")


def filesystem_of(path: str | os.PathLike[str]) -> str:
    """Type of the file system that holds the existing `path`, e.g. "xfs"; "unknown" if not found."""
    found = filesystem_of_device(seam.current().stat(os.fspath(path)).st_dev)
    if found:
        return found
    mount = mount_of(path)
    return "unknown" if mount is None else mount.filesystem


def mount_of(path: str | os.PathLike[str], root: str | os.PathLike[str] = "/") -> Mount | None:
    """The mount that `path` lies in; None where the table does not tell. `root`: taken for `/` (tests)."""
    real = os.path.realpath(path)
    holders = [mount for mount in read_mounts(root) if os.path.commonpath([mount.point, real]) == mount.point]
    # The deepest mount point holds the path; of several at one point the last one hides the others.
    return max(enumerate(holders), key=lambda item: (len(item[1].point), item[0]))[1] if holders else None
