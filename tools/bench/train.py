"""`tierstream bench train`"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tierstream.engine.config import RunConfig
from tierstream.engine.model import kernels
from tierstream.engine.model.shapes import architecture
from tierstream.engine.page_size import page_warning
from tierstream.io.drives import check_directories
from tierstream.io.errors import ConfigError, TierstreamError
from tierstream.io.scratch import ScratchFolder
from tierstream.tools.bench import peers
from tierstream.tools.bench.peers import PeerCase, PeerName
from tierstream.tools.bench.report import TracedCase, check_output, present, run_cases
from tierstream.tools.bench.result import Result
from tierstream.tools.bench.train_options import TrainBenchOptions, errors_name_options, in_options
from tierstream.tools.options import parse_options

if TYPE_CHECKING:
    from tierstream.engine.bound import Rates
    from tierstream.engine.measure.machine import KnownDrive
    from tierstream.engine.measure.train_bench import Setting
    from tierstream.engine.step.batch import Batch
    from tierstream.tools.bench.training import MeasuredCase, Row

_PROG = "tierstream bench train"
_DESCRIPTION = """\
Measure how fast the executor trains, over random weights and random tokens.
- Each combination of --gpu, --clip-norm and --placement is a case; cases take
  turns, round by round, and train one state. --layers with several depths
  repeats all of it.
- --baseline resident: the same model, batch and loss, all of it on the device,
  forward and backward with recompute, without an optimizer; it takes turns too.
- --baseline deepspeed-cpu deepspeed-nvme fsdp2-offload: whole steps, AdamW
  included, of DeepSpeed ZeRO-3 and of PyTorch's FSDP2, which offload to host
  memory or a drive; same first weights, batch and kernels, each in a process of
  its own. They need what `pip install 'tierstream[peers]'` installs.
- --check true: at the end the same steps run again with all that fits on the
  device, and all losses must be equal to the bit; else the exit status is 1.
