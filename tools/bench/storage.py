"""`tierstream bench storage PATH...`"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tierstream.engine.measure.streaming import StreamedStore
from tierstream.io import mounts, probes, seam
from tierstream.io.backend import BackendKind, Buffer, open_backend, resolve_backend
from tierstream.io.drive_rates import BufferKind, Tuning, best_tuning
from tierstream.io.errors import ConfigError
from tierstream.io.kvikio_backend import cuda_device_present, kvikio_problem
from tierstream.io.measure import Case, Labels, Measurement
from tierstream.io.profile import DriveProfile, MachineProfile, drive_identity
from tierstream.io.sizes import format_bytes
from tierstream.tools.bench.fio import fio_program
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import check_output, present, run_cases
from tierstream.tools.bench.result import DRIVE, PART, Result
from tierstream.tools.options import parse_options, take_paths
from tierstream.tools.outputs import check_file
from tierstream.tools.quiet import without_warnings

if TYPE_CHECKING:
    from tierstream.tools.bench.drives import MeasuredPath, StorageOptions, Way

_PROG = "tierstream bench storage"
_DESCRIPTION = """\
Measure what drives give, through the code that moves bytes in training.
- PATH is a directory, in which files are written, measured and removed again;
  or a file, which is only read.
- First every combination of block, threads and queue depth is tried; then the
  best is measured beside the page cache, the passes of training through a store,
  and, on demand, fio.
