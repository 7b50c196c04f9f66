"""The machine profile: what was measured here once, in a file that training reads.

`tierstream bench --profile machine.json DIR...` writes it. A figure is used only on what it was measured on:
drives are known by device number and file system, the rest by the names of processor and GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tierstream.io import mounts, seam
from tierstream.io.backend import BackendKind, PathLike
from tierstream.io.drive_rates import ACCESSES, DriveTarget, Setting, Tuning
from tierstream.io.durable import write_file
from tierstream.io.errors import ConfigError, storage_errors
from tierstream.io.measure import measure
from tierstream.io.scratch import ScratchFolder
from tierstream.io.throttle import Limits

FORMAT = 3
THREADS_MAX = 1024
_QUICK_FILE_BYTES = 64 << 20
_LONG_FILE_BYTES_MAX = 4 << 30
#: Requests under way in a quick measurement: enough for any drive, and 64 MiB of memory.
_QUICK_QUEUE_DEPTH = 16
#: A drive with less free space than so many of the file is not measured: the state comes first.
_SPARE_FILES = 4
#: What a section of figures holds, if it holds any.
_FIGURES = {
    "copy": {"upload", "download", "both"},
    "host": {"bytes", "cores", "memory", "copy", "page_s", "wake_s"},
    "device": {"bytes", "memory", "launch_s"},
}
#: Figures that are counted, and what is plausible of them.
_COUNTS = {
    "bytes": (1 << 20, 1 << 50), "cores": (1, 1 << 16), "threads": (1, THREADS_MAX),
    "task_bytes": (512, 1 << 40), "queue_depth": (1, 1 << 20),
}  # fmt: skip
#: What is plausible of seconds, whose keys end in "_s", and of rates: those of compute and update, and bytes.
#: Times are simulated, which takes for ever, or gives nonsense, where they lie too far apart.
_SECONDS = (1e-9, 1.0)
_RATES = {"compute": (1e6, 1e18, "FLOP"), "update": (1e3, 1e14, "parameters")}
_BYTE_RATES = (1e3, 1e14, "bytes")
_Section = TypeVar("_Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveProfile:
    """One drive, worked on in its best way. Rates in bytes per second.

    Attributes:
        directory: where it was measured.
        device: number of its block device, "major:minor".
        filesystem: type of its file system.
        backend: "posix" or "kvikio".
        tuning: threads, block and queue depth at which the rates were measured.
        read, write: alone.
        mixed: both at once, half the bytes each; counts both.
    """

    directory: str
    device: str
    filesystem: str
    backend: BackendKind
    tuning: Tuning
    read: float
    write: float
    mixed: float

    def within(self, limits: Limits | None, users: int = 1) -> Throughput:
        """What one of the `users` directories of a drive gives, each as a drive of its own within the limits.
        Both directions share evenly what they may have together; what one cannot take goes to the other.
        """
        limits = limits or Limits()
        read = min(self.read / users, limits.read, limits.total)
        write = min(self.write / users, limits.write, limits.total)
        both = min(self.mixed / users, limits.total)
        read_mixed = min(read, max(both / 2, both - write))
        write_mixed = min(write, both - read_mixed)
        return Throughput(read=read, write=write, read_mixed=read_mixed, write_mixed=write_mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What a drive gives to one who keeps it busy. Bytes per second.

    Attributes:
        read, write: alone.
        read_mixed, write_mixed: while the other is busy as well.
    """

    read: float
    write: float
    read_mixed: float
    write_mixed: float

    @property
    def mixed(self) -> float:
        """Both at once, half the bytes each; counts both."""
        return 2 * min(self.read_mixed, self.write_mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What is known of a machine; empty mappings and zeros: not measured.

    Attributes:
        cpu, gpu: their names.
        measured: date and time, ISO 8601.
        drives: every drive once per backend.
        copy: bytes per second from pinned memory to the GPU ("upload"), back ("download"), and of both at
            once ("both").
        update: AdamW with the split master, parameters per second, by number of threads.
        compute: FLOP per second of a large matrix product, by dtype.
        host: "bytes" of memory, "cores", bytes per second of "memory" (read and written by all cores, as
            AdamW does) and of a "copy" by one thread, the seconds of Python that the use of a page takes
            ("page_s") and those in which a thread wakes another ("wake_s").
        device: of the GPU, or of the CPU where there is none: "bytes" of its memory, bytes per second of
            "memory", and the seconds of one operation of torch ("launch_s").
    """

    cpu: str = ""
    gpu: str = ""
    measured: str = ""
    drives: tuple[DriveProfile, ...] = ()
    copy: Mapping[str, float] = field(default_factory=dict)
    update: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: PathLike) -> Self:
        """Reads the file.

        Raises:
            StorageError: it is missing or cannot be read.
            ConfigError: it is no profile, or of another format.
        """
        name = os.fspath(path)
        with storage_errors("reading machine profile", name):
            content = Path(name).read_bytes()
        try:
            plain = dict(_object("its content", json.loads(content)))
            if (number := plain.pop("format", None)) != FORMAT:
                raise ValueError(f"its format is {number}, this version reads {FORMAT}")
            if not isinstance(plain.get("drives"), list):
                raise ValueError("drives is no list")
            drives = tuple(_drive_of(f"drives[{i}]", drive) for i, drive in enumerate(plain["drives"]))
            return _section(cls, "", {**plain, "drives": drives})
        except ValueError as error:
            raise ConfigError(
                f"{name} is not a machine profile ({error}): remove it, and write it anew with "
                f"`tierstream bench --profile {name} DIRECTORY...`"
            ) from error

    def save(self, path: PathLike) -> None:
        """Writes the file, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        write_file(os.path.abspath(path), f"{text}\n".encode())

    def drive_for(self, directory: PathLike, backend: str) -> DriveProfile | None:
        """What was measured of the drive that holds the existing `directory`, through this backend."""
        device, filesystem = drive_identity(directory)
        for drive in self.drives:
            if (drive.device, drive.filesystem, drive.backend) == (device, filesystem, backend):
                return drive
        return None

    def with_drive(self, drive: DriveProfile) -> MachineProfile:
        """The profile with this drive in place of what it knew of it."""
        key = (drive.device, drive.backend)
        others = [known for known in self.drives if (known.device, known.backend) != key]
        return replace(self, drives=(*others, drive))


def drive_identity(directory: PathLike) -> tuple[str, str]:
    """(device number "major:minor", file system type) of an existing directory.

    Raises:
        StorageError: it is missing.
    """
    name = os.fspath(directory)
    with storage_errors("looking at", name):
        number = seam.current().stat(name).st_dev
        return f"{os.major(number)}:{os.minor(number)}", mounts.filesystem_of(name)


def measure_drive(directory: PathLike, backend: BackendKind, tuning: Tuning) -> DriveProfile | None:
    """Measures the drive of an existing directory in a second or two, as `tuning` works on it; the best of a
    few runs counts, since other users of a drive only ever slow it down.

    Returns:
        None where too little space is free.

    Raises:
        StorageError: the drive fails.
    """
    quick = replace(tuning, queue_depth=min(tuning.queue_depth, _QUICK_QUEUE_DEPTH))
    found = _rates(directory, backend, quick, _QUICK_FILE_BYTES, rounds=2, warmups=1)
    return None if found is None else _drive(directory, backend, tuning, found)


def measure_long(drive: DriveProfile, directory: PathLike, seconds: float) -> DriveProfile | None:
    """What the drive keeps up for about so long with each access, which may be less than what it gives at
    first, as `drive.tuning` works on it, its queue always full.

    Args:
        directory: existing, on that drive.

    Returns, Raises:
        As `measure_drive`.
    """
    amount = max(_QUICK_FILE_BYTES, min(int(seconds * drive.mixed), _LONG_FILE_BYTES_MAX))
    amount -= amount % _QUICK_FILE_BYTES
    tuning = drive.tuning
    full = replace(tuning, queue_depth=min(tuning.queue_depth, 2 * tuning.threads))
    found = _rates(directory, drive.backend, full, amount, rounds=1, warmups=0)
    return None if found is None else _drive(directory, drive.backend, tuning, found)


def _rates(
    directory: PathLike, backend: BackendKind, tuning: Tuning, amount_bytes: int, *, rounds: int, warmups: int
) -> Sequence[float] | None:
    """The best of the rounds of each of `ACCESSES`; None: too little space is free."""
    name = os.fspath(directory)
    usage = seam.current().statvfs(name)
    if usage.f_bavail * usage.f_frsize < _SPARE_FILES * amount_bytes:
        return None
    with ScratchFolder(name) as folder:
        target = DriveTarget([folder.new_file("file", amount_bytes)], amount_bytes)
        settings = [Setting(access=access, tuning=tuning, backend=backend) for access in ACCESSES]
        cases = [target.case(each, amount_bytes) for each in settings]
        return [max(found.rates) for found in measure(cases, rounds=rounds, warmups=warmups)]


def _drive(
    directory: PathLike, backend: BackendKind, tuning: Tuning, rates: Sequence[float]
) -> DriveProfile:
    device, filesystem = drive_identity(directory)
    name, (read, write, mixed) = os.path.abspath(os.fspath(directory)), rates
    return DriveProfile(
        directory=name, device=device, filesystem=filesystem, backend=backend, tuning=tuning,
        read=read, write=write, mixed=mixed,
    )  # fmt: skip


def _drive_of(where: str, plain: object) -> DriveProfile:
    drive = _object(where, plain)
    tuning = _section(Tuning, f"{where}.tuning.", _object(f"{where}.tuning", drive.get("tuning")))
    return _section(DriveProfile, f"{where}.", {**drive, "tuning": tuning})


def _section(cls: type[_Section], prefix: str, plain: Mapping[str, Any]) -> _Section:
    """An instance of the dataclass; ValueError names keys too few or too many, and figures that are none."""
    known = {entry.name: entry.type for entry in fields(cls)}  # type: ignore[arg-type]
    if plain.keys() != known.keys():
        odd = sorted(plain.keys() ^ known.keys())
        raise ValueError(f"keys {', '.join(prefix + key for key in odd)} are missing or unknown")
    for key, kind in known.items():
        if kind in ("float", "int"):
            _check_figure(prefix, key, plain[key])
        elif kind == "Mapping[str, float]":
            _check_figures(key, _object(key, plain[key]))
        elif kind == "str" and not isinstance(plain[key], str):
            raise ValueError(f"{prefix}{key} is {plain[key]!r}, not a text")
    return cls(**plain)


def _check_figures(section: str, plain: Mapping[str, Any]) -> None:
    """Raises ValueError."""
    if plain and (missing := sorted(_FIGURES.get(section, set()) - plain.keys())):
        raise ValueError(f"{section} lacks {', '.join(missing)}")
    for key, value in plain.items():
        if section == "update" and not re.fullmatch("[1-9][0-9]{0,8}", key):
            raise ValueError(f"{section} has the key {key!r}, not a number of threads")
        _check_figure(f"{section}.", key, value)


def _check_figure(prefix: str, key: str, value: object) -> None:
    """Raises ValueError: it is no number, or none that a machine has."""
    said = f"{prefix}{key} is {value!r}"
    least: float
    most: float
    if key in _COUNTS:
        (least, most), unit = _COUNTS[key], ""
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{said}, not a whole number")
    elif key.endswith("_s"):
        (least, most), unit = _SECONDS, " seconds"
    else:
        least, most, unit = _RATES.get(prefix.removesuffix("."), _BYTE_RATES)
        unit = f" {unit} per second"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{said}, not a number")
    if not least <= value <= most:
        raise ValueError(f"{said}; plausible are {least:.12g} to {most:.12g}{unit}")


def _object(where: str, plain: object) -> Mapping[str, Any]:
    """Raises ValueError: it is none of JSON."""
    if not isinstance(plain, dict):
        raise ValueError(f"{where} is no object")
    return plain
