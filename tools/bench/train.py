"""`tierstream bench train`"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from tierstream.engine import fused
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data import DataConfig
from tierstream.engine.model_config import ModelConfig
from tierstream.engine.optimizer import OptimizerConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.shapes import ShapeName, architecture
from tierstream.io.drives import check_directories
from tierstream.io.errors import BudgetError, ConfigError
from tierstream.io.measure import Labels
from tierstream.io.scratch import ScratchFolder
from tierstream.tools.bench.report import OutputOptions, check_output, present, run_cases
from tierstream.tools.bench.result import Result
from tierstream.tools.options import parse_options

if TYPE_CHECKING:
    from tierstream.engine.bound import Rates
    from tierstream.engine.machine import KnownDrive
    from tierstream.engine.sweep import Batch
    from tierstream.engine.train_bench import Setting
    from tierstream.tools.bench.training import MeasuredCase

_PROG = "tierstream bench train"
_DESCRIPTION = """\
Measure how fast the executor trains, over random weights and random tokens.
- Each combination of --gpu and --clip-norm is a case; cases take turns, round
  by round, and train one state. --layers with several depths repeats all of it.
- --baseline resident: the same model, batch and loss, all of it on the device,
  forward and backward with recompute, without an optimizer; it takes turns too.
- --check true: at the end the same steps run again with every layer on the
  device, and all losses must be equal to the bit; else the exit status is 1.