- Prints tokens/s, TFLOP/s, the bound, memory, bytes moved and waits.
"""


#: Said where memory is full.
_TAKES_LESS = (
    "lower --rows, --rows-per-chunk, --loss-chunk-tokens, --gpu or --layers, or leave --baseline out"
)


@errors_name_options()
def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_options(TrainBenchOptions, args, prog=_PROG, description=_DESCRIPTION)
    check_output(options)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `tierstream train`
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="tierstream-bench-"))
        _check_config(options.run_config(folder, options.nvme_dirs), options)
        _check_device(options.device)
        if options.kernels == "liger":
            kernels.check_liger()
        for name in options.peers:
            peers.check_installed(name)
        peer_dirs = [options.peer_nvme_dir] if options.peer_nvme_dir else []
        check_directories((path, 0) for path in (*(options.nvme_dirs or []), *peer_dirs))
        from tierstream.engine.device.full import full_memory_errors

        stack.enter_context(full_memory_errors(_TAKES_LESS))
        bench = _Bench.prepare(options, options.run_config(folder, options.nvme_dirs))
        interrupted = bench.measure_all()
    from tierstream.engine.measure.machine_facts import describe_machine
    from tierstream.tools.bench.training import NOTES, details, drive_details, peer_details, plots

    command = shlex.split(_PROG) + list(args)
    measurements = [case.measurement for case in bench.measured]
    notes = [*bench.notes, *NOTES]
    made = details(bench.measured, options.rows * options.seq_len)
    if bench.drives:
        made.append(drive_details(bench.drives))
    if bench.peers:
        made.append(peer_details(bench.peers))
    result = Result("train", _title(options), command, describe_machine(), measurements, notes, details=made)
    present(result, plots(measurements), options, bench.traces)
    if interrupted is not None:
        raise interrupted
    return 0 if bench.good else 1


@dataclass
class _Bench:
    """What all depths share, and what came out so far."""

    options: TrainBenchOptions
    config: RunConfig
    known: list[KnownDrive]
    rates: Rates
    batch: Batch
    measured: list[MeasuredCase] = field(default_factory=list)
    peers: list[Row] = field(default_factory=list)
    drives: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    traces: list[TracedCase] = field(default_factory=list)
    good: bool = True

    @classmethod
    def prepare(cls, options: TrainBenchOptions, config: RunConfig) -> _Bench:
        import torch

        from tierstream.engine import assemble
        from tierstream.engine.device.device import Device
        from tierstream.engine.measure.machine import known_drives, load_profile, machine_rates
        from tierstream.engine.measure.train_bench import random_batch

        assemble.set_determinism(config)
        profile = load_profile(config.tiers)
        known = known_drives(config.tiers, profile)
        device = Device(options.device)
        try:
            dtype, threads = getattr(torch, options.dtype), assemble.update_threads(config)
            rates = machine_rates(profile, known, device, dtype, threads)
        finally:
            device.close()
        vocabulary = architecture(options.shape)["vocab_size"]
        batch = random_batch(vocabulary, options.rows, options.seq_len, device.torch_device)
        return cls(options, config, known, rates, batch)

    def measure_all(self) -> KeyboardInterrupt | None:
        """Every depth. An interrupt before anything was measured is raised; later it is returned: what took
        minutes is not lost with a peer that takes longer than one cares to wait.
        """
        try:
            for layers, stream in itertools.product(self.options.depths, self.options.stream):
                self.config.moe.stream = stream
                self.measure(layers, baselines=stream == self.options.stream[0])
        except KeyboardInterrupt as interrupt:
            if not self.measured:
                raise
            self.notes.append("interrupted: the rest was not measured")
            return interrupt
        return None

    def measure(self, layers: int, *, baselines: bool) -> None:
        """All cases at this depth."""
        from tierstream.engine.measure.train_bench import release_device_memory
        from tierstream.tools.bench.training import peer_row

        shape = architecture(self.options.shape, layers)
        Path(self.config.run_dir, "config.json").write_text(json.dumps(shape))
        release_device_memory()
        others = [self._peer(name) for name in self.options.peers] if baselines else []
        together = self.options.turns == "rounds"
        resident = baselines and "resident" in (self.options.baseline or [])
        history = self._measure_cases(layers, others if together else [], resident=resident)
        release_device_memory()
        for peer in [] if together else others:
            self._measure_alone(peer, layers)
        self.peers += [peer_row(peer, layers, history[0][1]) for peer in others if peer.records]
        if self.options.check:
            self._check(layers, history)

    def _measure_cases(
        self, layers: int, peers: Sequence[PeerCase], *, resident: bool
    ) -> list[tuple[Setting, float]]:
        """Ours and these peers, in turn. Returns the setting and the loss of every step from the tiers."""
        from tierstream.engine.measure.machine import mean_drives, with_drives
        from tierstream.engine.measure.train_bench import ResidentCase, TieredBench
        from tierstream.tools.bench.timeline import record_case
        from tierstream.tools.bench.training import MeasuredCase, case_name, drive_rows

        options = self.options
        settings = options.settings()
        with ExitStack() as stack:
            config, known = stack.enter_context(self._scratch())
            bench = stack.enter_context(TieredBench(config, settings, known, self.batch))
            whole = "whole layers" if self.config.moe.stream == "layers" else ""
            cases = [
                bench.case(
                    case, options.steps, {"run": case_name(case.setting, settings, whole), "layers": layers}
                )
                for case in bench.cases
            ]
            baselines: list[ResidentCase | PeerCase] = []
            if resident:
                baselines.append(ResidentCase(bench, self.batch))
            baselines += [stack.enter_context(peer) for peer in peers]
            cases += [each.case(options.steps, {"run": each.name, "layers": layers}) for each in baselines]
            # Other users make a drive faster and slower by the minute, and one that has rested is faster than
            # one at work: what it gave once says little.
            times: list[list[KnownDrive]] = []
            found = run_cases(
                cases, options.rounds, on_round=lambda: times.append(bench.drives_now(known))
            )
            self.drives += drive_rows(times, layers)
            rates = with_drives(self.rates, mean_drives(times))
            plan = bench.cases[0].plan
            if warning := page_warning(self.config.tiers, plan):
                self.notes.append(f"{layers} layers: {in_options(warning)}")
            flop = plan.flop_per_step
            for measurement, case in zip(found, bench.cases, strict=False):
                records, bound = case.records[-options.rounds :], bench.bound(case, rates)
                self.measured.append(MeasuredCase(measurement, records, flop, bound, case.plan))
            for measurement, each in zip(found[len(settings) :], baselines, strict=True):
                self.measured.append(MeasuredCase(measurement, each.records[-options.rounds :], flop))
            if options.trace_steps:
                pairs = zip(bench.cases, cases, strict=False)
                self.traces += [record_case(bench, *pair, options.trace_steps) for pair in pairs]
            return bench.history

    def _measure_alone(self, peer: PeerCase, layers: int) -> None:
        """This peer, with the machine for itself. What fails becomes a note: our own figures stand."""
        from tierstream.tools.bench.training import MeasuredCase

        rounds = self.options.rounds
        try:
            with peer:
                case = peer.case(self.options.steps, {"run": peer.name, "layers": layers})
                (found,) = run_cases([case], rounds)
        except TierstreamError as error:
            self.good = False
            self.notes.append(f"{layers} layers: {error}")
        else:
            flop = self.measured[-1].flop_per_step
            self.measured.append(MeasuredCase(found, peer.records[-rounds:], flop))

    @contextmanager
    def _scratch(self) -> Iterator[tuple[RunConfig, list[KnownDrive]]]:
        """The configuration with folders of its own on the drives. What fills them is gone at the end: before
        a peer comes that fills its own, or another depth.
        """
        with ExitStack() as stack:
            directories = self.options.nvme_dirs or []
            paths = [stack.enter_context(ScratchFolder(path)).path for path in directories]
            config = replace(self.config, tiers=replace(self.config.tiers, nvme_dirs=paths or None))
            known = [replace(drive, directory=path) for drive, path in zip(self.known, paths, strict=True)]
            yield config, known

    def _peer(self, name: PeerName) -> PeerCase:
        """For the model that is measured now."""
        from tierstream.engine.model.carve import find_units
        from tierstream.engine.model.meta_model import build_meta_model

        options, config = self.options, self.config
        assert options.clip_norm is not None
        job = peers.Job(
            config=config.run_dir,
            dtype=options.dtype,
            rows=options.rows,
            seq_len=options.seq_len,
            seed=config.train.seed,
            device=options.device,
            kernels=options.kernels,
            optimizer=asdict(replace(config.optimizer, clip_norm=options.clip_norm[0])),
        )
        parameters = find_units(build_meta_model(config.model)[0]).numel
        log = Path(config.run_dir, f"{name}.log")
        return PeerCase(name, job, options.peer_nvme_dir, log, parameters)

    def _check(self, layers: int, history: list[tuple[Setting, float]]) -> None:
        """Sets the losses beside those of a run with all that fits on the device."""
        from tierstream.engine.measure.train_bench import resident_losses
        from tierstream.tools.bench.training import difference

        steps = [setting for setting, _ in history]
        with self._scratch() as (config, known):
            losses = resident_losses(config, steps, known, self.batch)
        found = difference([loss for _, loss in history], losses)
        self.good = self.good and not found
        equal = f"all {len(losses)} losses are equal to the bit to those with all that fits on the device"
        said = found or equal
        self.notes.append(f"{layers} layers: {said}")


def _title(options: TrainBenchOptions) -> str:
    faster = "" if options.kernels == "plain" else f", kernels of {options.kernels}"
    faster += ", compiled" if options.compile else ""
    tokens = f"{options.rows} x {options.seq_len} tokens a step"
    return f"Training {options.shape} on {options.device}, {tokens}{faster}"


def _check_config(config: RunConfig, options: TrainBenchOptions) -> None:
    """What is wrong is said before anything is made. Raises ConfigError."""
    for placement in options.placement:
        replace(config, optimizer=replace(config.optimizer, placement=placement))


def _check_device(name: str) -> None:
    """Raises ConfigError: it is not here."""
    import torch

    if not name.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device is {name}, and torch {torch.__version__} sees no GPU; check that nvidia-smi lists it "
            "and that torch is a CUDA build, or measure with --device cpu"
        )
    count = torch.cuda.device_count()
    if (torch.device(name).index or 0) >= count:
        raise ConfigError(f"--device is {name}, but the last of {count} CUDA devices is cuda:{count - 1}")
