"""`tierstream bench storage PATH...`"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tierstream.engine.streaming import StreamedStore
from tierstream.io import probes
from tierstream.io.backend import Buffer, open_backend, resolve_backend
from tierstream.io.drive_rates import BackendKind, BufferKind, Tuning, best_tuning
from tierstream.io.errors import ConfigError
from tierstream.io.kvikio_backend import cuda_device_present, kvikio_problem
from tierstream.io.measure import Case, Labels, Measurement
from tierstream.io.profile import DriveProfile, MachineProfile, drive_identity
from tierstream.io.sizes import format_bytes
from tierstream.tools.bench.fio import fio_program
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.report import check_file, check_output, present, run_cases
from tierstream.tools.bench.result import PART, Result
from tierstream.tools.options import parse_options, take_paths

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


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    from tierstream.tools.bench.drives import StorageOptions

    paths, rest = take_paths(args, "PATH", _PROG)
    options = parse_options(StorageOptions, rest, prog=f"{_PROG} PATH...", description=_DESCRIPTION)
    check_output(options)
    result, profile = measure_storage(paths, options, shlex.split(_PROG) + list(args))
    if options.profile is not None:
        profile.save(options.profile)
    present(result, storage_plots(result.measurements), options)
    return 0


def measure_storage(
    paths: Sequence[str], options: StorageOptions, command: list[str]
) -> tuple[Result, MachineProfile]:
    """All measurements of the paths, and the profile with what was found of their drives."""
    from tierstream.tools.bench.drives import MeasuredPath, check_paths
    from tierstream.tools.bench.machine import describe_machine

    # Each result names the way its bytes took; a warning per backend that is opened would bury them.
    logging.getLogger("tierstream.io.posix").setLevel(logging.ERROR)
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
            for backend, buffer in kinds:
                way = path.way(backend, buffer)
                notes.append(f"{path.path}, {backend} to {buffer} memory: {way.path}")
                cases = _labelled(path.grid(way), _TUNING, name)
                found = run_cases(cases, max(2, options.rounds // 2))
                tunings[path, way] = best_tuning(found)
                notes.append(f"best there: {_shown(tunings[path, way])}")
                measurements += found
            mine = {way: tuning for (owner, way), tuning in tunings.items() if owner is path}
            with ExitStack() as passes:
                best = run_cases(_labelled(path.best(mine, home, passes), _BEST, name), options.rounds)
            measurements += best
            notes += _ratios(best)
            profile = _add_drive(profile, path, mine, best)
        together = _together(measured, home, tunings, measurements, options)
        measurements += together
        notes += _ratios(together)
    notes += _shared_drives(measured)
    title = f"Storage at {', '.join(path.path for path in measured)}"
    result = Result("storage", title, command, describe_machine(), measurements, notes)
    return result, profile


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
    drive = {"drive": path} if path else {}
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
    state_bytes = sum(path.target.nbytes for path, _ in mine)
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
        return run_cases(_labelled(cases, _BEST, "all of them"), options.rounds)


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
        (found.labels["backend"], found.labels["access"]): found
        for found in best
        if found.labels["buffer"] == "host"
        and (found.labels["path"] != "posix-buffered" or not _has_direct(best))
    }
    for found in best:
        backend, access = str(found.labels["backend"]), str(found.labels["access"])
        if backend.startswith("fio") and ("posix", access) in plain:
            ours = plain["posix", access].median / found.median
            lines.append(f"{access}: {ours:.2f} of what {backend} gets, same pattern, block and depth")
        owner = backend.removeprefix("store, ")
        peer = {"stream": "read", "update": "mixed"}.get(access, "")
        if owner != backend and (owner, peer) in plain:
            ratio = found.median / plain[owner, peer].median
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
