"""Routers choose the same experts in the recompute as in forward.

A choice is an index that comes out of `topk`, `max` or `argmax`. With near-ties it may come out differently
where kernels differ (with gradients and without; pytorch#171355), and a gradient would then belong to another
expert than the output. So the indices of forward are kept, and the recompute gets them in place of its own,
with the values that lie there: the gradient is that of the kept choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CHOICES = {"topk", "max", "argmax"}


class Choices:
    """The indices that one run of some code has chosen, in order; int64 tensors."""

    def __init__(self) -> None:
        self._indices: list[torch.Tensor] = []

    def recorded(self) -> TorchFunctionMode:
        """Within, the choices of this thread are kept."""
        return _Record(self._indices)

    def replayed(self) -> TorchFunctionMode:
        """Within, this thread gets the kept ones. The code must be the same."""
        return _Replay(self._indices)


class _Record(TorchFunctionMode):
    def __init__(self, indices: list[torch.Tensor]) -> None:
        super().__init__()
        self._indices = indices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _chooses(func, result):
            self._indices.append(result if isinstance(result, torch.Tensor) else result.indices)
        return result


class _Replay(TorchFunctionMode):
    def __init__(self, indices: list[torch.Tensor]) -> None:
        super().__init__()
        self._left = iter(indices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _CHOICES:
            return func(*args, **kwargs)
        with torch.no_grad():
            chosen = func(*args, **kwargs)
        if not _chooses(func, chosen):
            return func(*args, **kwargs)
        indices = next(self._left)
        if isinstance(chosen, torch.Tensor):
            return indices
        values, dim, kept_dim = _arguments(func.__name__, *args, **kwargs)
        at = indices if kept_dim else indices.unsqueeze(dim)
        gathered = values.gather(dim, at)
        return type(chosen)((gathered if kept_dim else gathered.squeeze(dim), indices))


def _chooses(func: Any, result: Any) -> bool:
    """Not so the largest of all elements, or of two tensors: a value without an index."""
    name = getattr(func, "__name__", "")
    return name in _CHOICES and (name == "argmax" or not isinstance(result, torch.Tensor))


def _arguments(name: str, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int, bool]:
    """Of `topk(values, k, dim=-1, ...)` and `max(values, dim, keepdim=False)`: values, dimension, and whether
    the result has it.
    """
    if name == "topk":
        return values, kwargs.get("dim", args[1] if len(args) > 1 else -1), True
    dim = kwargs.get("dim", args[0] if args else -1)
    return values, dim, kwargs.get("keepdim", args[1] if len(args) > 1 else False)
