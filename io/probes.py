"""What the machine is made of, as far as /proc and /sys tell: processor, drives, PCIe links, NVIDIA driver.

Every probe copes with missing and unreadable entries, as containers have them: what is not told is None or an
empty text. `root` is a directory to take for `/` (tests). Sources: proc(5), sysfs(5), the kernel's
ABI/stable/sysfs-block and ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierstream.io.mounts import mount_of

#: /sys/block/*/size counts these, whatever the drive's own sectors are.
_SECTOR_BYTES = 512
#: PCI Express Base Specification: GT/s per lane of each generation.
_PCIE_GENERATION = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "64.0": 6}
#: A register that reads as all ones: no such link.
_PCIE_NO_WIDTH = (0, 63, 255)

_LINK_STATES = ("current", "max")

Root = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Disk:
    """A whole drive. `model` is empty where it has none, as virtual drives; None: not told."""

    name: str
    model: str
    rotational: bool | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """What a file system lies on: `name`, e.g. "nvme0n1p2" or "dm-0", and the drives under it."""

    name: str
    disks: tuple[Disk, ...]


@dataclass(frozen=True, slots=True)
class PcieLink:
    """PCIe generation (1 to 6) and lanes now, and the most that the device itself can do."""

    generation: int | None
    lanes: int | None
    generation_max: int | None
    lanes_max: int | None

    @property
    def reduced(self) -> bool:
        """Whether it is known to run below what the device can do."""
        pairs = ((self.generation, self.generation_max), (self.lanes, self.lanes_max))
        return any(now is not None and most is not None and now < most for now, most in pairs)

    def __str__(self) -> str:
        now, most = _link_text(self.generation, self.lanes), _link_text(self.generation_max, self.lanes_max)
        return f"{now} now, {most} at most"


def cpu_model(root: Root = "/") -> str:
    """Name of the processor, e.g. "AMD EPYC 9654 96-Core Processor"; empty if not told (most of Arm)."""
    for line in _text(Path(root, "proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return " ".join(value.split())
    return ""


def last_level_cache_bytes(root: Root = "/") -> int | None:
    """Size of all last-level caches together (a processor may have one per group of cores); None if not
    told.
    """
    caches: dict[tuple[int, str], int] = {}
    for cache in Path(root, "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = _text(cache / "level"), _text(cache / "size")
        if level.isdecimal() and re.fullmatch(r"\d+K", size):
            caches[int(level), _text(cache / "shared_cpu_list")] = int(size[:-1]) << 10
    last = max((level for level, _ in caches), default=None)
    return sum(size for (level, _), size in caches.items() if level == last) or None


def transparent_huge_pages(root: Root = "/") -> str:
    """The kernel's mode, "always", "madvise" or "never"; empty if not told."""
    chosen = re.search(r"\[(\w+)\]", _text(Path(root, "sys/kernel/mm/transparent_hugepage/enabled")))
    return chosen[1] if chosen else ""


def nvidia_driver_version(root: Root = "/") -> str:
    """Version of the loaded kernel driver, e.g. "580.65.06"; empty if there is none."""
    stated = re.search(r"\b\d{3,}(\.\d+)+\b", _text(Path(root, "proc/driver/nvidia/version")))
    return stated[0] if stated else _text(Path(root, "sys/module/nvidia/version"))


def block_device(path: str | os.PathLike[str], root: Root = "/") -> BlockDevice | None:
    """What the file system of `path` lies on, by the mount table; None for those without a drive of this
    machine (memory, network, overlay) and where it is not told."""
    mount = mount_of(path, root)
    if mount is None:
        return None
    base = Path(root, "sys")
    node = base / "dev/block" / mount.device
    # btrfs shows a number of its own, and the drive only as the source.
    if not node.exists() and mount.source.startswith("/dev/"):
        node = base / "class/block" / os.path.basename(os.path.realpath(mount.source))
    if not node.exists():
        return None
    node = node.resolve()
    return BlockDevice(node.name, tuple(_disks(base, node)))


def pcie_link(bus_id: str, root: Root = "/") -> PcieLink | None:
    """The link of the device `bus_id`, e.g. "0000:3b:00.0"; None if not told."""
    device = Path(root, "sys/bus/pci/devices", bus_id)
    speeds = (_text(device / f"{state}_link_speed") for state in _LINK_STATES)
    widths = (_text(device / f"{state}_link_width") for state in _LINK_STATES)
    (generation, generation_max), (lanes, lanes_max) = map(_generation, speeds), map(_lanes, widths)
    link = PcieLink(generation, lanes, generation_max, lanes_max)
    return None if link == PcieLink(None, None, None, None) else link


def _disks(base: Path, node: Path) -> Iterator[Disk]:
    """The drives under a block device: of a partition its drive, of dm and md those of all its parts."""
    whole = node.parent if (node / "partition").exists() else node
    try:
        parts = sorted(entry.name for entry in (whole / "slaves").iterdir())
    except OSError:
        parts = []
    if parts:
        found = (disk for part in parts for disk in _disks(base, (base / "class/block" / part).resolve()))
        # Two partitions of one drive are one drive.
        yield from dict.fromkeys(found)
        return
    sectors, rotational = _text(whole / "size"), _text(whole / "queue/rotational")
    yield Disk(
        whole.name,
        " ".join(_text(whole / "device/model").split()),
        rotational == "1" if rotational in ("0", "1") else None,
        int(sectors) * _SECTOR_BYTES if sectors.isdecimal() else None,
    )


def _generation(speed: str) -> int | None:
    """Of "16.0 GT/s PCIe", or "8 GT/s" of kernels before 5.7."""
    return _PCIE_GENERATION.get(speed.split(" ")[0])


def _lanes(width: str) -> int | None:
    return int(width) if width.isdecimal() and int(width) not in _PCIE_NO_WIDTH else None


def _link_text(generation: int | None, lanes: int | None) -> str:
    if generation is None and lanes is None:
        return "unknown"
    return f"PCIe {generation or '?'}.0 x{lanes or '?'}"


def _text(path: Path) -> str:
    """The stripped content of a small file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