"""
_TUNING, _BEST = "tuning", "best"
_LEGEND = [
    "read, write, mixed: blocks in order; mixed reads half of them and writes the others, and counts both",
    "posix-buffered: through the page cache, which is emptied before reads; writes include fsync",
    "host: requests go to and from 512 MiB of memory in turn, as training's do; reused: to and from as few "
    "buffers as requests, as fio's do, which a processor's cache may keep",
    "stream: a store's pages read in order; update: each page read and written back once, as by the "
    "optimizer, both counted; first write: into space that was reserved and never written",
    "a cache in the drive, or in the host of a virtual machine, is part of what was measured",
]
#: Of a median: a figure that varies more says little.
_SPREAD_MAX = 0.3


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    from tierstream.tools.bench.drives import StorageOptions

    paths, rest = take_paths(args, "PATH", _PROG)
    options = parse_options(StorageOptions, rest, prog=f"{_PROG} PATH...", description=_DESCRIPTION)
    check_output(options)
    # Each result names the way its bytes took; a warning per backend that is opened would bury them.
    with without_warnings("tierstream.io.posix"):
        result, profile = measure_storage(paths, options, shlex.split(_PROG) + list(args))
    if options.profile is not None:
        profile.save(options.profile)
    present(result, storage_plots(result.measurements), options)
    return 0


def measure_storage(
    paths: Sequence[str], options: StorageOptions, command: list[str]
) -> tuple[Result, MachineProfile]:
    """All measurements of the paths, and the profile with what was found of their drives."""
    from tierstream.engine.measure.machine_facts import describe_machine
    from tierstream.tools.bench.drives import MeasuredPath, check_paths

    profile = start_profile(options)
    kinds = _kinds(options)
    home = _home(kinds)
    if options.require_gds:
        _check_gds(paths)
    if options.compare is not None:
        fio_program()
    sizes = check_paths(paths, options)
    with ExitStack() as stack:
        measured = [
            MeasuredPath(path, nbytes, options, stack, _allocate_device)
            for path, nbytes in zip(paths, sizes, strict=True)
        ]
        measurements: list[Measurement] = []
        notes: list[str] = []
        tunings: dict[tuple[MeasuredPath, Way], Tuning] = {}
        for path in measured:
            name = path.path if len(paths) > 1 else ""
            ways = [path.way(*kind) for kind in kinds]
            _announce(path, ways, options)
            for way in ways:
                notes.append(f"{path.path}, {way.backend} to {way.buffer} memory: {way.path}")
                cases = _labelled(path.grid(way), _TUNING, name)
                what = f"{path.path}: search for the best setting of {way.backend}"
                found = run_cases(cases, _grid_rounds(options), warmups=0, what=what)
                tunings[path, way] = best_tuning(found)
                notes.append(f"best there: {_shown(tunings[path, way])}")
                measurements += found
            mine = {way: tunings[path, way] for way in ways}
            with ExitStack() as passes:
                cases = _labelled(path.best(mine, home, passes), _BEST, name)
                best = run_cases(cases, options.rounds, what=f"{path.path}: the best setting")
            measurements += best
            notes += _remarks(path, best)
            profile = _add_drive(profile, path, mine, best)
            if options.profile is not None:
                profile.save(options.profile)  # what was found of a drive is kept, whatever comes after
        together = _together(measured, home, tunings, measurements, options)
        measurements += together
        notes += _ratios(together)
    notes += [*_shared_drives(measured), *_LEGEND]
    title = f"Storage at {', '.join(path.path for path in measured)}"
    machine = describe_machine() | {f"at {path.path}": describe_path(path.path) for path in measured}
    result = Result("storage", title, command, machine, measurements, notes)
    return result, profile


def _grid_rounds(options: StorageOptions) -> int:
    return max(2, options.rounds // 2)


def _announce(path: MeasuredPath, ways: Sequence[Way], options: StorageOptions) -> None:
    """What is about to be done to a drive: people plan their time, and drives wear by writes."""
    seconds, nbytes = path.cost(ways, _grid_rounds(options))
    about = f"about {max(1, round(seconds / 10) * 10)} s, {nbytes / 1e9:.0f} GB written"
    print(f"{path.path}: {about}; Ctrl-C stops and leaves nothing", file=sys.stderr, flush=True)


def describe_path(path: str) -> str:
    """The drive under it."""
    device, usage = probes.block_device(path), seam.current().statvfs(path)
    models = [disk.model for disk in device.disks if disk.model] if device else []
    parts = [device.name] if device else []
    parts += [*models, drive_identity(path)[1], f"{format_bytes(usage.f_bavail * usage.f_frsize)} free"]
    return ", ".join(parts)


def _remarks(path: MeasuredPath, best: Sequence[Measurement]) -> list[str]:
    """Ratios, and what makes figures doubtful."""
    lines = []
    if drive_identity(path.path)[1] in mounts.MEMORY_FILESYSTEMS:
        lines.append(f"{path.path} is memory, not a drive")
    else:
        lines += _ratios(best)
    if path.busy:
        lines.append(f"another program of ours was at work in {path.path}: the drive gives more than this")
    doubtful = [
        f"{found.labels['access']} by {found.labels['backend']} ({100 * found.spread:.0f} %)"
        for found in best
        if found.spread > _SPREAD_MAX
    ]
    if doubtful:
        lines.append(f"varied a lot, repeat when the machine is quiet: {', '.join(doubtful)}")
    return lines


def _kinds(options: StorageOptions) -> list[tuple[BackendKind, BufferKind]]:
    """Backends and the memory at their other end.

    Raises:
        ConfigError: what was asked for cannot be had here.
    """
    problem = kvikio_problem()
    backends: list[BackendKind] = options.backend or ["posix", "kvikio"]
    if options.backend is None and problem:
        backends = ["posix"]
    if "kvikio" in backends and problem:
        raise ConfigError(f"the backend kvikio cannot be used: {problem}")
    on_gpu = cuda_device_present() and "kvikio" in backends
    buffers: list[BufferKind] = options.buffer or ["host", "device"]
    if options.buffer is None and not on_gpu:
        buffers = ["host"]
    if "device" in buffers and not on_gpu:
        raise ConfigError("device buffers need a CUDA device and the backend kvikio: choose --buffer host")
    return [
        (backend, buffer)
        for backend in backends
        for buffer in buffers
        if (backend, buffer) != ("posix", "device")
    ]


def _check_gds(paths: Sequence[str]) -> None:
    problem = kvikio_problem() or ("" if cuda_device_present() else "there is no CUDA device")
    if problem:
        raise ConfigError(f"--require-gds: GPUDirect Storage is not available: {problem}")
    backend = open_backend("kvikio")
    try:
        for path in paths:
            taken = backend.transfer_path(path, device=True)
            if taken.name != "gds":
                raise ConfigError(f"--require-gds: bytes of {path} would reach the GPU by {taken}")
    finally:
        backend.close()


def _allocate_device(nbytes: int) -> Buffer:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 256)


def _labelled(cases: Sequence[Case], part: str, path: str) -> list[Case]:
    drive = {DRIVE: path} if path else {}
    return [replace(case, labels={PART: part, **drive, **case.labels}) for case in cases]


def _home(kinds: Sequence[tuple[BackendKind, BufferKind]]) -> BackendKind:
    """The backend that training would take, or else the first that is measured."""
    usual, measured = resolve_backend("auto"), [backend for backend, _ in kinds]
    return usual if usual in measured else measured[0]


def _together(
    measured: Sequence[MeasuredPath],
    home: BackendKind,
    tunings: dict[tuple[MeasuredPath, Way], Tuning],
    measurements: Sequence[Measurement],
    options: StorageOptions,
) -> list[Measurement]:
    """The passes of training over all directories as one store, each with the share that its mixed rate
    gives it.
    """
    mine = [
        (path, way) for path, way in tunings if path.folder and (way.backend, way.buffer) == (home, "host")
    ]
    if len(mine) < 2:
        return []
    rates = [_rate(measurements, "mixed", way, path.path) for path, way in mine]
    weights = [rate or 1.0 for rate in rates] if all(rates) else [1.0] * len(mine)
    state_bytes = sum(path.state_bytes for path, _ in mine)
    labels: Labels = {"backend": f"store, {home}", "path": mine[0][1].path.name, "buffer": "host"}
    with ExitStack() as passes:
        drives = [
            path.drive(way, tunings[path, way], weight, passes)
            for (path, way), weight in zip(mine, weights, strict=True)
        ]
        store = passes.enter_context(
            StreamedStore(drives, state_bytes=state_bytes, page_bytes=int(options.page))
        )
        cases = [store.case("stream", labels), store.case("update", labels)]
        cases = _labelled(cases, _BEST, "all of them")
        return run_cases(cases, options.rounds, what="all drives as one store")


def _rate(measurements: Sequence[Measurement], access: str, way: Way, path: str = "") -> float | None:
    """Median of an access at the way's best tuning."""
    wanted = {PART: _BEST, "access": access, "backend": way.backend, "buffer": way.buffer}
    wanted |= {"path": way.path.name}
    for found in measurements:
        labels = found.labels
        if labels.get("drive", path) == path and all(labels.get(k) == v for k, v in wanted.items()):
            return found.median
    return None


