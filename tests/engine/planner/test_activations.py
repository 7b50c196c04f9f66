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
from tierstream.engine.measure.machine import known_drives, load_profile
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import TiersConfig
from tierstream.engine.planner.case import case_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.needs import device_peak

SEQ_LEN = 256
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "vocab_size": 512, "eos_token_id": None}
DENSE = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 2048}
NARROW = {**DENSE, "intermediate_size": 64, "vocab_size": 8192}
#: With inputs of 12 MiB, a fifth of what is beside the buffers when the loss is made.
DEEP = {**NARROW, "num_hidden_layers": 24}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 128}


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
    ],
    ids=["dense", "chunks", "head", "inputs-head", "inputs-layer", "experts", "stacks"],
)
def test_no_less_than_is_used_and_little_more(
    tmp_path: Path, shape: str, sizes: dict[str, Any], train: dict[str, int], stream: Any, activations: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture(shape, 2) | sizes))
    config = RunConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(config=str(tmp_path), dtype="bfloat16"),
        data=DataConfig(files=["random tokens"], seq_len=SEQ_LEN),
        moe=MoeConfig(stream=stream),
        tiers=TiersConfig(dram=ByteSize("512MiB"), backend="posix", activations=activations),
        train=TrainConfig(**train),  # type: ignore[arg-type]
    )
    peak = device_peak(case_of(config, Machine.here(config)))
    batch = random_batch(sizes["vocab_size"], train["rows_per_step"], SEQ_LEN, "cpu")
    known = known_drives(config.tiers, load_profile(config.tiers))
    setting = Setting(gpu=None, clip_norm=1.0, placement="cpu")
    with TieredBench(config, [setting], known, batch) as bench:
        for _ in range(2):
            bench.step(bench.cases[0])
        used = peak_bytes(lambda: bench.step(bench.cases[0]))
    foreseen = peak.nbytes - peak.buffers_bytes
    # Inputs of layers on their way to DRAM, or there already: threads are not always as fast.
    on_their_way = 3 * train["rows_per_step"] * SEQ_LEN * sizes["hidden_size"] * 2
    assert used - on_their_way <= foreseen <= 1.15 * used
