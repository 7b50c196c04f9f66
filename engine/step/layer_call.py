"""One call of one layer, kept so that it can be made again for some of its rows."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tierstream.engine.moe.routing import Choices
from tierstream.io.errors import ModelSourceError


class LayerCall:
    """One call of one layer: its arguments taken apart, so that it can be run for some rows, twice.

    Every tensor whose first dimension is the number of rows is cut; the rest is passed whole. What lies in a
    mapping that the layer may change (states that layers share) is an argument like others; what the layer
    puts there is a result beside its hidden states.

    Args:
        rows_dim: dimension of the hidden states in which the rows lie.

    Attributes:
        hidden: until it is taken.
        extras: further tensors that the layer has a gradient for.
    """

    def __init__(
        self, layer: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows_dim: int
    ) -> None:
        self.layer, self._forward, self._rows_dim = layer, forward, rows_dim
        self._names = tuple(kwargs)
        # torch's `tree_flatten` leaves in a cycle what `is_leaf` refers to: the masks of a step, if it did.
        leaves, self._spec = tree_flatten((args, tuple(kwargs.values())), is_leaf=_is_mapping)
        self._shared = [leaf for leaf in leaves if isinstance(leaf, MutableMapping)]
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, MutableMapping)]
        self._contents: list[tuple[int, type, TreeSpec]] = []
        for at, mapping in zip(places, self._shared, strict=True):
            content, spec = tree_flatten(dict(mapping))
            self._contents.append((at, type(mapping), spec))
            leaves[at] = None
            leaves += content
        self.hidden = args[0] if args else kwargs["hidden_states"]
        self._hidden_at = next(i for i, leaf in enumerate(leaves) if leaf is self.hidden)
        self.rows = self.hidden.shape[rows_dim]
        leaves[self._hidden_at] = None
        tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        wanted = [(i, leaf) for i, leaf in tensors if leaf.requires_grad] if torch.is_grad_enabled() else []
        self.extras = [leaf for _, leaf in wanted]
        self._extras_at = [i for i, _ in wanted]
        for i, leaf in wanted:
            leaves[i] = leaf.detach()
        self._leaves = leaves
        self.rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.choices = Choices()

    def hidden_rows(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """Those of a tensor of the shape of the hidden states."""
        return hidden[rows] if self._rows_dim == 0 else hidden[(slice(None),) * self._rows_dim + (rows,)]

    def extra_rows(self, rows: slice) -> list[torch.Tensor]:
        """Of each of the extras, without a graph."""
        return [self.cut(self._leaves[at], rows) for at in self._extras_at]

    def cut(self, leaf: Any, rows: slice) -> Any:
        """The rows of a tensor that has any; what else there is as it is."""
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.rows
        return leaf[rows] if has_rows else leaf

    def run(
        self, hidden: torch.Tensor, rows: slice, extras: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """The layer's output for `rows`, and what it put into mappings.

        Args:
            hidden: its input for these rows. extras: those for these rows; none: without gradients.
        """
        leaves = [self.cut(leaf, rows) for leaf in self._leaves]
        leaves[self._hidden_at] = hidden
        for at, extra in zip(self._extras_at, extras, strict=False):
            leaves[at] = extra
        found, end = list[dict[Any, Any]](), self._spec.num_leaves
        for at, kind, spec in self._contents:
            begin, end = end, end + spec.num_leaves
            found.append(tree_unflatten(leaves[begin:end], spec))
            leaves[at] = kind(found[-1])
        args, values = tree_unflatten(leaves[: self._spec.num_leaves], self._spec)
        out = self._forward(*args, **dict(zip(self._names, values, strict=True)))
        if isinstance(out, tuple | list):  # what follows the hidden states nobody needs (`Anatomy.tuple_of`)
            out = out[0]
        if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
            raise ModelSourceError(
                "a layer returns something else than hidden states; this model cannot be streamed"
            )
        if out.dtype != hidden.dtype:
            before, after = (str(tensor.dtype).removeprefix("torch.") for tensor in (hidden, out))
            raise ModelSourceError(
                f"layer {self.layer} takes hidden states in {before} and returns them in {after}; this model "
                "cannot be streamed"
            )
        if not found:
            return [out]
        put = [_put(before, leaves[at]) for before, (at, *_) in zip(found, self._contents, strict=True)]
        added, self._put_spec = tree_flatten(put)
        if not all(isinstance(value, torch.Tensor) for value in added):
            raise ModelSourceError(
                "a layer shares other things than tensors with those after it; this model cannot be streamed"
            )
        return [out, *added]

    def joined(
        self, like: torch.Tensor, parts: Iterable[tuple[slice, Sequence[torch.Tensor | None]]]
    ) -> list[Any]:
        """What was made of some rows at a time as made of all of them; a part that is all of it as it is.

        Args:
            like: shape and dtype of the first tensor of each part. The others have their rows in front.
        """
        whole = None
        others: list[list[torch.Tensor | None]] = []
        for rows, (part, *more) in parts:
            assert part is not None
            if part.shape == like.shape:
                return [part, *more]
            whole = torch.empty_like(like) if whole is None else whole
            self.hidden_rows(whole, rows)[...] = part
            if any(tensor is not None and len(tensor) != rows.stop - rows.start for tensor in more):
                raise ModelSourceError(
                    "layers share a tensor that does not have its rows in front, so rows cannot run apart; "
                    "leave train.rows_per_chunk out"
                )
            others.append(more)
        return [whole, *(_concatenated(own) for own in zip(*others, strict=True))]

    def finish(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts into the layer's own mappings what it added, and gives back its hidden states."""
        if self._shared:
            put = tree_unflatten(list(results[1:]), self._put_spec)
            for mapping, new in zip(self._shared, put, strict=True):
                mapping.update(new)
            self._shared = []  # they refer to this call, by the graph of what is in them
        return results[0]


def _is_mapping(argument: Any) -> bool:
    return isinstance(argument, MutableMapping)


def _concatenated(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _put(before: dict[Any, Any], now: MutableMapping[Any, Any]) -> dict[Any, Any]:
    """What a layer has put into a mapping."""
    return {key: value for key, value in now.items() if key not in before or value is not before[key]}
