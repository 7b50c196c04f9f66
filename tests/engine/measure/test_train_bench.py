"""What `tierstream bench train` measures: one training under several settings, the plain one beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import CheckpointConfig
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.measure.machine import DEFAULT_TUNING, KnownDrive
from tierstream.engine.measure.train_bench import (
    EVERYTHING,
    GpuMemory,
    ResidentCase,
    Setting,
    TieredBench,
    random_batch,
    resident_losses,
)
from tierstream.engine.model import kernels
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.model.shapes import ShapeName, architecture
from tierstream.engine.plan import TiersConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig

ROWS, SEQ_LEN, LAYERS, VOCABULARY, HIDDEN = 4, 24, 4, 1000, 64
#: Parameters of the tiny shape, counted by hand: attention with biases, MLP, two norms; embedding, last norm.
LAYER_PARAMETERS = (64 * 64 + 64) + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 176 + 2 * 64
ENDS_PARAMETERS = 1000 * 64 + 64
CLIPPED, FREE = Setting(clip_norm=0.05), Setting(clip_norm=None)


@dataclass
class Benches:
    """Benches of the tiny shape in a directory."""

    folder: Path
    batch: Batch = field(default_factory=lambda: random_batch(VOCABULARY, ROWS, SEQ_LEN, "cpu"))

    def config(
        self, *, dtype: str = "float32", rows_per_chunk: int = 3, activations: str = "dram", **tiers: Any
    ) -> RunConfig:
        (self.folder / "config.json").write_text(json.dumps(architecture("tiny")))
        return RunConfig(
            run_dir=str(self.folder),
            model=ModelConfig(config=str(self.folder), dtype=dtype),  # type: ignore[arg-type]
            data=DataConfig(files=["random"], seq_len=SEQ_LEN),
            optimizer=OptimizerConfig(lr=1e-2, schedule="constant", threads=2),
            tiers=TiersConfig(activations=activations, **tiers),  # type: ignore[arg-type]
            train=TrainConfig(rows_per_step=ROWS, rows_per_chunk=rows_per_chunk, loss_chunk_tokens=40),
            checkpoint=CheckpointConfig(at_end=False),
        )

    @contextmanager
    def opened(self, *settings: Setting, **options: Any) -> Iterator[TieredBench]:
        with TieredBench(self.config(**options), settings, [], self.batch) as bench:
            yield bench

    def on_a_drive(self) -> tuple[RunConfig, list[KnownDrive]]:
        drive = self.folder / "drive"
        drive.mkdir()
        config = self.config(nvme_dirs=[str(drive)], dram=ByteSize("1MiB"), page=ByteSize("16KiB"))
        return config, [KnownDrive(str(drive), DEFAULT_TUNING, None, None, 1.0)]


@pytest.fixture
def benches(tmp_path: Path) -> Benches:
    return Benches(tmp_path)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", LAYERS * LAYER_PARAMETERS + ENDS_PARAMETERS),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("olmoe-7b", 6_919_161_856),
        ("qwen3-30b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_shapes_have_the_published_number_of_parameters(
    tmp_path: Path, name: ShapeName, parameters: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture(name)))
    units = find_units(build_meta_model(ModelConfig(config=str(tmp_path)))[0])
    assert units.numel == parameters
    looked_up = {
        "qwen2.5-7b": 152064 * 3584, "olmoe-7b": 50304 * 2048, "qwen3-30b": 151936 * 2048,
        "gpt-oss-20b": 201088 * 2880, "gpt-oss-120b": 201088 * 2880,
    }  # fmt: skip
    #: Of each layer: parameters of an expert, experts that a token does not go to.
    idle = {
        "olmoe-7b": (16, 3 * 2048 * 1024, 56), "qwen3-30b": (48, 3 * 2048 * 768, 120),
        "gpt-oss-20b": (24, 24_891_840, 28), "gpt-oss-120b": (36, 24_891_840, 124),
    }  # fmt: skip
    layers, expert, without = idle.get(name, (0, 0, 0))
    active = parameters - looked_up.get(name, 0) - layers * expert * without
    assert units.flop_per_token == pytest.approx(8 * active, rel=1e-12)
    assert units.forward_flop_per_token == pytest.approx(2 * active, rel=1e-12)


def test_depth_changes_the_layers_alone() -> None:
    assert architecture("tiny", 9) == architecture("tiny") | {"num_hidden_layers": 9}


@pytest.mark.parametrize("rows_per_chunk", [1, 4])
@pytest.mark.parametrize("activations", ["dram", "gpu"])
def test_the_plain_training_has_the_same_loss_and_gradients(
    benches: Benches, rows_per_chunk: int, activations: str
) -> None:
    with benches.opened(FREE, rows_per_chunk=rows_per_chunk, activations=activations) as bench:
        resident = ResidentCase(bench, benches.batch)
        plain = [resident.model.step(benches.batch) for _ in range(2)]
        norm = bench.step(bench.cases[0])
        assert plain[0] == plain[1]  # nothing is updated, and gradients begin at zero
        assert plain[0] == pytest.approx(bench.history[0][1], rel=1e-6)
        assert resident.model.grad_norm() == pytest.approx(norm, rel=1e-5)


def test_every_gradient_of_the_plain_training_is_that_of_the_tiers(benches: Benches) -> None:
    with benches.opened(FREE) as bench:
        resident = ResidentCase(bench, benches.batch)
        resident.model.step(benches.batch)
        bench.step(bench.cases[0])
        bench.cases[0].runtime._gradients.wait_stored()
        for unit in bench.cases[0].runtime.units.in_forward_order:
            for tensor in unit.tensors:
                theirs = resident.model._gradients[tensor.name].flatten()
                ours = torch.empty(tensor.numel)
                bench.store.read_range(unit.name, "grad", tensor.offset, ours.numpy())
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7), tensor.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings_in_turn_are_one_training(benches: Benches, dtype: str) -> None:
    """Clipping far above every norm changes nothing, so turns of it and of none are a run without any."""
    settings = [FREE, Setting(clip_norm=1e9), Setting(gpu=EVERYTHING)]
    with benches.opened(*settings, dtype=dtype) as bench:
        for case in (0, 1, 1, 2, 0, 2, 1):
            bench.step(bench.cases[case])
        in_turn = [loss for _, loss in bench.history]
    with benches.opened(FREE, dtype=dtype) as bench:
        for _ in in_turn:
            bench.step(bench.cases[0])
        assert [loss for _, loss in bench.history] == in_turn
    assert in_turn == sorted(in_turn, reverse=True)
    assert len(set(in_turn)) == len(in_turn)


def test_losses_from_a_drive_are_those_with_every_layer_on_the_device(benches: Benches) -> None:
    config, known = benches.on_a_drive()
    settings = [CLIPPED, FREE, Setting(gpu=EVERYTHING)]
    with TieredBench(config, settings, known, benches.batch) as bench:
        for case in (0, 1, 2, 0):
            bench.run(bench.cases[case], 1)
        history = bench.history
        assert all(record.traffic.bytes_read["nvme"] > 0 for record in bench.cases[0].records)  # type: ignore[union-attr]
    losses = [loss for _, loss in history]
    steps = [setting for setting, _ in history]
    assert resident_losses(config, steps, known, benches.batch) == losses
    unclipped = resident_losses(benches.config(), [FREE] * len(steps), [], benches.batch)
    assert unclipped[0] == losses[0]
    assert unclipped[2:] != losses[2:]


def test_runs_are_steps_in_steady_state(benches: Benches) -> None:
    """Only the step after another setting's flush does not count."""
    with benches.opened(CLIPPED, FREE) as bench:
        first, second = bench.cases
        for case in (first, first, second, second, first):
            sample = bench.run(case, 2)
            assert sample.amount == 2 * ROWS * SEQ_LEN
            record = case.records[-1]
            assert record.losses == [loss for _, loss in bench.history[-2:]]
            assert record.seconds == sample.seconds
            assert (len(record.grad_norms), record.gpu_peak_bytes) == (2, None)
        whose = [setting for setting, _ in bench.history]
        assert whose == [CLIPPED] * 5 + [FREE] * 5 + [CLIPPED] * 3
        assert first.runtime.applied_updates == len(bench.history)
        assert [len(case.records) for case in bench.cases] == [3, 2]


