"""The look-up of rows in a matrix, caught where a module makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tierstream.io.errors import ModelSourceError


class Lookups(TorchFunctionMode):
    """Within, `look_up` stands in for torch.nn.functional.embedding."""

    def __init__(self, look_up: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._look_up = look_up

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._look_up if func is F.embedding else func)(*args, **(kwargs or {}))


def check_lookup(
    who: str,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    """Takes the arguments of torch.nn.functional.embedding that follow the matrix.

    Raises:
        ModelSourceError: what becomes of a row or of its gradient depends on more than the row.
    """
    given = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq}
    if any(given.values()):
        raise ModelSourceError(
            f"{who} is an embedding with {next(name for name in given if given[name])}, which is no matter "
            "of single rows; it cannot be streamed"
        )
