"""One sweep: all rows of a step forward through the layers, the loss, and back, while weights stream through
the device.

The model's own `forward` runs, so every family gets the arguments its layers want; the forward of each layer
is replaced, on the instance, by a shim. The shim keeps the layer's input, binds the streamed weights, and
runs the rows of the step in chunks without a graph; in backward it binds the weights again, recomputes each
chunk and adds its weight gradients to the unit's fp32 buffer. So weights are uploaded twice per step whatever
the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tierstream.engine.activations import ActivationStash
from tierstream.engine.binding import Binding
from tierstream.engine.device import Device
from tierstream.engine.device_memory import ACTIVATION_GROUP
from tierstream.engine.gradients import GradientBuffers
from tierstream.engine.head import Head
from tierstream.engine.recompute import last_projection, without_output
from tierstream.engine.trace import Trace, Track
from tierstream.engine.units import ModelUnits, activation_unit
from tierstream.engine.upload import StepPlan, Upload, Uploader
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Unit


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


class _StreamedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: Sweep, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        ctx.sweep, ctx.call = sweep, call
        return sweep.layer_forward(call, hidden.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        call, ctx.call = ctx.call, None
        return None, None, ctx.sweep.layer_backward(call, grad_outputs[0])


class _StreamedEmbedding(torch.autograd.Function):
    """`anchor` is a dummy that requires grad: without it, a graph whose real inputs are token ids would not
    be recorded.
    """

    @staticmethod
    def forward(ctx: Any, sweep: Sweep, ids: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.sweep, ctx.ids = sweep, ids
        return sweep.embedding_forward(ids)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        ctx.sweep.embedding_backward(ctx.ids, grad_outputs[0])
        return None, None, None


@dataclass(frozen=True)
class Batch:
    """Rows of a step on the device: int64 [rows, seq_len] each; labels are shifted already."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    trained_tokens: int


