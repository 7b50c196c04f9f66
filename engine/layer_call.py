"""One call of one layer, kept so that it can be made again for some of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tierstream.engine.routing import Choices
from tierstream.io.errors import ModelSourceError


class LayerCall:
    """One call of one layer: its arguments taken apart, so that it can be run for some rows, twice.

    Every tensor argument whose first dimension is the number of rows is cut; the rest is passed whole.
    """

    def __init__(self, layer: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self._forward = layer, forward
        leaves, self._spec = tree_flatten((args, kwargs))
        self.hidden = args[0] if args else kwargs["hidden_states"]
        self._hidden_at = next(i for i, leaf in enumerate(leaves) if leaf is self.hidden)
        self.rows = self.hidden.shape[0]
        self._leaves = [None if i == self._hidden_at else leaf for i, leaf in enumerate(leaves)]
        self.rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.choices = Choices()
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise ModelSourceError(
                    "a layer takes a second differentiable input beside its hidden states; this model cannot "
                    "be streamed yet"
                )

    def run(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """The layer's output for `rows`, given its input for these rows."""
        leaves = [
            leaf[rows]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.rows
            else leaf
            for leaf in self._leaves
        ]
        leaves[self._hidden_at] = hidden
        args, kwargs = tree_unflatten(leaves, self._spec)
        out = self._forward(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
            raise ModelSourceError(
                "a layer returns something else than hidden states; this model cannot be streamed yet"
            )
        return out
