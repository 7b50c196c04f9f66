"""What `tierstream doctor` looks at: processor, memory, GPUs, kvikio, directories, limits and versions.

Each function takes one part of the machine and gives its checks; none prints, and none fails because
something cannot be found out here.
"""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import runpy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from tierstream.io import probes
from tierstream.io.backend import TransferPath
from tierstream.io.drives import DirectoryInfo, check_directory
from tierstream.io.errors import StorageError
from tierstream.io.kvikio_backend import KvikioBackend, cuda_device_present, kvikio_problem
from tierstream.io.limits import Limit, locked_memory, open_files
from tierstream.io.memory import memory_budget
from tierstream.io.sizes import format_bytes

UNKNOWN = "unknown"
_PACKAGES = ("tierstream", "torch", "transformers", "zarr", "numpy")
#: Python, torch and a CUDA context alone take most of it.
_MEMORY_BYTES_MIN = 4 << 30
#: From here on every cache of open files is large enough.
_OPEN_FILES_MIN = 1024
_PIN_BYTES = 64 << 20
#: The first GPUs whose matrix units know bfloat16.
_BF16_CAPABILITY = (8, 0)
#: A drive with less free space holds no state worth a drive.
_FREE_BYTES_MIN = 1 << 30


class Status(StrEnum):
    """From good to bad: runs well, runs with a loss, does not run."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `remedy` is empty where the status is ok."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def collect(directories: Sequence[str]) -> list[Check]:
    """All checks of this machine, `directories` among them; the names differ from each other."""
    has_gpu = cuda_device_present()
    checks = [*cpu_checks(), *memory_checks(), huge_pages_check()]
    checks += [*gpu_checks(has_gpu), *kvikio_checks(has_gpu)]
    checks += [directory_check(number, path) for number, path in enumerate(directories, start=1)]
    return [*checks, *limit_checks(open_files(), locked_memory()), versions_check()]


def cpu_checks(root: probes.Root = "/") -> Iterator[Check]:
    """Model, usable cores and the instruction set of the kernels."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cores = f"{usable} of {present} cores usable"
    yield Check("cpu", Status.OK, f"{probes.cpu_model(root) or f'{UNKNOWN} model'}, {cores}")
    try:
        isa = importlib.import_module("tierstream._native").cpu_isa()
    except (ImportError, ValueError) as error:
        yield Check("cpu kernels", Status.PROBLEM, _one_line(error), "unset TIERSTREAM_ISA, or install again")
        return
    if isa == "scalar":
        lowered = "TIERSTREAM_ISA" in os.environ
        remedy = "unset TIERSTREAM_ISA" if lowered else "use a CPU with AVX2: updates are much faster"
        yield Check("cpu kernels", Status.WARNING, isa, remedy)
    else:
        yield Check("cpu kernels", Status.OK, isa)


def memory_checks(root: probes.Root = "/") -> Iterator[Check]:
    """The host's memory, and the tightest limit on this process."""
    try:
        limits = memory_budget(root)
    except (OSError, ValueError):
        remedy = "make /proc/meminfo readable: budgets cannot be checked without it"
        yield Check("memory", Status.WARNING, UNKNOWN, remedy)
        return
    host, tightest = limits.limits[0], limits.tightest
    total, available = format_bytes(host.limit_bytes), format_bytes(host.available_bytes)
    yield Check("memory", Status.OK, f"{total}, {available} available")
    value = "none below the host's" if tightest is host else str(tightest)
    if limits.available_bytes < _MEMORY_BYTES_MIN:
        least = format_bytes(_MEMORY_BYTES_MIN)
        remedy = f"end other programs or raise the limit: a run needs {least} or more"
        yield Check("memory limit", Status.WARNING, value, remedy)
    else:
        yield Check("memory limit", Status.OK, value)


def huge_pages_check(root: probes.Root = "/") -> Check:
    """Whether the DRAM tier, which asks for huge pages, gets them."""
    mode = probes.transparent_huge_pages(root)
    if mode == "never":
        remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Check("huge pages", Status.WARNING, mode, remedy)
    return Check("huge pages", Status.OK, mode or UNKNOWN)