def test_bytes_are_those_that_the_sizes_give(benches: Benches) -> None:
    """Two slots: backward finds the last two layers still there. All on the device: boundaries move alone."""
    with benches.opened(FREE, Setting(gpu=EVERYTHING)) as bench:
        units = bench.cases[0].runtime.units
        layer, ends, boundary = 4 * units.layers[0].numel, 4 * units.embed.numel, ROWS * SEQ_LEN * HIDDEN * 4
        activations, sums = LAYERS * boundary, LAYERS * layer + ends
        streamed = ends + (2 * LAYERS - 2) * layer, sums
        for case, (up, down) in zip(bench.cases, (streamed, (0, 0)), strict=True):
            bench.run(case, 3)
            traffic = case.records[-1].traffic
            assert traffic is not None
            assert traffic.bytes_written["gpu"] == 3 * (up + activations)
            assert traffic.bytes_read["gpu"] == 3 * (down + activations)
            assert traffic.bytes_read["nvme"] == traffic.bytes_written["nvme"] == 0


def test_bytes_of_a_drive_are_the_counters_of_the_store(benches: Benches) -> None:
    config, known = benches.on_a_drive()
    with TieredBench(config, [FREE], known, benches.batch) as bench:
        (case,) = bench.cases
        bench.run(case, 2)
        before = bench.store.stats.nvme_bytes_read, bench.store.stats.nvme_bytes_written
        bench.run(case, 2)
        after = bench.store.stats.nvme_bytes_read, bench.store.stats.nvme_bytes_written
        traffic = case.records[-1].traffic
        assert traffic is not None
        moved = traffic.bytes_read["nvme"], traffic.bytes_written["nvme"]
        # Reads for the step after are on their way when a run ends.
        assert moved == pytest.approx((after[0] - before[0], after[1] - before[1]), rel=0.05)
        assert min(moved) > 0
        rates = Rates(
            flop_per_s=1e30,
            upload=None,
            update_parameters_per_s=1e30,
            nvme_read=1.0,
            nvme_write=1.0,
            nvme_read_mixed=1.0,
            nvme_write_mixed=1.0,
        )
        bound = bench.bound(case, rates)
        assert bound.resource == "nvme"
        assert 0 < bound.nvme_read_bytes <= moved[0] / 2


