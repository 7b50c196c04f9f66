"""Modules that look rows of a matrix up: the input embedding, and others beside it.

The look-up is ours; what else the module does (a scale, say) is its own. Autograd gives the gradient of the
rows that were taken, one for each time, and they are added in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tierstream.engine.model.binding import Binding
from tierstream.engine.model.carve import TORCH_DTYPES
from tierstream.engine.model.lookups import Lookups
from tierstream.engine.step.streams import Streams, Use


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that one look-up took.

    Attributes:
        graph: their values and what the module made of them; None: it left them as they were.
    """

    ids: torch.Tensor
    padding_idx: int | None
    graph: tuple[torch.Tensor, torch.Tensor] | None

    def gradient(self, grad_out: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, width]."""
        grad = grad_out
        if self.graph is not None:
            values, out = self.graph
            (grad,) = torch.autograd.grad(out, values, grad_out)
        rows = grad.reshape(-1, grad.shape[-1]).float()
        if self.padding_idx is None:
            return rows
        # torch.nn.functional.embedding gives that row no gradient
        return rows.masked_fill((self.ids.reshape(-1) == self.padding_idx).unsqueeze(-1), 0.0)


class StreamedTable:
    """Takes over the forward of such a module, for one call in a pass.

    Args:
        binding: the place of its matrix.
    """

    def __init__(self, module: nn.Module, binding: Binding, streams: Streams) -> None:
        self._forward, self._binding, self._streams = module.forward, binding, streams
        self._use = Use("table", binding.unit.name)
        # Without an input that requires grad no graph would be recorded.
        self._anchor = torch.zeros((), requires_grad=True)
        unit, device = binding.unit, streams.device.torch_device
        nothing = torch.full((), torch.nan, dtype=TORCH_DTYPES[unit.dtype], device=device)
        self._stand_ins = [nothing.expand(tensor.shape) for tensor in unit.tensors]
        module.forward = self._replaced

    def held(self) -> AbstractContextManager[None]:
        """Within, tensors without memory or values hold the places of those to come: some families ask the
        matrix for the device that its tokens belong on (Llama 4).
        """
        return self._binding.bound(self._stand_ins)

    def _replaced(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and self._binding.unit.trained:
            return _Table.apply(self, args, kwargs, self._anchor)
        with torch.no_grad():
            return self.forward(args, kwargs)[0]

    def forward(self, args: Any, kwargs: Any) -> tuple[torch.Tensor, _Rows]:
        """The module's own forward; with a graph that begins at the rows, where gradients are enabled."""
        weights = self._binding.tensors(self._streams.take(self._use))
        matrix = weights[self._binding.used[0]]
        taken = list[Any]()

        def look_up(
            ids: torch.Tensor, of: torch.Tensor, padding_idx: int | None = None, *more: Any, **named: Any
        ) -> torch.Tensor:
            if of is not matrix:
                return F.embedding(ids, of, padding_idx, *more, **named)
            values = F.embedding(ids, of).requires_grad_(torch.is_grad_enabled())
            taken[:] = ids, padding_idx, values
            return values

        computing = self._streams.computing("forward", self._binding.unit)
        with computing, self._binding.bound(weights), Lookups(look_up):
            out = self._forward(*args, **kwargs)
        self._streams.release(self._use)
        ids, padding_idx, values = taken
        return out, _Rows(ids, padding_idx, None if out is values else (values, out))

    def backward(self, rows: _Rows, grad_out: torch.Tensor) -> None:
        """Their gradients are added, token after token, straight into the unit's sums."""
        unit, gradients = self._binding.unit, self._streams.gradients
        sums = gradients.open(unit).views()
        with self._streams.computing("backward", unit):
            grad = rows.gradient(grad_out)
            sums[self._binding.used[0]].index_add_(0, rows.ids.reshape(-1), grad)
        gradients.close(unit)


class _Table(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: StreamedTable, args: Any, kwargs: Any, anchor: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            out, ctx.rows = table.forward(args, kwargs)
        ctx.table = table
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        rows, ctx.rows = ctx.rows, None
        ctx.table.backward(rows, grad_outputs[0])
        return None, None, None, None
