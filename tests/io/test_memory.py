"""The memory budget from made-up and real cgroup trees, and the process's own size."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from tierstream.io.memory import current_rss_bytes, memory_budget, peak_rss_bytes, reset_peak_rss

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED_V1 = 9223372036854771712


class Host:
    """A root directory with /proc and cgroup files: 24 GiB of memory, 20 of it available."""

    def __init__(self, root: Path, *, cgroup: str, mounts: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {24 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {20 * MIB} kB\n")
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", mounts)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group_v2(self, path: str, *, used: int, inactive: int = 0, **limits: int | str) -> None:
        base = f"sys/fs/cgroup{path}".rstrip("/")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7\n")
        for name, limit in limits.items():
            self.write(f"{base}/memory.{name}", f"{limit}\n")

    def group_v1(
        self, path: str, *, used: int, limit: int, inactive: int = 0, hierarchical: int = UNLIMITED_V1
    ) -> None:
        base = f"sys/fs/cgroup/memory{path}".rstrip("/")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(
            f"{base}/memory.stat",
            f"inactive_file 0\nhierarchical_memory_limit {hierarchical}\ntotal_inactive_file {inactive}\n",
        )


Make = Callable[..., Host]


def v2_host(root: Path, group: str = "/user.slice/run.scope", mount_root: str = "/") -> Host:
    mounts = f"30 24 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    return Host(root, cgroup=f"0::{group}\n", mounts=mounts)


def v1_host(root: Path, group: str = "/docker/abc", mount_root: str = "/") -> Host:
    mounts = (
        "30 24 0:25 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
        f"31 30 0:26 {mount_root} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 30 0:27 {mount_root} /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n"
    )
    return Host(
        root, cgroup=f"5:cpu,cpuacct:{group}\n4:memory:{group}\n1:name=systemd:{group}\n", mounts=mounts
    )


def test_host_without_cgroups(tmp_path: Path) -> None:
    limits = memory_budget(Host(tmp_path, cgroup="", mounts="").root)
    assert limits.available_bytes == 20 * GIB
    assert limits.tightest.source == "/proc/meminfo"
    assert limits.tightest.limit_bytes == 24 * GIB


def test_v2_own_group(tmp_path: Path) -> None:
    host = v2_host(tmp_path)
    host.group_v2("/user.slice/run.scope", used=3 * GIB, inactive=GIB, max=4 * GIB, high="max")
    limits = memory_budget(tmp_path)
    assert limits.available_bytes == 2 * GIB  # 4 - (3 - 1 of page cache)
    assert limits.tightest.source == "/sys/fs/cgroup/user.slice/run.scope/memory.max"
    assert "2.00 GiB available: 4.00 GiB (/sys/fs/cgroup/user.slice/run.scope/memory.max)" in str(
        limits.tightest
    )


def test_v2_parent_only(tmp_path: Path) -> None:
    host = v2_host(tmp_path)
    host.group_v2("/user.slice/run.scope", used=MIB, max="max", high="max")
    host.group_v2("/user.slice", used=GIB, max=2 * GIB, high="max")
    limits = memory_budget(tmp_path)
    assert limits.available_bytes == GIB
    assert limits.tightest.source == "/sys/fs/cgroup/user.slice/memory.max"


def test_v2_high_only(tmp_path: Path) -> None:
    host = v2_host(tmp_path)
    host.group_v2("/user.slice/run.scope", used=GIB, max="max", high=3 * GIB)
    assert memory_budget(tmp_path).available_bytes == 2 * GIB


def test_v2_least_of_several(tmp_path: Path) -> None:
    host = v2_host(tmp_path)
    host.group_v2("/user.slice/run.scope", used=GIB, max=8 * GIB, high=6 * GIB)
    host.group_v2("/user.slice", used=7 * GIB, max=9 * GIB, high="max")
    limits = memory_budget(tmp_path)
    assert [limit.available_bytes // GIB for limit in limits.limits] == [20, 7, 5, 2]
    assert limits.available_bytes == 2 * GIB


@pytest.mark.parametrize("group", ["/", "/../..", "/../sibling"])
def test_v2_in_a_namespace(tmp_path: Path, group: str) -> None:
    """A container with a cgroup namespace: its own group is the top of what it sees."""
    host = v2_host(tmp_path, group=group)
    host.group_v2("/", used=0, max=2 * GIB)
    assert memory_budget(tmp_path).available_bytes == 2 * GIB


@pytest.mark.parametrize("make", [v1_host, v2_host])
def test_a_bind_mounted_group(tmp_path: Path, make: Make) -> None:
    """A container without a namespace: the mount shows its group as the top, /proc its path on the host."""
    host = make(tmp_path, group="/docker/abc", mount_root="/docker/abc")
    host.group_v2("/", used=0, max=2 * GIB)
    host.group_v1("", used=0, limit=2 * GIB)
    assert memory_budget(tmp_path).available_bytes == 2 * GIB


@pytest.mark.parametrize("make", [v1_host, v2_host])
def test_below_a_bind_mounted_group(tmp_path: Path, make: Make) -> None:
    host = make(tmp_path, group="/docker/abc/child", mount_root="/docker/abc")
    host.group_v2("/child", used=0, max=GIB)
    host.group_v1("/child", used=0, limit=GIB)
    assert memory_budget(tmp_path).available_bytes == GIB


def test_v1_own_and_parent(tmp_path: Path) -> None:
    host = v1_host(tmp_path)
    host.group_v1("/docker/abc", used=3 * GIB, inactive=GIB, limit=10 * GIB)
    host.group_v1("/docker", used=5 * GIB, limit=9 * GIB)
    host.group_v1("", used=11 * GIB, limit=UNLIMITED_V1)
    limits = memory_budget(tmp_path)
    assert [limit.available_bytes // GIB for limit in limits.limits] == [20, 8, 4]
    assert limits.tightest.source == "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes"


def test_v1_ancestor_out_of_sight(tmp_path: Path) -> None:
    host = v1_host(tmp_path, group="/")
    host.group_v1("", used=GIB, limit=UNLIMITED_V1, hierarchical=4 * GIB)
    assert memory_budget(tmp_path).available_bytes == 3 * GIB


def test_v1_and_v2_together(tmp_path: Path) -> None:
    host = v1_host(tmp_path)
    mounts = (tmp_path / "proc/self/mountinfo").read_text()
    host.write(
        "proc/self/mountinfo", mounts + "38 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    host.write("proc/self/cgroup", (tmp_path / "proc/self/cgroup").read_text() + "0::/\n")
    host.group_v1("/docker/abc", used=0, limit=GIB)
    assert memory_budget(tmp_path).available_bytes == GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    host = v2_host(tmp_path)
    host.group_v2("/user.slice/run.scope", used=5 * GIB, max=4 * GIB)
    assert memory_budget(tmp_path).available_bytes == 0


def test_this_machine() -> None:
    limits = memory_budget()
    assert limits.limits[0].limit_bytes == psutil.virtual_memory().total
    assert 0 < limits.available_bytes <= psutil.virtual_memory().total


def test_a_real_limit_on_the_parent_group() -> None:
    """A child process in a group whose parent has the limit, in the kernel's own cgroup file system."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base = (v1 if v1.is_dir() else v2) / f"tierstream-test-{os.getpid()}"
    try:
        (base / "child").mkdir(parents=True)
        if not v1.is_dir():
            (base / "cgroup.subtree_control").write_text("+memory")
        (base / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(GIB))
    except OSError as error:
        for group in (base / "child", base):
            if group.exists():
                group.rmdir()
        pytest.skip(f"cgroups cannot be made here: {error}")
    script = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "from tierstream.io.memory import memory_budget\n"
        "print(memory_budget().available_bytes)\n"
    )
    try:
        command = [sys.executable, "-c", script, str(base / "child" / "cgroup.procs")]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert GIB // 2 < int(run.stdout) <= GIB
    finally:
        (base / "child").rmdir()
        base.rmdir()


def test_resident_bytes_follow_allocations() -> None:
    before = current_rss_bytes()
    # A mapping of its own: the heap of a long test process may have as much free and resident already.
    with mmap.mmap(-1, 64 * MIB) as block:
        np.frombuffer(block, np.uint8)[:] = 1
        assert current_rss_bytes() - before > 60 * MIB
        peak = peak_rss_bytes()
        assert peak >= current_rss_bytes() - MIB
    assert peak - MIB < peak_rss_bytes() < peak + 8 * MIB, "a peak stays"
    if not reset_peak_rss():
        pytest.skip("clear_refs is not permitted here")
    assert peak_rss_bytes() < peak - 50 * MIB
