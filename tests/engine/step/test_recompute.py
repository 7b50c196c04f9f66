"""The last projection of a layer is not computed again, where and only where no gradient needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rig import Setup, batches, rig, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tierstream.engine.step.recompute import last_projection, without_output

#: One chunk of the head: logits, and the gradients of its two inputs.
HEAD_PRODUCTS = 3 * -(-5 * 16 // 23)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self, end: Callable[[Layer, torch.Tensor, torch.Tensor], torch.Tensor], bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)
        self.end = end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self, x, torch.nn.functional.silu(self.up(x)))


def gradients(layer: Layer, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out)))


ENDS = {
    "summed": (lambda layer, x, h: x + layer.down(h), True),
    "called by keyword": (lambda layer, x, h: x + layer.down(input=h), True),
    "bare": (lambda layer, x, h: layer.down(h), True),
    "summed twice": (lambda layer, x, h: x + (layer.down(h) + x), True),
    "multiplied": (lambda layer, x, h: x + layer.down(h) * 2.0 * x, False),
    "normed": (lambda layer, x, h: torch.nn.functional.layer_norm(x + layer.down(h), (8,)), False),
    "used beside the sum": (lambda layer, x, h: (y := layer.down(h)) + torch.sigmoid(y), False),
    "its sum is normed": (lambda layer, x, h: (y := x + layer.down(h)) + torch.tanh(y), False),
    "called twice": (lambda layer, x, h: x + layer.down(h) + layer.down(2 * h), False),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_found_only_where_nothing_needs_it_and_the_gradients_are_the_same_bits(name: str, bias: bool) -> None:
    end, left_out = ENDS[name]
    torch.manual_seed(0)
    layer, x = Layer(end, bias), torch.randn(2, 5, 8, requires_grad=True)
    (out,), unneeded = last_projection(layer, lambda: [layer(x)])
    assert torch.equal(out, layer(x))
    assert unneeded is (layer.down if left_out else None)
    expected = gradients(layer, x, out)
    with without_output(unneeded):
        again = layer(x)
    for ours, theirs in zip(gradients(layer, x, again), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert "forward" not in vars(layer.down)


def test_a_step_computes_one_product_less_per_layer_and_chunk() -> None:
    setup = Setup(config=tiny_config("qwen2"), rows_per_chunk=3)
    with rig(setup) as run:
        first, second = batches(2)
        counts = []
        for batch in (first, second):
            with Products() as products:
                run.train([batch])
            counts.append(products.count)
        layers, chunks = run.reference.config.num_hidden_layers, 2
        # In the first step, the first chunk of each layer is the one in which the product is found.
        assert counts[0] - counts[1] == layers
        assert counts[1] == layers * chunks * (7 + 6 + 2 * 7) + HEAD_PRODUCTS
