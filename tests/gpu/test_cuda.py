"""The numerics contract on a CUDA device: the same code path with real streams, real pinned memory and real
asynchrony.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rig import PlainTraining, Setup, batches, on_device, rig, same_bits, tiny_config

from tierstream.engine.trace.summary import summarise
from tierstream.engine.trace.trace import Track
from tierstream.engine.update.optimizer import OptimizerConfig

pytestmark = pytest.mark.gpu


def setup(**other: object) -> Setup:
    config = tiny_config(
        "qwen3", hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64, layers=5
    )
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=0.05, warmup_steps=1)
    return Setup(
        config=config, dtype="bfloat16", optimizer=optimizer, device="cuda", page=65536, seq_len=128
    ).but(**other)


def result(
    made: Setup, steps: int = 4
) -> tuple[list[tuple[float, float]], dict[tuple[str, str], np.ndarray]]:
    with rig(made) as run:
        outcomes = run.train(batches(steps, rows=made.rows, seq_len=made.seq_len))
        return [(o.loss, o.verdict.grad_norm) for o in outcomes], run.planes()


@pytest.mark.parametrize("chunks", [5, 2])
@pytest.mark.parametrize("tiers", ["dram", "nvme", "nvme-lru", "nvme-no-prefetch"])
def test_every_tier_gives_the_same_bits(tmp_path: Path, tiers: str, chunks: int) -> None:
    base = setup(rows_per_chunk=chunks)
    expected = result(base.but(gpu_all=True, activations="gpu"))
    tiered = base
    if tiers != "dram":
        tiered = base.but(nvme=tmp_path / "drive", dram=24 * base.page)
    tiered = tiered.but(policy="lru") if tiers == "nvme-lru" else tiered
    tiered = tiered.but(prefetch=0) if tiers == "nvme-no-prefetch" else tiered
    losses, planes = result(tiered)
    assert losses == expected[0]
    assert same_bits(planes, expected[1]) == []


@pytest.mark.parametrize("seed", range(5))
def test_slow_streams_and_poison_change_nothing(tmp_path: Path, seed: int) -> None:
    """Copies are held back by random spins of their stream, buffers given back are filled with NaN (C09)."""
    base = setup(rows_per_chunk=2)
    expected = result(base.but(gpu_all=True, activations="gpu"))
    losses, planes = result(base.but(nvme=tmp_path / "drive", dram=24 * base.page, faults_seed=seed))
    assert losses == expected[0]
    assert same_bits(planes, expected[1]) == []


@pytest.mark.parametrize("early", [False, True], ids=["deferred", "in-backward"])
@pytest.mark.parametrize("tiers", ["dram", "nvme"])
def test_who_updates_and_when_changes_nothing(tmp_path: Path, tiers: str, early: bool) -> None:
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=None, placement="cpu")
    expected = result(setup(optimizer=optimizer, gpu_all=True, activations="gpu"))
    variants = [("gpu", "float32", None), ("both", "float32", 3), ("both", "bfloat16", None)]
    for placement, grad_dtype, seed in variants:
        own = replace(optimizer, placement=placement, grad_dtype=grad_dtype, check_finite=not early)
        made = setup(optimizer=own, faults_seed=seed)
        if tiers == "nvme":
            made = made.but(nvme=tmp_path / f"{placement}{seed}{grad_dtype}", dram=24 * made.page)
        if grad_dtype != "float32":
            plain = replace(optimizer, grad_dtype=grad_dtype)
            expected = result(setup(optimizer=plain, gpu_all=True, activations="gpu"))
        losses, planes = result(made)
        assert losses == expected[0]
        assert same_bits(planes, expected[1]) == []


@pytest.mark.parametrize("early", [False, True], ids=["deferred", "in-backward"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_units_that_stay_on_the_gpu_change_nothing(grad_dtype: str, early: bool) -> None:
    optimizer = OptimizerConfig(lr=1e-2, clip_norm=None, grad_dtype=grad_dtype)  # type: ignore[arg-type]
    expected = result(setup(optimizer=optimizer))
    made = setup(optimizer=replace(optimizer, check_finite=not early))
    with rig(made) as run:
        least = run.plan.gpu_bytes
    with rig(made.but(gpu_all=True)) as run:
        most = run.plan.gpu_bytes
    for budget, seed in [((least + most) // 2, 1), (most, None)]:
        with rig(made.but(gpu=budget)) as run:
            assert len(run.plan.device.resident) > 0
        losses, planes = result(made.but(gpu=budget, faults_seed=seed))
        assert losses == expected[0]
        assert same_bits(planes, expected[1]) == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_steady_step_allocates_nothing_and_waits_for_the_device_once() -> None:
    """By torch's own counts: no memory is taken from the driver, nothing is registered, no thread waits for a
    whole device, and the host reads back one tensor, after the sweep; and one before the first layer, with
    which transformers finds out that no row holds several documents.
    """
    with rig(setup()) as run:
        made = batches(12, rows=run.setup.rows, seq_len=run.setup.seq_len)[::2]
        steps = [on_device(batch, run.device.torch_device) for batch in made]
        for batch in steps[:3]:
            run.runtime.step(batch)
        sweep, run_sweep = run.runtime._sweep, run.runtime._sweep.run
        layers, run_layer = sweep._layers, sweep._layers.forward

        def layer(*args: Any) -> list[torch.Tensor]:
            torch.cuda.set_sync_debug_mode("error")
            return run_layer(*args)

        def without_waiting(*args: Any) -> torch.Tensor:
            try:
                return run_sweep(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        sweep.run, layers.forward = without_waiting, layer  # type: ignore[method-assign]
        before = torch.cuda.memory_stats()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for batch in steps[3:]:
                run.runtime.step(batch)
        after = torch.cuda.memory_stats()
        counts = {event.key: event.count for event in profile.key_averages()}
    for key in ("num_device_alloc", "num_device_free", "num_alloc_retries"):
        assert after[key] == before[key], key
    assert counts.get("cudaLaunchKernel", 0) > 0
    for call in ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaHostRegister"):
        assert counts.get(call, 0) == 0, call
    # The profiler waits for the device when it starts and when it ends.
    assert counts.get("cudaDeviceSynchronize", 0) <= 2
    assert counts.get("cudaStreamSynchronize", 0) <= 2 * len(steps[3:])


def test_a_trace_changes_nothing_and_shows_the_order_of_the_lanes(tmp_path: Path) -> None:
    """Spans of three streams and of the host, on one clock."""
    base = setup(rows_per_chunk=2)
    expected = result(base.but(gpu_all=True, activations="gpu"))
    made = base.but(nvme=tmp_path / "drive", dram=24 * base.page, trace=True)
    with rig(made) as run:
        outcomes = run.train(batches(4, rows=made.rows, seq_len=made.seq_len))
        assert [(o.loss, o.verdict.grad_norm) for o in outcomes] == expected[0]
        assert same_bits(run.planes(), expected[1]) == []
        spans = sorted(run.trace.stop(), key=lambda span: span.begin_s)
    lanes = {t: [s for s in spans if s.track is t] for t in (Track.COMPUTE, Track.UPLOAD, Track.DOWNLOAD)}
    for lane in lanes.values():
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(lane))
        # Work begins when it has been enqueued, not before; the clocks agree to a millisecond.
        assert all(span.enqueued_s[0] - 1e-3 <= span.begin_s <= span.end_s for span in lane)
    layers = [unit.name for unit in run.units.layers]
    order = ["forward embed", *(f"forward {n}" for n in layers), "head"]
    order += [*(f"backward {n}" for n in reversed(layers)), "backward embed"]
    assert [span.name for span in lanes[Track.COMPUTE]] == 4 * order
    steps = [span for span in spans if span.track is Track.STEPS]
    for index, (step, summary) in enumerate(zip(steps, summarise(spans), strict=True)):
        inside = {t: [s for s in lane if step.begin_s <= s.begin_s < step.end_s] for t, lane in lanes.items()}
        # The verdict does not wait for the last gradients to be stored.
        assert all(span.end_s <= step.end_s for span in inside[Track.COMPUTE] + inside[Track.UPLOAD])
        for unit in layers:
            upload = next(s for s in inside[Track.UPLOAD] if s.unit == unit)
            computed = [s for s in inside[Track.COMPUTE] if s.unit == unit]
            gradient = [s for s in lanes[Track.DOWNLOAD] if s.name == f"grad {unit}"][index]
            assert upload.end_s <= computed[0].begin_s + 1e-6
            assert computed[-1].end_s <= gradient.begin_s + 1e-6
        assert summary.busy_s + sum(summary.idle_s.values()) == pytest.approx(step.end_s - step.begin_s)


def test_agrees_with_plain_torch_in_fp32() -> None:
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=0.5, eps=1e-6)
    made = setup(dtype="float32", optimizer=optimizer)
    plain = PlainTraining(made)
    with rig(made) as run:
        steps = batches(10, rows=made.rows, seq_len=made.seq_len)
        for batch, outcome in zip(steps, run.train(steps), strict=True):
            loss, norm = plain.step(batch, outcome.verdict.lr)  # on the CPU
            assert outcome.loss == pytest.approx(loss, rel=1e-5)
            assert outcome.verdict.grad_norm == pytest.approx(norm, rel=1e-4)


def test_memory_does_not_grow_with_depth() -> None:
    peaks = []
    for layers in (6, 12):
        config = tiny_config(
            "qwen3",
            hidden_size=1024,
            intermediate_size=2048,
            num_attention_heads=8,
            head_dim=128,
            layers=layers,
        )
        made = setup(config=config, page=1 << 20, seq_len=256)
        gc.collect()  # device buffers of earlier runs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result(made, steps=2)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("frame_bytes", [65536, 33 << 20])
def test_pinned_arena_is_pinned(frame_bytes: int) -> None:
    from tierstream.engine.device.device import Device
    from tierstream.tiered.arena import Arena

    register, unregister = Device("cuda").pinning()
    arena = Arena([frame_bytes] * 8, register=register, unregister=unregister)
    try:
        assert arena.pinned
        assert all(torch.from_numpy(frame[-4096:]).is_pinned() for frame in arena.frames)
    finally:
        arena.close()
