"""Probes against made-up /proc and /sys trees, laid out with links as the kernel does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstream.io import probes
from tierstream.io.probes import BlockDevice, Disk, PcieLink, block_device, pcie_link

GIB = 1 << 30
MOUNTS = """\
27 1 254:0 / / rw - ext4 /dev/vda rw
40 27 259:2 / /mnt/nvme rw - ext4 /dev/nvme0n1p1 rw
41 27 253:0 / /mnt/lvm rw - xfs /dev/mapper/data-state rw
42 27 0:44 /@state /mnt/btrfs rw - btrfs /dev/nvme0n1p1 rw
43 27 0:45 / /mnt/nfs rw - nfs4 server:/export rw
44 27 0:46 / /mnt/shm rw - tmpfs tmpfs rw
45 27 9:0 / /mnt/raid rw - ext4 /dev/md0 rw
46 40 8:1 / /mnt/nvme/cold rw - ext4 /dev/sda1 rw
"""
NVME = Disk("nvme0n1", "Samsung SSD 990 PRO 4TB", False, 4 * GIB)
HARD_DISK = Disk("sda", "WDC WD40EFRX", True, 8 * GIB)


class Machine:
    """A root directory; drives are in sys/devices, sys/class/block and sys/dev/block link to them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def block(self, path: str, number: str, *, slaves: tuple[str, ...] = (), **files: str) -> None:
        node = self.root / "sys/devices" / path
        (node / "slaves").mkdir(parents=True)
        for name, text in {"dev": number, **files}.items():
            self.write(f"sys/devices/{path}/{name.replace('__', '/')}", f"{text}\n")
        for slave in slaves:
            (node / "slaves" / slave).symlink_to("../../elsewhere")
        for link in (f"sys/class/block/{node.name}", f"sys/dev/block/{number}"):
            (self.root / link).parent.mkdir(parents=True, exist_ok=True)
            (self.root / link).symlink_to(node)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write("proc/self/mountinfo", MOUNTS)
    made.block("virtio1/block/vda", "254:0", size="2097152", queue__rotational="1")
    nvme = {"size": str(4 * GIB // 512), "queue__rotational": "0", "device__model": f"{NVME.model}   "}
    made.block("pci/nvme/nvme0/nvme0n1", "259:0", **nvme)
    made.block("pci/nvme/nvme0/nvme0n1/nvme0n1p1", "259:2", partition="1", size="4096")
    made.block("pci/nvme/nvme0/nvme0n1/nvme0n1p2", "259:3", partition="2", size="4096")
    disk = {"size": str(8 * GIB // 512), "queue__rotational": "1", "device__model": HARD_DISK.model}
    made.block("pci/ata/sda", "8:0", **disk)
    made.block("pci/ata/sda/sda1", "8:1", partition="1", size="4096")
    made.block("virtual/block/dm-0", "253:0", slaves=("nvme0n1p1", "nvme0n1p2"), queue__rotational="0")
    made.block("virtual/block/md0", "9:0", slaves=("dm-0", "sda1"), queue__rotational="1")
    return made


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/mnt/nvme/state", BlockDevice("nvme0n1p1", (NVME,))),
        ("/mnt/nvme", BlockDevice("nvme0n1p1", (NVME,))),
        ("/mnt/nvme/cold/deep", BlockDevice("sda1", (HARD_DISK,))),
        ("/mnt/nvme2", BlockDevice("vda", (Disk("vda", "", True, GIB),))),  # not below /mnt/nvme
        ("/mnt/lvm/x", BlockDevice("dm-0", (NVME,))),  # two partitions of one drive
        ("/mnt/raid", BlockDevice("md0", (NVME, HARD_DISK))),
        ("/mnt/btrfs", BlockDevice("nvme0n1p1", (NVME,))),  # its own device number, found by its source
        ("/mnt/nfs", None),
        ("/mnt/shm/x", None),
    ],
)
def test_block_device(machine: Machine, path: str, expected: BlockDevice | None) -> None:
    assert block_device(path, machine.root) == expected


def test_a_drive_that_tells_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/self/mountinfo", "27 1 7:0 / / rw - ext4 /dev/loop0 rw\n")
    machine.block("virtual/block/loop0", "7:0")
    assert block_device("/x", tmp_path) == BlockDevice("loop0", (Disk("loop0", "", None, None),))


def test_the_drive_of_this_machine_is_that_of_its_device_number(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    found = block_device(tmp_path)
    if not node.exists():
        pytest.skip("the temporary directory is on no block device that /sys shows")
    assert found is not None
    assert found.name == node.resolve().name
    assert found.disks


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor\t: 0\nmodel name\t: AMD  EPYC 9654\nmodel name\t: other\n", "AMD EPYC 9654"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
    ],
)
def test_cpu_model(tmp_path: Path, text: str, model: str) -> None:
    Machine(tmp_path).write("proc/cpuinfo", text)
    assert probes.cpu_model(tmp_path) == model


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_huge_pages(tmp_path: Path, mode: str) -> None:
    text = "always madvise never\n".replace(mode, f"[{mode}]")
    Machine(tmp_path).write("sys/kernel/mm/transparent_hugepage/enabled", text)
    assert probes.transparent_huge_pages(tmp_path) == mode


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:02:26 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@)",
    ],
)
def test_driver_version(tmp_path: Path, line: str) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/driver/nvidia/version", f"{line}\nGCC version:  gcc version 14.3.0 (GCC)\n")
    assert probes.nvidia_driver_version(tmp_path) == "580.65.06"
    (tmp_path / "proc/driver/nvidia/version").unlink()
    machine.write("sys/module/nvidia/version", "575.57.08\n")
    assert probes.nvidia_driver_version(tmp_path) == "575.57.08"


