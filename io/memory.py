"""How much memory this process may take, and how much it has taken.

A container's limit stands in the cgroup file system, often on an ancestor of the process's own group, and the
memory that /proc/meminfo shows is the host's. Sources: cgroups(7), the kernel's cgroup-v1/memory and
cgroup-v2 documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tierstream.io.mounts import Mount, read_mounts
from tierstream.io.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit on the memory of this process and of others that share it.

    Attributes:
        source: the file that sets it.
        limit_bytes: the limit.
        used_bytes: in use now; page cache that the kernel gives back on demand is not counted.
    """

    source: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.available_bytes)} available: {format_bytes(self.limit_bytes)} "
            f"({self.source}), {format_bytes(self.used_bytes)} of it in use"
        )


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits in force: the host's memory, then the cgroup limits from the process's own group upwards."""

    limits: tuple[MemoryLimit, ...]

    @property
    def tightest(self) -> MemoryLimit:
        """The limit that leaves least."""
        return min(self.limits, key=lambda limit: limit.available_bytes)

    @property
    def available_bytes(self) -> int:
        """Bytes that this process can still take."""
        return self.tightest.available_bytes


def memory_budget(root: str | os.PathLike[str] = "/") -> MemoryLimits:
    """The least of host, cgroup v1 and v2 and all their ancestors, minus what is in use.

    Args:
        root: a directory to take for `/` (tests).
    """
    base = Path(root)
    groups = _own_groups(base)
    host = _host_limit(base)
    limits: list[MemoryLimit] = []
    for mount in read_mounts(root):
        if mount.filesystem == "cgroup2" and "" in groups:
            limits += _limits_v2(base, _levels(base, mount, groups[""]))
        elif mount.filesystem == "cgroup" and "memory" in mount.super_options and "memory" in groups:
            limits += _limits_v1(base, _levels(base, mount, groups["memory"]))
    # v1 writes "no limit" as a number near 2^63.
    return MemoryLimits((host, *(limit for limit in limits if limit.limit_bytes < host.limit_bytes)))


def peak_rss_bytes() -> int:
    """The most host memory that this process had resident since its start or `reset_peak_rss()`."""
    return _status_bytes("VmHWM")


def current_rss_bytes() -> int:
    """Host memory that this process has resident now."""
    return _status_bytes("VmRSS")


def reset_peak_rss() -> bool:
    """Starts the peak anew from the present size (proc_pid_clear_refs(5)); False if that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    return _kibibytes(Path("/proc/self/status"), key)


def _kibibytes(path: Path, key: str) -> int:
    """The value in bytes of a line `key:   1234 kB`."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{path} has no line {key}")


def _host_limit(base: Path) -> MemoryLimit:
    path = base / "proc/meminfo"
    total = _kibibytes(path, "MemTotal")
    return MemoryLimit("/proc/meminfo", total, total - _kibibytes(path, "MemAvailable"))


def _own_groups(base: Path) -> dict[str, str]:
    """Path of this process's group per controller of v1; under the key "" that of v2."""
    try:
        lines = (base / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return {}
    groups = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _levels(base: Path, mount: Mount, group: str) -> Iterator[Path]:
    """Directories of the own group and of its ancestors, as far as the mount shows them.

    A container may see its own group as the top: as the root of a cgroup namespace (`group` is "/" or leads
    above it), or as the root of a bind mount (`mount.root` is the group's path on the host).
    """
    top = base / mount.point.lstrip("/")
    inside = PurePosixPath(group)
    if inside.is_relative_to(mount.root):
        inside = inside.relative_to(mount.root)
    names = [name for name in inside.parts if name not in ("/", "..")]
    for depth in range(len(names), -1, -1):
        yield top.joinpath(*names[:depth])


def _limits_v2(base: Path, levels: Iterator[Path]) -> Iterator[MemoryLimit]:
    for level in levels:
        usage = _number(level / "memory.current")
        if usage is None:
            continue
        used = usage - _statistics(level).get("inactive_file", 0)
        # Above memory.high the kernel throttles and reclaims: nothing is killed, and nothing moves.
        for name in ("memory.max", "memory.high"):
            limit = _number(level / name)
            if limit is not None:
                yield MemoryLimit(_source(base, level / name), limit, used)


def _limits_v1(base: Path, levels: Iterator[Path]) -> Iterator[MemoryLimit]:
    for level in levels:
        usage = _number(level / "memory.usage_in_bytes")
        limit = _number(level / "memory.limit_in_bytes")
        if usage is None or limit is None:
            continue
        statistics = _statistics(level)
        used = usage - statistics.get("total_inactive_file", 0)
        yield MemoryLimit(_source(base, level / "memory.limit_in_bytes"), limit, used)
        # Covers ancestors that a container does not see; their use by others stays unknown.
        hierarchical = statistics.get("hierarchical_memory_limit", limit)
        if hierarchical < limit:
            yield MemoryLimit(_source(base, level / "memory.stat"), hierarchical, used)


def _source(base: Path, path: Path) -> str:
    return f"/{path.relative_to(base)}"


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for "max", a missing or an unreadable file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistics(level: Path) -> dict[str, int]:
    try:
        lines = (level / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split() for line in lines)}
