"""What a step takes of the device beside its buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.allocations import peak_bytes
from support.families import moe_config
from support.rig import HIDDEN, Setup, batches, rig, tiny_config

ROWS, SEQ_LEN = 8, 128


#: Of a layer with experts, for each token and choice: what its routers chose, and the order of the pairs.
ROUTING_BYTES = 2 * 8


@pytest.mark.parametrize(("family", "choices"), [("qwen3", 0), ("olmoe", 2)])
def test_a_layer_leaves_nothing_behind_but_where_its_tokens_went(family: str, choices: int) -> None:
    def taken(layers: int) -> int:
        config: Any = tiny_config(layers=layers)
        if choices:
            config = moe_config(family, num_hidden_layers=layers, num_experts_per_tok=choices)
        made = Setup(config=config, dtype="bfloat16", rows=ROWS, seq_len=SEQ_LEN, rows_per_chunk=ROWS)
        with rig(made) as run:
            (batch,) = batches(1, rows=ROWS, seq_len=SEQ_LEN)
            run.train([batch, batch])
            return peak_bytes(lambda: run.train([batch]))

    kept = torch.get_rng_state().nbytes + ROUTING_BYTES * choices * ROWS * SEQ_LEN
    # Inputs of layers on their way to DRAM, or there already: threads are not always as fast.
    on_their_way = 3 * ROWS * SEQ_LEN * HIDDEN * 2
    assert taken(10) - taken(2) <= 8 * kept + on_their_way