def gpu_checks(has_gpu: bool, root: probes.Root = "/") -> Iterator[Check]:
    """GPUs as torch sees them, what they can do, their links, the driver and torch's CUDA."""
    driver, cuda = probes.nvidia_driver_version(root), _cuda_of_torch()
    if not has_gpu:
        remedy = (
            "for a GPU: install the NVIDIA driver, start a container with --gpus all, and look at "
            "CUDA_VISIBLE_DEVICES; without one: train.device: cpu"
        )
        yield Check("gpu", Status.WARNING, "the CUDA driver sees none", remedy)
    elif not cuda:
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Check("gpu", Status.PROBLEM, "present, but this torch is built without CUDA", remedy)
    else:
        yield from _torch_gpu_checks(root)
    yield Check("nvidia driver", Status.OK, driver or ("none" if not has_gpu else UNKNOWN))
    yield Check("cuda of torch", Status.OK, cuda or "none")


def kvikio_checks(has_gpu: bool) -> Iterator[Check]:
    """kvikio, libcufile, and whether a drive could reach the GPU without host memory (GDS)."""
    no_gds = "not available ({}); training does not need it: pages go through DRAM"
    try:
        problem = kvikio_problem()
        if not problem:
            version = importlib.import_module("kvikio").__version__
            cufile = importlib.import_module("kvikio.cufile_driver").libcufile_version()
    except Exception as error:  # whatever a foreign library that is broken here may raise
        problem = f"kvikio cannot be used ({_one_line(error)}): install it again, or use the backend posix"
    if problem:
        yield Check("kvikio", Status.WARNING, "not usable; the backend is posix", problem)
        yield Check("libcufile", Status.OK, UNKNOWN)
        yield Check("gds", Status.OK, no_gds.format("no kvikio"))
        return
    yield Check("kvikio", Status.OK, version)
    yield Check("libcufile", Status.OK, ".".join(map(str, cufile)) if any(cufile) else "none")
    if not has_gpu:
        yield Check("gds", Status.OK, no_gds.format("no GPU"))
        return
    try:
        backend = KvikioBackend(threads=1)
        try:
            path = backend.device_path(TransferPath("posix-direct", True))
        finally:
            backend.close()
    except Exception as error:
        yield Check("gds", Status.OK, no_gds.format(_one_line(error)))
        return
    yield Check("gds", Status.OK, "available" if path.name == "gds" else no_gds.format(path.reason))


def directory_check(number: int, path: str, root: probes.Root = "/") -> Check:
    """Whether `path` can hold state, by a real write, and on what kind of drive it lies."""
    name = f"directory {number}"
    try:
        info = check_directory(path)
    except StorageError as error:
        return Check(name, Status.PROBLEM, f"{path}: cannot be used", str(error))
    except OSError as error:  # the current directory was removed
        return Check(name, Status.PROBLEM, f"{path}: cannot be used", f"{_one_line(error)}: name another")
    device = probes.block_device(info.path, root)
    parts = [info.filesystem, *_device_texts(device), f"{format_bytes(info.free_bytes)} free"]
    parts.append("O_DIRECT" if info.transfer_path.direct else str(info.transfer_path))
    remedy = _drive_remedy(info, device)
    return Check(name, Status.WARNING if remedy else Status.OK, f"{info.path}: {', '.join(parts)}", remedy)


def limit_checks(files: Limit, locked: Limit) -> Iterator[Check]:
    """`ulimit -n`, after it was raised as far as it may be, and `ulimit -l`."""
    value = f"{_amount(files.soft)} (hard limit {_amount(files.hard)})"
    if files.soft is not None and files.soft < _OPEN_FILES_MIN:
        remedy = (
            f"raise the hard limit to {_OPEN_FILES_MIN} or more (limits.conf, docker run --ulimit nofile): "
            "with fewer, files are closed and opened again more often"
        )
        yield Check("open files", Status.WARNING, value, remedy)
    else:
        yield Check("open files", Status.OK, value)
    soft, hard = (_amount(limit, format_bytes) for limit in locked)
    yield Check("locked memory", Status.OK, f"{soft} (hard limit {hard})")


def versions_check() -> Check:
    """Of tierstream, what it stands on, Python and the kernel."""
    found, missing = [], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    found += [f"python {platform.python_version()}", f"kernel {platform.release()}"]
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        return Check("versions", Status.PROBLEM, f"{', '.join(found)}; missing: {' '.join(missing)}", remedy)
    return Check("versions", Status.OK, ", ".join(found))


def _torch_gpu_checks(root: probes.Root) -> Iterator[Check]:
    # torch says by a warning why it sees no device.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch: Any = importlib.import_module("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reason = _one_line(said[-1].message) if said else "torch does not say why"
        remedy = "install an NVIDIA driver that is new enough for the CUDA of torch"
        yield Check("gpu", Status.PROBLEM, f"present, but torch cannot use it: {reason}", remedy)
        return
    yield Check("gpu", Status.OK, "1" if count == 1 else f"{count}; a run uses one")
    for index in range(count):
        yield _gpu_check(torch, index)
        yield _link_check(torch, index, root)
    yield _pinning_check(torch)