def test_other_kernels_go_into_every_model(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into those of all settings, of the plain training and of the comparison; weights stay the same."""
    prepared: list[Any] = []

    def halve(model: Any, *, deterministic: bool) -> None:
        prepared.append(model)
        for layer in model.get_decoder().layers:
            mlp = layer.mlp.forward
            layer.mlp.forward = lambda x, mlp=mlp: 0.5 * mlp(x)

    monkeypatch.setattr(kernels, "compile_layers", halve)
    config = benches.config()
    with benches.opened(FREE) as plain:
        plain.step(plain.cases[0])
    config.train.compile = True
    with TieredBench(config, [FREE, CLIPPED], [], benches.batch) as bench:
        resident = ResidentCase(bench, benches.batch)
        bench.step(bench.cases[0])
        bench.step(bench.cases[1])
        losses = [loss for _, loss in bench.history]
        assert resident.model.step(benches.batch) == pytest.approx(losses[0], rel=1e-6)
    assert losses[0] != plain.history[0][1]
    assert len(prepared) == 4  # one tells the sizes
    assert resident_losses(config, [FREE, CLIPPED], [], benches.batch) == losses
    assert len({id(model) for model in prepared}) == 7


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # inside torch
def test_the_plain_training_is_compiled_too(benches: Benches) -> None:
    config = benches.config(rows_per_chunk=ROWS)
    config.train.compile = True
    with TieredBench(config, [FREE], [], benches.batch) as bench:
        resident = ResidentCase(bench, benches.batch)
        norm = bench.step(bench.cases[0])
        assert resident.model.step(benches.batch) == pytest.approx(bench.history[0][1], rel=1e-6)
        assert resident.model.grad_norm() == pytest.approx(norm, rel=1e-5)


def test_what_was_made_is_closed_when_the_rest_fails(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive can be used again, by this very process."""
    config, known = benches.on_a_drive()
    with monkeypatch.context() as patch:
        patch.setattr("tierstream.engine.weights.fill.FirstValues.fill", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            TieredBench(config, [FREE], known, benches.batch)
    with TieredBench(config, [FREE], known, benches.batch) as bench:
        bench.run(bench.cases[0], 1)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.gpu
def test_peaks_of_device_memory_leave_others_out_but_for_what_all_use() -> None:
    device, mib = torch.device("cuda", torch.cuda.current_device()), 1 << 20
    alone_mib = _peaks_mib(device, lambda size: torch.empty(size * mib, dtype=torch.uint8, device=device))
    assert alone_mib == [80, 40, 84, 44]


def test_peaks_of_device_memory_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of an allocator that counts."""
    now = most = 0

    class Buffer:
        def __init__(self, mib: int) -> None:
            nonlocal now, most
            self.mib, now = mib, now + mib
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            now -= self.mib

    def reset(_: object) -> None:
        nonlocal most
        most = now

    for name, call in {
        "memory_allocated": lambda _: now << 20, "max_memory_allocated": lambda _: most << 20,
        "reset_peak_memory_stats": reset,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, call)
    assert _peaks_mib(torch.device("cuda", 0), Buffer) == [80, 40, 84, 44]


def _peaks_mib(device: torch.device, allocate: Callable[[int], object]) -> list[float]:
    """Two cases, which hold 64 and 32 MiB, run in turn twice, with 16 and 8 MiB meanwhile; between them 4 MiB
    are left behind.
    """
    cases, before = list[GpuMemory](), torch.cuda.memory_allocated(device)
    first, second = GpuMemory(device, cases), GpuMemory(device, cases)
    held = [first.building(lambda: allocate(64)), second.building(lambda: allocate(32))]

    def peaks() -> list[int]:
        runs = first.running(lambda: allocate(16) is None), second.running(lambda: allocate(8) is None)
        return [peak - before for _, peak in runs if peak is not None]

    found = peaks()
    held.append(allocate(4))  # in a step that nobody measures, perhaps
    found += peaks()
    assert len(held) == 3
    return [nbytes / (1 << 20) for nbytes in found]
