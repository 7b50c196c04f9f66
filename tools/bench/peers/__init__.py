"""Other ways to train a model that does not fit, beside ours: each in a process of its own.

A peer gets the same architecture, first weights, batch, dtype, clipping and AdamW as our cases, and takes
turns with them. A line of JSON goes to it for each thing to do, and one comes back when that is done:

    -> the fields of a `Job`    <- {"settings": {...}, "versions": {...}}
    -> {"steps": N}             <- the fields of a `Turn`

It ends when its standard input does: when it is closed, or when our process dies. Whatever else it prints
goes to a log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from tierstream.io.drives import check_directories
from tierstream.io.errors import ConfigError, TierstreamError
from tierstream.io.measure import Case, Labels, Sample
from tierstream.io.scratch import ScratchFolder

if TYPE_CHECKING:
    from tierstream.engine.measure.train_bench import RunRecord

PeerName = Literal["deepspeed-cpu", "deepspeed-nvme", "fsdp2-offload"]
PEER_NAMES: tuple[PeerName, ...] = get_args(PeerName)
_DEEPSPEED = "deepspeed"
_MODULES: dict[PeerName, str] = {
    "deepspeed-cpu": _DEEPSPEED,
    "deepspeed-nvme": _DEEPSPEED,
    "fsdp2-offload": "fsdp2",
}
#: What DeepSpeed keeps on the drive: fp32 weights, two moments and the gradient.
_NVME_BYTES_PER_PARAMETER = 16
#: DeepSpeed compiles its kernels when it is used for the first time: minutes.
_START_LIMIT_S = 1800.0
#: The slowest that was seen, with the optimizer on a cloud drive, took 14 s for each 10^9 parameters.
_STEP_LIMIT_S = 600.0
#: torch waits for ever for a build that was killed.
_STALE_LOCK = "; if a file named lock lies in ~/.cache/torch_extensions/*/* and nothing compiles, remove it"
_LOG_TAIL_CHARACTERS = 800


class PeerError(TierstreamError):
    """A peer that could not be started, or ended before its time."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a peer trains.

    Attributes:
        config: the directory of a config.json, for random weights.
        seed: of the weights.
        optimizer: fields of `OptimizerConfig`.
        nvme_dir: an empty directory for the state; None: it lives in host memory.
    """

    config: str
    dtype: str
    rows: int
    seq_len: int
    seed: int
    device: str
    kernels: str
    optimizer: dict[str, Any]
    nvme_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps of a peer.

    Attributes:
        seconds, cpu_s: wall time and processor time of all of them.
        losses, grad_norms: of every step; a norm is None where the peer, without clipping, computes none.
        gpu_peak_bytes: the most that torch had allocated; None: CPU.
        host_peak_bytes: the most host memory that the peer's process had resident.
    """

    seconds: float
    cpu_s: float
    losses: list[float]
    grad_norms: list[float | None]
    gpu_peak_bytes: int | None
    host_peak_bytes: int


class PeerProcess:
    """The process of a peer, at work on a job. `settings` and `versions` are what it said of itself.

    Args:
        log: a file for what it prints.

    Raises:
        PeerError: it ended, or did not answer within the limit; with the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        job: Job,
        log: Path,
        *,
        limit_s: float = _START_LIMIT_S,
    ) -> None:
        self._name, self._log = name, log
        with log.open("wb") as output:
            # A session of its own: a Ctrl-C reaches us alone, and with it end the compilers that it started.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=dict(environment),
                start_new_session=True,
            )
        try:
            ready = self._ask(asdict(job), limit_s)
        except BaseException:
            self.close()
            raise
        self.settings: dict[str, Any] = ready["settings"]
        self.versions: dict[str, str] = ready["versions"]

    def run(self, steps: int, *, limit_s: float = _STEP_LIMIT_S) -> Turn:
        """Some steps, in at most `limit_s` each.

        Raises:
            PeerError: it ended, or took longer.
        """
        return Turn(**self._ask({"steps": steps}, steps * limit_s))

    def close(self) -> None:
        """Ends the process."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # a line that it did not live to read
                stream.close()

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        try:
            answer = self._exchange(json.dumps(message))
        finally:
            timer.cancel()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        status = self._process.wait()
        how = f"ended with status {status}"
        if late.is_set():
            how = f"did not answer within {limit_s:g} s{_STALE_LOCK}"
        tail = " ".join(self._log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].split())
        raise PeerError(
            f"--baseline {self._name}: its process {how}; it said last: {tail or 'nothing'}. Choose a "
            "smaller shape, --rows or --layers, run it alone with --turns blocks, or leave it out"
        )

    def _exchange(self, line: str) -> str:
        """The answer; empty: the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass
class PeerCase:
    """A peer as one of the cases of a benchmark. Use as a context manager: the end stops it, and removes what
    it wrote.

    Args:
        nvme_dir: where a peer that wants one gets a directory of its own.
        log: a file for what it prints.
        parameters: of the model.

    Raises:
        PeerError: it does not start. StorageError: its directory has too little room.
    """

    name: PeerName
    job: Job
    nvme_dir: str | None
    log: Path
    parameters: int
    records: list[RunRecord] = field(default_factory=list)

    def __enter__(self) -> PeerCase:
        with ExitStack() as parts:
            job = self.job
            if uses_nvme(self.name):
                assert self.nvme_dir is not None
                check_directories([(self.nvme_dir, _NVME_BYTES_PER_PARAMETER * self.parameters)])
                folder = parts.enter_context(ScratchFolder(self.nvme_dir))
                job = replace(job, nvme_dir=folder.path)
            self.process = PeerProcess(self.name, command(self.name), environment(job.device), job, self.log)
            parts.callback(self.process.close)
            self._parts = parts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.close()

    def case(self, steps: int, labels: Labels) -> Case:
        """Something that `measure` runs: some steps, counted in tokens."""
        return Case(labels, "tokens", lambda: self.run(steps))

    def run(self, steps: int) -> Sample:
        """Some steps; recorded."""
        from tierstream.engine.measure.train_bench import RunRecord

        turn = self.process.run(steps)
        record = RunRecord(
            losses=turn.losses,
            grad_norms=[norm for norm in turn.grad_norms if norm is not None],
            seconds=turn.seconds,
            traffic=None,
            stall_s={},
            gpu_peak_bytes=turn.gpu_peak_bytes,
            host_peak_bytes=turn.host_peak_bytes,
        )
        self.records.append(record)
        return Sample(steps * self.job.rows * self.job.seq_len, turn.seconds, turn.cpu_s)


def uses_nvme(name: PeerName) -> bool:
    """Whether the peer keeps state on a drive."""
    return name == "deepspeed-nvme"


def check_installed(name: PeerName) -> None:
    """Raises ConfigError: what the peer needs is not there."""
    if _MODULES[name] == _DEEPSPEED and importlib.util.find_spec(_DEEPSPEED) is None:
        raise ConfigError(
            f"--baseline {name}: deepspeed is not installed; pip install 'tierstream[peers]', or leave it out"
        )


def command(name: PeerName) -> list[str]:
    """What starts the peer. Without -P the folder that we happen to be in would be searched for modules."""
    return [sys.executable, "-P", "-m", f"{__name__}.{_MODULES[name]}"]


def environment(device: str) -> dict[str, str]:
    """That of a group of one process on this device, as torch.distributed and DeepSpeed read it. DeepSpeed's
    compilers are started by the ninja that lies beside Python.
    """
    kind, _, index = device.partition(":")
    return os.environ | {
        "RANK": "0",
        "LOCAL_RANK": index or "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "DS_ACCELERATOR": kind,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
