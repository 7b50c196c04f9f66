"""Layers whose weights come and go: the forward of each is replaced, on the instance, by one that keeps the
layer's input, binds its weights, and runs the rows of the step in chunks without a graph. Backward binds them
again, recomputes each chunk and adds its gradients to the unit's fp32 sum. So weights are uploaded twice per
step whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from tierstream.engine.model.units import activation_unit
from tierstream.engine.moe.routing import Choices
from tierstream.engine.step.activations import ActivationStash
from tierstream.engine.step.layer_call import LayerCall
from tierstream.engine.step.layer_parts import LayerParts
from tierstream.engine.step.streams import Streams, Use


class StreamedLayers:
    """Takes over the forwards of a model's layers.

    Args:
        rows_per_chunk: rows that run through a layer at once.
        rows_dim: dimension of the layers' input in which they lie; None: all run at once.
        backward_from: the first layer that has a backward; those before it are frozen, as is what they get.
        tuple_of: see `Anatomy`.

    Attributes:
        generating: a layer is called as it comes: a few tokens of a few rows, all at once and not compiled,
            for there are too many lengths.
    """

    def __init__(
        self,
        parts: Sequence[LayerParts],
        streams: Streams,
        stash: ActivationStash,
        *,
        rows_per_chunk: int,
        rows_dim: int | None,
        backward_from: int,
        tuple_of: int | None = None,
    ) -> None:
        self._parts, self._streams, self._stash = parts, streams, stash
        self._rows_per_chunk = None if rows_dim is None else rows_per_chunk
        self._rows_dim, self._tuple_of = rows_dim or 0, tuple_of
        self._backward_from = backward_from
        # A layer may be trained whose input needs no gradient: without another no graph would be recorded.
        self._anchor = torch.zeros((), requires_grad=True)
        self.generating = False
        for index, own in enumerate(parts):
            own.layer.forward = self._replaced(index, own.layer)  # type: ignore[method-assign]

    def _replaced(self, index: int, layer: Any) -> Any:
        forward = layer.forward

        def shim(*args: Any, **kwargs: Any) -> Any:
            if self.generating:
                with self._weights(index, Choices()):
                    return type(layer).forward(layer, *args, **kwargs)
            call = LayerCall(index, forward, args, kwargs, self._rows_dim)
            hidden, call.hidden = call.hidden, None
            made = self._made(index, call, hidden)
            return made if self._tuple_of is None else (made, *[None] * (self._tuple_of - 1))

        return shim

    def _made(self, index: int, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's hidden states, with a graph where it has a backward."""
        trains = torch.is_grad_enabled()
        if trains and index >= self._backward_from:
            return call.finish(_StreamedLayer.apply(self, call, self._anchor, hidden, *call.extras))
        with torch.no_grad():
            results = self._results(call, hidden)
        if trains:
            self._tell_idle(index)
        return call.finish(results)

    def forward(self, call: LayerCall, hidden: torch.Tensor) -> list[torch.Tensor]:
        self._stash.put(call.layer, hidden)
        call.rng = self._streams.device.rng_state()
        return self._results(call, hidden)

    def _results(self, call: LayerCall, hidden: torch.Tensor) -> list[torch.Tensor]:
        def of(rows: slice) -> list[torch.Tensor]:
            return call.run(call.hidden_rows(hidden, rows), rows)

        with self._weights(call.layer, call.choices):
            return call.joined(hidden, ((rows, of(rows)) for rows in self._chunks(call.rows)))

    @contextmanager
    def _weights(self, layer: int, choices: Choices) -> Iterator[None]:
        """Within, a layer has its weights, for a run without a graph that keeps what its routers choose."""
        parts = self._parts[layer]
        uses = [Use("forward", unit.name, layer) for unit in parts.units]
        weights = parts.tensors([self._streams.take(use) for use in uses])
        with self._streams.computing("forward", parts.units[0]), parts.forward(weights, choices):
            yield
        for use in uses:
            self._streams.release(use)

    def backward(
        self, call: LayerCall, grads_out: Sequence[torch.Tensor | None], *, of_inputs: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the hidden states and of the extras.

        Args:
            grads_out: of the results.
            of_inputs: these are wanted; else they are None, and only the layer's own are computed.
        """
        parts, gradients = self._parts[call.layer], self._streams.gradients
        uses = [Use("backward", unit.name, call.layer) for unit in parts.units]
        grad_out = grads_out[0]
        assert grad_out is not None
        hidden = self._stashed(call.layer, grad_out)
        weights = parts.tensors([self._streams.take(use) for use in uses])
        units = list(zip(parts.units, weights, strict=True))
        leaves = [[w.detach().requires_grad_(unit.trained) for w in own] for unit, own in units]
        trained = [(unit, own) for unit, own in zip(parts.units, leaves, strict=True) if unit.trained]
        totals = [gradients.open(unit) for unit, _ in trained]
        assert call.rng is not None

        def chunk_backward(rows: slice) -> Sequence[torch.Tensor | None]:
            part = call.hidden_rows(hidden, rows).detach().requires_grad_(of_inputs)
            extras = [extra.detach().requires_grad_() for extra in call.extra_rows(rows)]
            results = parts.recompute(lambda: call.run(part, rows, extras))
            shares = parts.router_shares(rows)
            coming = [call.hidden_rows(grad_out, rows), *(call.cut(grad, rows) for grad in grads_out[1:])]
            pairs = [pair for pair in zip(results, coming, strict=True) if pair[1] is not None]
            pairs += [(share, torch.ones_like(share)) for share in shares]
            ends, grads_of_ends = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
            inputs = [part, *extras] if of_inputs else []
            wanted = [*inputs, *chain(*(own for _, own in trained)), *parts.anchors]
            grads = list(torch.autograd.grad(ends, wanted, grads_of_ends, allow_unused=True))
            made = [grads.pop(0) for _ in inputs]
            for total, (_, own) in zip(totals, trained, strict=True):
                total.add(grads[: len(own)])
                del grads[: len(own)]
            return made

        with (
            self._streams.computing("backward", parts.units[0]),
            torch.enable_grad(),
            parts.recomputing(leaves, call.choices),
            self._streams.device.replayed_rng(call.rng),
        ):
            chunks = ((rows, chunk_backward(rows)) for rows in self._chunks(call.rows))
            grads_in: list[torch.Tensor | None] = [None]
            if of_inputs:
                grads_in = call.joined(hidden, chunks)
            else:
                for _ in chunks:
                    pass
        for use in uses:
            self._streams.release(use)
        if not self._stash.on_device:
            self._streams.release(Use("activation", activation_unit(call.layer), call.layer))
        for unit, _ in trained:
            gradients.close(unit)
        self._tell_idle(call.layer)
        return grads_in

    def _tell_idle(self, layer: int) -> None:
        """A layer has run for the last time in a step: its experts without tokens get no gradient."""
        experts = self._parts[layer].experts
        for unit in [] if experts is None else experts.idle:
            self._streams.gradients.absent(unit)

    def _stashed(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        if self._stash.on_device:
            return self._stash.take_local(layer)
        flat = self._streams.take(Use("activation", activation_unit(layer), layer))
        return flat[: like.numel() * like.itemsize].view(like.dtype).view(like.shape)

    def _chunks(self, rows: int) -> list[slice]:
        step = self._rows_per_chunk or rows
        return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layers: StreamedLayers,
        call: LayerCall,
        anchor: torch.Tensor,
        hidden: torch.Tensor,
        *extras: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.layers, ctx.call = layers, call
        ctx.set_materialize_grads(False)  # no one may want what a layer shares
        return tuple(layers.forward(call, hidden.detach()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        wanted = any(ctx.needs_input_grad[3:])
        return None, None, None, *ctx.layers.backward(call, grad_outputs, of_inputs=wanted)
