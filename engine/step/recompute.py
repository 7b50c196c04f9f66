"""What the recompute of a layer need not compute: its last projection.

No gradient depends on the output of a matrix product, only on its inputs. Where a layer ends in one, and only
sums follow it (`residual + down_proj(x)`), the recompute takes memory of the right shape for the product and
leaves the content undefined: autograd records the same graph, and gives the same bits. In a dense layer that
is a quarter of the forward's work. (torch.utils.checkpoint saves the same by ending its recompute early.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Nodes of autograd's graph that keep no tensor.
_KEEP_NOTHING = {"AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def last_projection(
    layer: nn.Module, run: Callable[[], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], nn.Linear | None]:
    """Runs a layer, with gradients, and finds the linear module whose output nothing needs.

    Uses that autograd does not record (under `no_grad`, of `detach()`, in hooks) are not seen: a layer that
    made its result depend on the output in such a way would get other gradients. None of transformers does.

    Returns:
        What `run` gave; the module, or None if the layer ends in another way.
    """
    outputs: list[tuple[nn.Linear, Any]] = []

    def observed(linear: nn.Linear, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        output = forward()
        outputs.append((linear, output.grad_fn))
        return output

    linears = [module for module in layer.modules() if type(module) is nn.Linear]
    with _replaced_forwards(linears, observed):
        results = run()
    ends = [result.grad_fn for result in results]
    found = [linear for linear, node in outputs if node is not None and only_summed(ends, node)]
    used_once = len(found) == 1 and sum(linear is found[0] for linear, _ in outputs) == 1
    return results, found[0] if used_once else None


@contextmanager
def without_output(linear: nn.Linear | None) -> Iterator[None]:
    """Within, the module's output has the right shape and graph, and no content. None: nothing changes."""

    def unproduced(_: nn.Linear, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        with _ProductsLeftOut():
            return forward()

    with _replaced_forwards([] if linear is None else [linear], unproduced):
        yield


class _ProductsLeftOut(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            left, right = args[-2:]
            return left.new_empty(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced_forwards(
    linears: list[nn.Linear], by: Callable[[nn.Linear, Callable[[], torch.Tensor]], torch.Tensor]
) -> Iterator[None]:
    def replaced(linear: nn.Linear, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: by(linear, lambda: plain(*args, **kwargs))

    before = [linear.__dict__.get("forward") for linear in linears]
    for linear in linears:
        linear.forward = replaced(linear, linear.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear, own in zip(linears, before, strict=True):
            if own is None:
                del linear.forward
            else:
                linear.forward = own  # type: ignore[method-assign]


def only_summed(ends: Iterable[Any], node: Any) -> bool:
    """Whether autograd's graph makes nothing but sums of the output of `node`, on the way to `ends`."""
    users: dict[Any, list[Any]] = {}
    seen = {end for end in ends if end is not None}
    frontier = list(seen)
    while frontier:
        here = frontier.pop()
        for following, _ in here.next_functions:
            if following is not None:
                users.setdefault(following, []).append(here)
                if following not in seen:
                    seen.add(following)
                    frontier.append(following)
    wanted = [node] if node in seen else []
    found = bool(wanted)
    while wanted:
        here = wanted.pop()
        if any(user.name() not in _KEEP_NOTHING for user in users.get(here, [])):
            return False
        wanted += users.get(here, [])
    return found
