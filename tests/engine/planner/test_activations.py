"""What a step is foreseen to take of the device beside its buffers, and what it allocates on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.allocations import peak_bytes

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.device import memory
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import known_drives, load_profile
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.planner.case import Case, case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.needs import device_peak
from tierstream.engine.step.batch import Batch

SEQ_LEN = 256
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "vocab_size": 512, "eos_token_id": None}
DENSE = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 2048}
NARROW = {**DENSE, "intermediate_size": 64, "vocab_size": 8192}
#: With inputs of 12 MiB, a fifth of what is beside the buffers when the loss is made.
DEEP = {**NARROW, "num_hidden_layers": 24}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 128}
#: Each token goes to all of the experts, and little of a layer is attention.
CLAMPED = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "num_local_experts": 4,
    "num_experts_per_tok": 4, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "sizes", "train", "stream", "activations"),
    [
        ("qwen2.5-3b", DENSE, {"rows_per_step": 4}, "experts", None),
        ("qwen2.5-3b", DENSE, {"rows_per_step": 8, "rows_per_chunk": 4}, "experts", None),
        ("qwen2.5-3b", NARROW, {"rows_per_step": 4}, "experts", None),
        ("qwen2.5-3b", DEEP, {"rows_per_step": 4, "loss_chunk_tokens": 512}, "experts", "gpu"),
        ("qwen2.5-3b", {**DENSE, "num_hidden_layers": 16}, {"rows_per_step": 4}, "experts", "gpu"),
        ("olmoe-7b", EXPERTS, {"rows_per_step": 4}, "experts", None),
        ("olmoe-7b", EXPERTS, {"rows_per_step": 4}, "layers", None),
        ("gpt-oss-20b", CLAMPED, {"rows_per_step": 16}, "experts", None),
        ("gpt-oss-20b", CLAMPED, {"rows_per_step": 16}, "layers", None),
    ],
    ids=[
        "dense", "chunks", "head", "inputs-head", "inputs-layer", "experts", "stacks", "clamped-experts",
        "clamped-stacks",
    ],
)
def test_no_less_than_is_used_and_little_more(
    tmp_path: Path, shape: str, sizes: dict[str, Any], train: dict[str, int], stream: Any, activations: Any
) -> None:
    """Of rows with one document each."""
    config = run_of(tmp_path, shape, sizes, train, stream, activations)
    batch = random_batch(sizes["vocab_size"], train["rows_per_step"], SEQ_LEN, "cpu")
    used, foreseen = used_and_foreseen(config, batch)
    assert used - on_their_way(config, sizes) <= foreseen <= 1.15 * used


@pytest.mark.parametrize("rows_per_chunk", [None, 2])
def test_masks_of_rows_with_several_documents(tmp_path: Path, rows_per_chunk: int | None) -> None:
    """Most of what is taken, with rows as long as these: quadratic in their length."""
    sizes, rows, seq_len = NARROW | {"vocab_size": 512}, 4, 2048
    train = {"rows_per_step": rows} | ({"rows_per_chunk": rows_per_chunk} if rows_per_chunk else {})
    config = run_of(tmp_path, "qwen2.5-3b", sizes, train, "experts", None, seq_len=seq_len)
    config.train.loss_chunk_tokens = 512
    config.data.isolate_documents = True
    batch = random_batch(sizes["vocab_size"], rows, seq_len, "cpu")
    batch.position_ids[:, 100:] -= 100
    used, foreseen = used_and_foreseen(config, batch)
    assert used - on_their_way(config, sizes) <= foreseen <= 1.15 * used


#: Rows of a group of experts by those of an even share. Without a limit, with routers that send all tokens of
#: half the rows to the same experts, a group of eight would have four times what it has now.
@pytest.mark.parametrize(("group_rows", "fits"), [(1.25, True), (100.0, False)])
def test_experts_with_most_of_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: float, fits: bool
) -> None:
    """As on a GPU, which multiplies several at once."""
    sizes = EXPERTS | {"intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 2}
    rows = 32
    config = run_of(tmp_path, "olmoe-7b", sizes, {"rows_per_step": rows}, "experts", None)
    batch = random_batch(sizes["vocab_size"], rows, SEQ_LEN, "cpu")
    batch.input_ids[::2], batch.input_ids[1::2] = 5, 100
    monkeypatch.setattr(Device, "multiplies_groups", True)
    monkeypatch.setattr(Case, "expert_group", 8)
    foreseen = device_peak(case_of(config, Machine.here(config))).beside_bytes
    monkeypatch.setattr(memory, "_GROUP_ROWS", group_rows)
    used, _ = used_and_foreseen(config, batch)
    assert (used - on_their_way(config, sizes) <= foreseen) == fits
    assert foreseen <= 1.15 * used


def run_of(
    folder: Path,
    shape: str,
    sizes: dict[str, Any],
    train: dict[str, int],
    stream: Any,
    activations: Any,
    seq_len: int = SEQ_LEN,
) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(architecture(shape, 2) | sizes))
    return RunConfig(
        run_dir=str(folder),
        model=ModelConfig(config=str(folder), dtype="bfloat16"),
        data=DataConfig(files=["random tokens"], seq_len=seq_len, isolate_documents=False),
        moe=MoeConfig(stream=stream),
        tiers=TiersConfig(dram=ByteSize("512MiB"), backend="posix", activations=activations),
        train=TrainConfig(**train),  # type: ignore[arg-type]
    )


def used_and_foreseen(config: RunConfig, batch: Batch) -> tuple[int, int]:
    """Bytes beside the buffers, at the peak of the second of two steps."""
    peak = device_peak(case_of(config, Machine.here(config)))
    known = known_drives(config.tiers, load_profile(config.tiers))
    setting = Setting(gpu=None, clip_norm=1.0, placement="cpu")
    with TieredBench(config, [setting], known, batch) as bench:
        for _ in range(2):
            bench.step(bench.cases[0])
        used = peak_bytes(lambda: bench.step(bench.cases[0]))
    return used, peak.beside_bytes


def on_their_way(config: RunConfig, sizes: dict[str, Any]) -> int:
    """Bytes of inputs of layers on their way to DRAM, or there already: threads are not always as fast."""
    return 3 * config.train.rows_per_step * config.data.seq_len * sizes["hidden_size"] * 2
