"""What a step takes of the device beside its buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.allocations import peak_bytes
from support.families import EAGER_ONLY, FAMILIES, family_config, moe_config
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


def in_cycles(action: Callable[[], object]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that nothing but Python's collector would let go of."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        action()
        gc.collect()
        return [tuple(found.shape) for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_on_the_device_waits_for_the_garbage_collector(family: str) -> None:
    """It comes every 50 steps; masks of packed rows, for one, would fill the memory until then."""
    attention = "eager" if family in EAGER_ONLY else "sdpa"
    with rig(Setup(config=family_config(family), attention=attention)) as run:
        plain, packed = batches(2)
        run.train([plain, packed])
        assert in_cycles(lambda: run.train([packed, plain, packed])) == []
        assert in_cycles(lambda: run.runtime.evaluate([packed])) == []


def test_a_tensor_in_a_cycle_is_found() -> None:
    def action() -> None:
        cycle: list[Any] = [torch.zeros(3, 5)]
        cycle.append(cycle)

    assert in_cycles(action) == [(3, 5)]