class Sweep:
    """Streams a model's layers through the device.

    Args:
        model: built by transformers, parameters on `meta`, buffers on the device.
        rows_per_chunk: rows that run through a layer at once.
        loss_chunk_tokens: tokens whose logits exist at once.
    """

    def __init__(
        self,
        model: Any,
        units: ModelUnits,
        device: Device,
        uploader: Uploader,
        gradients: GradientBuffers,
        stash: ActivationStash,
        trace: Trace,
        *,
        rows_per_chunk: int,
        loss_chunk_tokens: int,
    ) -> None:
        self._unneeded: dict[int, nn.Linear | None] = {}
        self._units, self._device, self._uploader = units, device, uploader
        self._gradients, self._stash, self._trace = gradients, stash, trace
        self._rows_per_chunk = rows_per_chunk
        self._decoder = model.get_decoder()
        self._embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        self._anchor = torch.zeros((), requires_grad=True)
        norm = _final_norm(model)
        self._head_binding = Binding(model, [norm, output], units.head)
        self._head = Head(norm, output, self._head_binding, loss_chunk_tokens)
        self._embedding_binding = Binding(model, [self._embedding], units.embed)
        self._layer_bindings = [
            Binding(model, [layer], unit)
            for layer, unit in zip(self._decoder.layers, units.layers, strict=True)
        ]
        self._embedding_rows = type(self._embedding).forward.__get__(self._embedding)
        self._replace_forwards(norm)
        self.uses = self._list_uses()
        self._use = {use: index for index, use in enumerate(self.uses)}

    def _list_uses(self) -> list[tuple[str, int]]:
        layers = range(len(self._units.layers))
        uses = [("embed", 0), *(("forward", i) for i in layers), ("head", 0)]
        for i in reversed(layers):
            if not self._stash.on_device:
                uses.append(("activation", i))
            uses.append(("backward", i))
        return uses

    def uploads(self, gate: Callable[[str, int], None], group_of: Mapping[str, str]) -> list[Upload]:
        """What a step uploads, one entry for each of `uses`.

        Args:
            group_of: unit -> group of the slots that its weights go to.
            gate: blocks until the pending update of a page of the unit's weights has been applied.
        """

        def upload(kind: str, index: int) -> Upload:
            if kind == "activation":
                return Upload(
                    activation_unit(index),
                    "activation",
                    ACTIVATION_GROUP,
                    lambda page: self._stash.wait_stored(index),
                )
            end = {"embed": self._units.embed, "head": self._units.head}.get(kind)
            unit = end or self._units.layers[index]
            return Upload(unit.name, "weight", group_of[unit.name], partial(gate, unit.name))

        return [upload(*use) for use in self.uses]

    def run(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """Forward, loss and backward of one step, enqueued; the gradients are on their way to their planes.

        Returns:
            The mean cross-entropy over the step's trained tokens, 0-dim fp64 on the device.
        """
        self._stash.begin_step()
        self._uploader.begin(plan)
        hidden = self._decoder(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        use = self._use["head", 0]
        weights = self._head_binding.tensors(self._uploader.take(use))
        sums = self._gradients.open(self._units.head).views()
        with torch.no_grad(), self._computing("head", self._units.head):
            loss, grad = self._head.loss_and_gradient(
                weights, hidden.detach(), batch.labels, batch.trained_tokens, sums
            )
        self._uploader.release(use)
        if not self._units.tied:
            self._gradients.close(self._units.head)
        torch.autograd.backward(hidden, grad)
        self._uploader.finish()
        return loss

    def _computing(self, what: str, unit: Unit) -> AbstractContextManager[None]:
        """The block enqueues the unit's computation; all that it needs was waited for before."""
        return self._trace.on_lane(Track.COMPUTE, self._device.compute, what, unit.name)

    def layer_forward(self, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        self._stash.put(call.layer, hidden)
        call.rng = self._device.rng_state()
        use = self._use["forward", call.layer]
        binding = self._layer_bindings[call.layer]
        weights = binding.tensors(self._uploader.take(use))
        with self._computing("forward", binding.unit), binding.bound(weights):
            out = _joined(hidden, ((rows, call.run(hidden[rows], rows)) for rows in self._chunks(call.rows)))
        self._uploader.release(use)
        return out

    def layer_backward(self, call: LayerCall, grad_out: torch.Tensor) -> torch.Tensor:
        use = self._use["backward", call.layer]
        hidden = self._stashed(call.layer, grad_out)
        binding = self._layer_bindings[call.layer]
        leaves = [w.detach().requires_grad_() for w in binding.tensors(self._uploader.take(use))]
        total = self._gradients.open(binding.unit)
        assert call.rng is not None

        def chunk_backward(rows: slice) -> torch.Tensor:
            part = hidden[rows].detach().requires_grad_()
            out = self._recompute(call, part, rows)
            grad_part, *grads = torch.autograd.grad(out, [part, *leaves], grad_out[rows], allow_unused=True)
            total.add(grads)
            return grad_part

        with (
            self._computing("backward", binding.unit),
            torch.enable_grad(),
            binding.bound(leaves),
            self._device.replayed_rng(call.rng),
        ):
            grad_in = _joined(hidden, ((rows, chunk_backward(rows)) for rows in self._chunks(call.rows)))
        self._uploader.release(use)
        if not self._stash.on_device:
            self._uploader.release(self._use["activation", call.layer])
        self._gradients.close(binding.unit)
        return grad_in

    def _recompute(self, call: LayerCall, part: torch.Tensor, rows: slice) -> torch.Tensor:
        """The layer's output with its graph; what no gradient needs is left out once it is known."""
        layer = self._decoder.layers[call.layer]
        if getattr(layer, "compiled_whole", False):  # see kernels.compile_layers
            return call.run(part, rows)
        if call.layer not in self._unneeded:
            out, self._unneeded[call.layer] = last_projection(layer, lambda: call.run(part, rows))
            return out
        with without_output(self._unneeded[call.layer]):
            return call.run(part, rows)

    def embedding_forward(self, ids: torch.Tensor) -> torch.Tensor:
        use = self._use["embed", 0]
        binding = self._embedding_binding
        weights = binding.tensors(self._uploader.take(use))
        with self._computing("forward", binding.unit), binding.bound(weights):
            out = self._embedding_rows(ids)
        self._uploader.release(use)
        return out

    def embedding_backward(self, ids: torch.Tensor, grad_out: torch.Tensor) -> None:
        """Rows of the gradient are added in fp32, token after token, straight into the unit's buffer."""
        sums = self._gradients.open(self._units.embed).views()
        with self._computing("backward", self._units.embed):
            rows = grad_out.reshape(-1, grad_out.shape[-1]).float()
            flat_ids = ids.reshape(-1)
            if self._embedding.padding_idx is not None:  # torch.nn.Embedding gives that row no gradient
                rows = rows.masked_fill((flat_ids == self._embedding.padding_idx).unsqueeze(-1), 0.0)
            sums[self._embedding_binding.used[0]].index_add_(0, flat_ids, rows)
        self._gradients.close(self._units.embed)

    def _stashed(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        if self._stash.on_device:
            return self._stash.take_local(layer)
        flat = self._uploader.take(self._use["activation", layer])
        return flat[: like.numel() * like.itemsize].view(like.dtype).view(like.shape)

    def _chunks(self, rows: int) -> list[slice]:
        return [slice(i, min(i + self._rows_per_chunk, rows)) for i in range(0, rows, self._rows_per_chunk)]

    def _replace_forwards(self, norm: nn.Module) -> None:
        """Put the shims in place, on the instances: type, attributes and hooks of the modules stay."""
        embedding = self._embedding
        if (
            type(embedding) is not nn.Embedding
            or embedding.max_norm is not None
            or embedding.scale_grad_by_freq
        ):
            raise ModelSourceError(
                f"the embedding is a {type(embedding).__name__}; only a plain nn.Embedding streams yet"
            )
        self._embedding.forward = lambda ids: _StreamedEmbedding.apply(self, ids, self._anchor)
        norm.forward = lambda hidden: hidden  # computed by the head, in chunks, together with the loss
        for index, layer in enumerate(self._decoder.layers):
            layer.forward = self._layer_shim(index, layer.forward)

    def _layer_shim(self, index: int, forward: Any) -> Any:
        def shim(*args: Any, **kwargs: Any) -> torch.Tensor:
            call = LayerCall(index, forward, args, kwargs)
            hidden, call.hidden = call.hidden, None
            return _StreamedLayer.apply(self, call, hidden)

        return shim


def _joined(like: torch.Tensor, parts: Iterable[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """The parts as one tensor of the shape and dtype of `like`; a part that is all of it as it is."""
    whole = None
    for rows, part in parts:
        if part.shape == like.shape:
            return part
        whole = torch.empty_like(like) if whole is None else whole
        whole[rows] = part
    assert whole is not None
    return whole


def _final_norm(model: Any) -> nn.Module:
    """The one child of the decoder that has parameters and is neither the embedding nor the layers."""
    decoder = model.get_decoder()
    known = (model.get_input_embeddings(), decoder.layers)
    rest = [
        m
        for m in decoder.children()
        if next(m.parameters(), None) is not None and all(m is not k for k in known)
    ]
    config = model.config
    special = [
        key
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier")
        if getattr(config, key, None) not in (None, 1, 1.0)
    ]
    if len(rest) != 1 or special:
        what = (
            f"config.{special[0]}"
            if special
            else f"{len(rest)} modules with parameters beside embedding and layers"
        )
        raise ModelSourceError(f"{type(model).__name__} has {what}; this model cannot be streamed yet")
    return rest[0]