def _ratios(best: Sequence[Measurement]) -> list[str]:
    """Sentences that set our path beside fio, and training's passes beside the plain accesses."""
    lines = []
    plain = {
        (found.labels["backend"], found.labels["access"], found.labels["buffer"]): found
        for found in best
        if found.labels["path"] != "posix-buffered" or not _has_direct(best)
    }
    for found in best:
        backend, access = str(found.labels["backend"]), str(found.labels["access"])
        if backend.startswith("fio") and (same := plain.get(("posix", access, "host, reused"))):
            ours = same.median / found.median
            same_as = "same pattern, block, depth and memory"
            lines.append(f"{access}: {ours:.2f} of what {backend} gets, {same_as}")
        owner = backend.removeprefix("store, ")
        peer = {"stream": "read", "update": "mixed"}.get(access, "")
        if owner != backend and (owner, peer, "host") in plain:
            ratio = found.median / plain[owner, peer, "host"].median
            lines.append(
                f"{access} pass through a store ({owner}): {ratio:.2f} of the plain {peer} rate, "
                f"{found.cpu_s_per_giga:.3f} CPU seconds per GB"
            )
    return lines


def _has_direct(best: Sequence[Measurement]) -> bool:
    return any(found.labels.get("path") not in ("posix-buffered", "buffered") for found in best)


def start_profile(options: StorageOptions) -> MachineProfile:
    """What the file already knows of this machine, or an empty profile of it.

    Raises:
        ConfigError: the file is damaged, of another machine, or cannot be written.
    """
    path = options.profile
    if path is not None:
        check_file("--profile", path)
    known = MachineProfile.load(path) if path is not None and os.path.exists(path) else MachineProfile()
    cpu = probes.cpu_model()
    if known.cpu not in ("", cpu):
        raise ConfigError(
            f"{path} is of another machine ({known.cpu}, here {cpu}): name a new file or remove it"
        )
    return replace(known, cpu=cpu, measured=datetime.now(UTC).isoformat(timespec="seconds"))


def _add_drive(
    profile: MachineProfile,
    path: MeasuredPath,
    tunings: dict[Way, Tuning],
    best: Sequence[Measurement],
) -> MachineProfile:
    if path.folder is None:
        return profile
    device, filesystem = drive_identity(path.path)
    for way, tuning in tunings.items():
        rates = {access: _rate(best, access, way, path.path) for access in ("read", "write", "mixed")}
        if way.buffer == "host" and all(rates.values()):
            measured = {access: rate or 0.0 for access, rate in rates.items()}
            drive = DriveProfile(
                directory=path.path,
                device=device,
                filesystem=filesystem,
                backend=way.backend,
                tuning=tuning,
                **measured,
            )
            profile = profile.with_drive(drive)
    return profile


def _shared_drives(measured: Sequence[MeasuredPath]) -> list[str]:
    by_device: dict[str, list[str]] = {}
    for path in measured:
        by_device.setdefault(drive_identity(path.path)[0], []).append(path.path)
    return [
        f"{', '.join(paths)} lie on one drive: together they give what it gives"
        for paths in by_device.values()
        if len(paths) > 1
    ]


def _shown(tuning: Tuning) -> str:
    return (
        f"{tuning.threads} threads, blocks of {format_bytes(tuning.task_bytes)}, "
        f"queue depth {tuning.queue_depth}"
    )


def storage_plots(measurements: Sequence[Measurement]) -> list[PlotSpec]:
    """The plots of a report: the search for the best tuning, and what was measured at it."""
    series = ["block_bytes"]
    tuned = [found for found in measurements if found.labels[PART] == _TUNING]
    for key in ("backend", "buffer", "drive", "queue_depth"):
        depth_follows = key == "queue_depth" and len({_shape(found) for found in tuned}) == len(tuned)
        if len({found.labels.get(key) for found in tuned}) > 1 and not depth_follows:
            series.append(key)
    best = ("backend", "path", *(["drive"] if any("drive" in m.labels for m in measurements) else []))
    tuning = PlotSpec("tuning", "Rate by threads and block", "threads", tuple(series), "access", log_x=True)
    return [
        replace(tuning, only=(PART, _TUNING)),
        PlotSpec("best", "At the best tuning", "access", best, only=(PART, _BEST)),
    ]


def _shape(found: Measurement) -> tuple[object, ...]:
    keys = ("drive", "backend", "buffer", "access", "threads", "block_bytes")
    return tuple(found.labels.get(key) for key in keys)