- Prints tokens/s, TFLOP/s, the bound, memory, bytes moved and waits.
"""


@dataclass(kw_only=True)
class TrainBenchOptions(OutputOptions):
    """What `bench train` does."""

    shape: ShapeName = "tiny"
    """Architecture, with the published dimensions."""
    layers: list[int] | None = None
    """Depths that are measured, one after the other; null: the shape's own."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that weights are computed with."""
    rows: int = 8
    """Rows of a step."""
    seq_len: int = 1024
    """Tokens of a row."""
    rows_per_chunk: int | None = None
    """Rows that run through a layer at once; null: all. The baseline always takes all."""
    loss_chunk_tokens: int = 4096
    """Tokens whose logits exist at once."""
    gpu: list[ByteSize] | None = None
    """Budgets of device memory, as tiers.gpu; null: two layers."""
    dram: ByteSize | None = None
    """Budget of host memory, as tiers.dram; null: all of the state, or 70 % of what is free."""
    nvme_dirs: list[str] | None = None
    """Directories, one per drive, for the state; null: it lives in DRAM. Nothing stays there."""
    activations: Literal["dram", "gpu"] = "dram"
    """Where the inputs of layers wait for backward."""
    clip_norm: list[float | None] | None = field(default_factory=lambda: list[float | None]([1.0]))
    """Norms that gradients are clipped to; null: no clipping."""
    profile: str | None = None
    """Machine profile with the rates for the bound; null: they are measured first."""
    steps: int = 3
    """Steps of a case in one round."""
    device: str = "cuda"
    """Where layers are computed: cuda, cuda:1, cpu."""
    deterministic: bool = True
    """Only deterministic kernels, as in training; for the baseline too."""
    kernels: Literal["plain", "liger"] = "plain"
    """Element-wise kernels of the layers, of the baseline too: the model's own, or the fused ones of Liger,
    which must be installed."""
    baseline: Literal["resident"] | None = None
    """What is run beside; null: nothing."""
    check: bool = False
    """Compare every loss with a run that has all layers on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clip_norm = [None] if self.clip_norm is None else self.clip_norm
        for key in ("layers", "gpu", "clip_norm"):
            values = getattr(self, key)
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ConfigError(
                    f"--{key.replace('_', '-')} must have at least one value, each of them once"
                )
        for key, value in (("steps", self.steps), *(("layers", depth) for depth in self.layers or [])):
            if value < 1:
                raise ConfigError(f"--{key} is {value}; it must be at least 1")
        for clip in self.clip_norm:
            OptimizerConfig(clip_norm=clip)  # refuses what no run may have

    def run_config(self, folder: str, nvme_dirs: list[str] | None) -> RunConfig:
        """As of a run whose model is described in `folder`.

        Raises:
            ConfigError: a value that no run may have.
        """
        return RunConfig(
            run_dir=folder,
            model=ModelConfig(config=folder, dtype=self.dtype),
            data=DataConfig(files=["random tokens"], seq_len=self.seq_len),
            optimizer=OptimizerConfig(schedule="constant"),
            tiers=TiersConfig(
                dram=self.dram, nvme_dirs=nvme_dirs, activations=self.activations, profile=self.profile
            ),
            train=TrainConfig(
                rows_per_step=self.rows,
                rows_per_chunk=self.rows_per_chunk,
                loss_chunk_tokens=self.loss_chunk_tokens,
                device=self.device,
                deterministic=self.deterministic,
            ),
            checkpoint=CheckpointConfig(at_end=False),
        )


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_options(TrainBenchOptions, args, prog=_PROG, description=_DESCRIPTION)
    check_output(options)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `tierstream train`
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="tierstream-bench-"))
        options.run_config(folder, options.nvme_dirs)  # what is wrong is said before anything is made
        _check_device(options.device)
        if options.kernels == "liger":
            _check_liger(options.device)
            stack.enter_context(fused.fused_rotary_embedding())
        check_directories((path, 0) for path in options.nvme_dirs or [])
        scratch = [stack.enter_context(ScratchFolder(path)).path for path in options.nvme_dirs or []]
        stack.enter_context(_device_memory_errors())
        bench = _Bench.prepare(options, options.run_config(folder, scratch or None))
        for layers in options.layers or [architecture(options.shape)["num_hidden_layers"]]:
            bench.measure(layers)
    from tierstream.tools.bench.machine import describe_machine
    from tierstream.tools.bench.training import NOTES, details, plots

    command = shlex.split(_PROG) + list(args)
    measurements = [case.measurement for case in bench.measured]
    notes = [*bench.notes, *NOTES]
    made = details(bench.measured, options.rows * options.seq_len)
    result = Result("train", _title(options), command, describe_machine(), measurements, notes, details=made)
    present(result, plots(measurements), options)
    return 0 if bench.equal else 1


@dataclass
class _Bench:
    """What all depths share, and what came out so far."""

    options: TrainBenchOptions
    config: RunConfig
    known: list[KnownDrive]
    rates: Rates
    batch: Batch
    measured: list[MeasuredCase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    equal: bool = True

    @classmethod
    def prepare(cls, options: TrainBenchOptions, config: RunConfig) -> _Bench:
        import torch

        from tierstream.engine import assemble
        from tierstream.engine.device import Device
        from tierstream.engine.machine import known_drives, load_profile, machine_rates
        from tierstream.engine.train_bench import random_batch

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

    def fuse(self, model: Any) -> None:
        """Gives the model the kernels that were asked for."""
        if self.options.kernels == "liger":
            fused.fuse_layers(model)

    def measure(self, layers: int) -> None:
        """All cases at this depth."""
        from tierstream.engine.train_bench import release_device_memory

        shape = architecture(self.options.shape, layers)
        Path(self.config.run_dir, "config.json").write_text(json.dumps(shape))
        release_device_memory()
        history = self._measure_cases(layers)
        release_device_memory()
        if self.options.check:
            self._check(layers, history)

    def _measure_cases(self, layers: int) -> list[tuple[Setting, float]]:
        """Returns the setting and the loss of every step from the tiers."""
        from tierstream.engine.train_bench import ResidentCase, Setting, TieredBench
        from tierstream.tools.bench.training import MeasuredCase, case_name

        options = self.options
        budgets: list[ByteSize | None] = [None] if options.gpu is None else [*options.gpu]
        settings = [
            Setting(gpu=gpu, clip_norm=clip)
            for gpu, clip in itertools.product(budgets, options.clip_norm or [None])
        ]
        with TieredBench(self.config, settings, self.known, self.batch, self.fuse) as bench:
            resident = ResidentCase(bench, self.batch) if options.baseline else None
            labels: list[Labels] = [
                {"run": case_name(setting, settings), "layers": layers} for setting in settings
            ]
            cases = [
                bench.case(case, options.steps, named)
                for case, named in zip(bench.cases, labels, strict=True)
            ]
            if resident is not None:
                cases.append(resident.case(options.steps, {"run": "resident", "layers": layers}))
            found = run_cases(cases, options.rounds)
            flop = bench.cases[0].plan.flop_per_step
            baseline = found[-1] if resident is not None else None
            for measurement, case in zip(found, bench.cases, strict=False):
                records, bound = case.records[-options.rounds :], bench.bound(case, self.rates)
                self.measured.append(MeasuredCase(measurement, records, flop, baseline, bound, case.plan))
            if resident is not None:
                records = resident.records[-options.rounds :]
                self.measured.append(MeasuredCase(found[-1], records, flop, baseline))
            return bench.history

    def _check(self, layers: int, history: list[tuple[Setting, float]]) -> None:
        """Sets the losses beside those of a run with every layer on the device."""
        from tierstream.engine.train_bench import resident_losses
        from tierstream.tools.bench.training import difference

        steps = [setting for setting, _ in history]
        losses = resident_losses(self.config, steps, self.known, self.batch, self.fuse)
        found = difference([loss for _, loss in history], losses)
        self.equal = self.equal and not found
        said = (
            found or f"all {len(losses)} losses are equal to the bit to those with every layer on the device"
        )
        self.notes.append(f"{layers} layers: {said}")


def _title(options: TrainBenchOptions) -> str:
    kernels = "" if options.kernels == "plain" else f", kernels of {options.kernels}"
    tokens = f"{options.rows} x {options.seq_len} tokens a step"
    return f"Training {options.shape} on {options.device}, {tokens}{kernels}"


def _check_liger(device: str) -> None:
    """Raises ConfigError: its kernels cannot be used."""
    problem = fused.liger_problem() if device.startswith("cuda") else f"they do not run on --device {device}"
    if problem:
        raise ConfigError(
            f"--kernels liger: {problem}; install liger-kernel, or measure with --kernels plain"
        )


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


@contextmanager
def _device_memory_errors() -> Iterator[None]:
    """Within, a GPU whose memory is full is an error that says what to change."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise BudgetError(
            f"the GPU's memory is full: {reason}; lower --rows, --rows-per-chunk, --loss-chunk-tokens, --gpu "
            "or --layers, or leave --baseline out"
        ) from error
