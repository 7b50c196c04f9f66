"""Modelled times of layers, one resource at a time: all others cost nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tierstream.engine.bound import Rates
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import ShapeName, architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.planner.case import Case, case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.times import modelled_times

FREE = Rates(flop_per_s=math.inf, upload=None, update_parameters_per_s=1e9)
CPU = Machine(name="toy", host_bytes=1 << 30, gpu_bytes=None, cores=2, drives=(), rates=FREE)
GPU = replace(CPU, gpu_bytes=1 << 30)
WIDTH, TENSORS, MATRICES = 64, 12, 7  # of a layer of Qwen2


def case(
    folder: Path,
    rows: int,
    *,
    shape: ShapeName = "tiny",
    seq_len: int = 128,
    stream: Literal["experts", "layers"] = "experts",
    **train: Any,
) -> Case:
    (folder / "config.json").write_text(json.dumps(architecture(shape, 2)))
    config = RunConfig(
        run_dir=str(folder / "run"),
        model=ModelConfig(config=str(folder), dtype="float32"),
        data=DataConfig(files=["none"], seq_len=seq_len),
        moe=MoeConfig(stream=stream),
        train=TrainConfig(rows_per_step=rows, **train),
    )
    return case_of(config, GPU if config.train.device == "cuda" else CPU)


def seconds(found: Case, what: str = "forward", machine: Machine = CPU, **rates: float) -> float:
    own = replace(machine, rates=replace(FREE, **rates))  # type: ignore[arg-type]
    return modelled_times(found, own).compute_s(what, "layers.0")


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_attention_grows_with_the_row(tmp_path: Path, machine: Machine) -> None:
    """As many tokens in rows twice as long: products of scores and values twice as large, all else equal."""
    short, long = (case(tmp_path, rows, seq_len=512 // rows) for rows in (4, 2))
    scores_and_values = 2 * 2 * 512 * WIDTH
    for what, times in (("forward", 1), ("backward", 1 + 2.5)):  # recompute; five products for two
        more = seconds(long, what, machine, flop_per_s=1) - seconds(short, what, machine, flop_per_s=1)
        assert more == times * scores_and_values * (256 - 128)


def test_products_of_few_rows_cost_more_for_each(tmp_path: Path) -> None:
    """A product moves its weights through memory three times, however many rows there are."""
    one, two = (case(tmp_path, rows) for rows in (1, 2))
    moved = 3 * 4 * one.units.layers[0].parameters
    gradient = 14 * one.units.layers[0].parameters
    for what, once in (("forward", moved), ("backward", 3 * moved + gradient)):
        few, many = (seconds(each, what, device_memory=1) for each in (one, two))
        assert 2 * few - many == pytest.approx(once)


def test_each_chunk_of_rows_has_products_of_its_own(tmp_path: Path) -> None:
    whole, chunks = case(tmp_path, 8), case(tmp_path, 8, rows_per_chunk=2)
    moved = 3 * 4 * whole.units.layers[0].parameters
    assert seconds(chunks, device_memory=1) - seconds(whole, device_memory=1) == pytest.approx(3 * moved)


def test_work_that_cores_share_wakes_them(tmp_path: Path) -> None:
    """A product thrice, any other operation of more than 32,768 elements once; and they wake who waits."""
    small, large = case(tmp_path, 4), case(tmp_path, 5)
    assert seconds(small, wake_s=1) == 2 * 3 * MATRICES
    assert seconds(large, wake_s=1) == 2 * 3 * MATRICES + 2 * 2 * TENSORS
    assert seconds(small, "backward", wake_s=1) == 3 * 2 * 3 * MATRICES
    alone = replace(CPU, cores=1)
    assert seconds(large, machine=alone, wake_s=1) == 0


def test_python_takes_turns_with_the_cpu_and_runs_beside_a_gpu(tmp_path: Path) -> None:
    found = case(tmp_path, 1)
    computed = seconds(found, flop_per_s=1)
    on_cpu = seconds(found, flop_per_s=1, page_s=10)
    assert on_cpu == pytest.approx(computed + 7 * TENSORS * 10)
    on_gpu = seconds(found, machine=GPU, flop_per_s=1, page_s=10, launch_s=10)
    assert on_gpu == pytest.approx(computed)
    assert seconds(found, machine=GPU, page_s=10, launch_s=1) == pytest.approx((10 * 10 + 7) * TENSORS)
    fused = case(tmp_path, 1, kernels="liger", device="cuda")
    assert seconds(fused, machine=GPU, page_s=10, launch_s=1) == pytest.approx((12 * 10 + 7) * TENSORS)


def test_an_expert_is_products_and_python_of_its_own(tmp_path: Path) -> None:
    found = case(tmp_path, 1, shape="tiny-moe")
    units = found.units
    experts = len(units.experts[0])
    own = [tensor for unit in units.of_layer(0) for tensor in unit.tensors]
    matrices = sum(len(tensor.shape) == 2 for tensor in own)
    assert experts == 8
    assert seconds(found, wake_s=1) == 2 * 3 * matrices
    assert seconds(found, page_s=1) == 7 * len(own) + 16 * experts


def test_experts_that_come_together_are_one_call_on_a_gpu(tmp_path: Path) -> None:
    """All eight of a layer come at once here, or one by one, as on the CPU."""
    together = case(tmp_path, 1, shape="tiny-moe", device="cuda")
    experts = together.units.experts[0]
    each, dense = len(experts[0].tensors), len(together.units.layers[0].tensors)
    groups = -(-len(experts) // together.expert_group)
    assert groups < len(experts)
    calls = dense + each * groups
    assert seconds(together, machine=GPU, launch_s=1) == 7 * calls
    assert seconds(together, machine=GPU, page_s=1) == 10 * calls + 10 * len(experts)


def test_a_token_crosses_memory_with_the_experts_that_it_goes_to(tmp_path: Path) -> None:
    """Whether experts are part of their layer or come on their own: two of eight, and all else once."""
    apart = case(tmp_path, 1, shape="tiny-moe")
    whole = case(tmp_path, 1, shape="tiny-moe", stream="layers")
    assert whole.units.experts[0] == ()
    of_expert = sum(sum(tensor.shape) for tensor in apart.units.experts[0][0].tensors)
    of_dense = sum(sum(tensor.shape) for tensor in apart.units.layers[0].tensors)
    tokens, item = 128, 4
    packed = 3 * item * apart.units.layers_summed[0].parameters
    for found in (apart, whole):
        crossed = seconds(found, device_memory=1) - packed
        assert crossed == pytest.approx(6 * tokens * item * (of_dense + 2 * of_expert))


def test_the_head_is_cut_as_the_loss_is(tmp_path: Path) -> None:
    whole, cut = case(tmp_path, 4), case(tmp_path, 4, loss_chunk_tokens=128)
    once, often = (modelled_times(each, replace(CPU, rates=replace(FREE, wake_s=1))) for each in (whole, cut))
    assert once.compute_s("head", "embed") == 2 * 3 * 3
    assert often.compute_s("head", "embed") == 4 * 2 * 3 * 3