@pytest.mark.parametrize(
    ("speeds", "widths", "link", "reduced", "text"),
    [
        (("32.0 GT/s PCIe",) * 2, ("16", "16"), PcieLink(5, 16, 5, 16), False,
         "PCIe 5.0 x16 now, PCIe 5.0 x16 at most"),
        (("2.5 GT/s PCIe", "16.0 GT/s PCIe"), ("16", "16"), PcieLink(1, 16, 4, 16), True,
         "PCIe 1.0 x16 now, PCIe 4.0 x16 at most"),
        (("8 GT/s", "8 GT/s"), ("8", "16"), PcieLink(3, 8, 3, 16), True,
         "PCIe 3.0 x8 now, PCIe 3.0 x16 at most"),
        (("64.0 GT/s PCIe", "Unknown"), ("16", "255"), PcieLink(6, 16, None, None), False,
         "PCIe 6.0 x16 now, unknown at most"),
        (("Unknown", "Unknown"), ("0", "255"), None, False, ""),
    ],
)  # fmt: skip
def test_pcie_link(
    tmp_path: Path,
    speeds: tuple[str, str],
    widths: tuple[str, str],
    link: PcieLink | None,
    reduced: bool,
    text: str,
) -> None:
    device = "sys/bus/pci/devices/0000:3b:00.0"
    for state, speed, width in zip(("current", "max"), speeds, widths, strict=True):
        Machine(tmp_path).write(f"{device}/{state}_link_speed", f"{speed}\n")
        Machine(tmp_path).write(f"{device}/{state}_link_width", f"{width}\n")
    found = pcie_link("0000:3b:00.0", tmp_path)
    assert found == link
    if found is not None:
        assert (found.reduced, str(found)) == (reduced, text)


@pytest.mark.parametrize(
    ("probe", "nothing"),
    [
        (probes.cpu_model, ""),
        (probes.transparent_huge_pages, ""),
        (probes.nvidia_driver_version, ""),
        (lambda root: block_device("/mnt", root), None),
        (lambda root: pcie_link("0000:3b:00.0", root), None),
    ],
)
def test_without_proc_and_sys(tmp_path: Path, probe: Callable[[Path], object], nothing: object) -> None:
    assert probe(tmp_path) == nothing
    (tmp_path / "proc").write_text("not a directory")
    assert probe(tmp_path) == nothing


def test_last_level_caches_are_counted_once_each(machine: Machine) -> None:
    assert probes.last_level_cache_bytes(machine.root) is None
    shared = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    for cpu, cpus in shared.items():
        for index, (level, size, of) in enumerate([("1", "48K", str(cpu)), ("3", "32768K", cpus)]):
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", of)):
                machine.write(f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}", f"{text}\n")
    assert probes.last_level_cache_bytes(machine.root) == 2 * (32 << 20)
    machine.write("sys/devices/system/cpu/cpu0/cache/index1/size", "unknown\n")
    assert probes.last_level_cache_bytes(machine.root) == 2 * (32 << 20)