def _gpu_check(torch: Any, index: int) -> Check:
    """Name, memory and capability of a GPU, after a product on it whose result is known."""
    name, properties = f"gpu {index}", torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    total = format_bytes(properties.total_memory)
    about = f"{properties.name}, {total}, compute capability {properties.major}.{properties.minor}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ones = torch.ones(64, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
            wrong = bool((ones @ ones != 64).any())
            free_bytes, _ = torch.cuda.mem_get_info(index)
    except Exception as error:  # out of memory, no kernels for this GPU, a GPU that has failed
        remedy = f"`nvidia-smi` shows its state; torch must have kernels for it ({_one_line(error)})"
        return Check(name, Status.PROBLEM, f"{about}; it does not compute", remedy)
    if wrong:
        return Check(name, Status.PROBLEM, f"{about}; it computes wrong", "have the GPU tested")
    value = f"{about}, {format_bytes(free_bytes)} free"
    if capability < _BF16_CAPABILITY:
        return Check(name, Status.WARNING, value, "it emulates bfloat16: use model.dtype: float32")
    return Check(name, Status.OK, value)


def _link_check(torch: Any, index: int, root: probes.Root) -> Check:
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    link = None
    if None not in numbers:
        domain, bus, device = numbers
        link = probes.pcie_link(f"{domain:04x}:{bus:02x}:{device:02x}.0", root)
    if link is not None and link.reduced:
        remedy = (
            "an idle GPU may lower its link: look again during a run; if it stays so, use a slot with all "
            "lanes, and look at the riser and the BIOS"
        )
        return Check(f"gpu {index} link", Status.WARNING, str(link), remedy)
    return Check(f"gpu {index} link", Status.OK, UNKNOWN if link is None else str(link))


def _pinning_check(torch: Any) -> Check:
    """Whether the driver pins host memory here; as the store does it, and more than a small `ulimit -l`."""
    memory = np.frombuffer(mmap.mmap(-1, _PIN_BYTES), dtype=np.uint8)
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status:
        remedy = (
            "raise `ulimit -l` and what WSL or the container allows to pin (docker run --ulimit memlock=-1): "
            "copies from pageable memory are slower"
        )
        value = f"refused for {format_bytes(_PIN_BYTES)} (CUDA error {status})"
        return Check("pinned memory", Status.WARNING, value, remedy)
    runtime.cudaHostUnregister(memory.ctypes.data)
    return Check("pinned memory", Status.OK, "the driver pins host memory")


def _cuda_of_torch() -> str:
    """CUDA version that torch was built with, without its import, which takes seconds; empty: none."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] or ""
    except (OSError, KeyError):
        return ""


def _device_texts(device: probes.BlockDevice | None) -> Iterator[str]:
    if device is None:
        return
    disks = []
    for disk in device.disks:
        kind = "hard disk" if _is_hard_disk(disk) else ""
        size = "" if disk.size_bytes is None else format_bytes(disk.size_bytes)
        facts = ", ".join(fact for fact in (disk.model, kind, size) if fact)
        disks.append(f"{disk.name} ({facts})" if facts else disk.name)
    named = [disk.name for disk in device.disks]
    yield "+".join(disks) if device.name in named else f"{device.name} on {'+'.join(disks)}"


def _drive_remedy(info: DirectoryInfo, device: probes.BlockDevice | None) -> str:
    if info.free_bytes < _FREE_BYTES_MIN:
        return "hardly any space is left: free some, or name a directory on another drive"
    if info.in_memory:
        return "files here take DRAM, not a drive: name a directory on an NVMe drive"
    if device is not None and any(map(_is_hard_disk, device.disks)):
        return "a hard disk is too slow for state: name a directory on an NVMe drive"
    if not info.transfer_path.direct:
        return "bytes go through the page cache, slower: name a directory on ext4 or xfs"
    return ""


def _is_hard_disk(disk: probes.Disk) -> bool:
    """Drives without a model are virtual, and call themselves rotational whatever they lie on."""
    return bool(disk.rotational and disk.model)


def _amount(limit: int | None, text: Callable[[int], str] = str) -> str:
    return "unlimited" if limit is None else text(limit)


def _one_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
