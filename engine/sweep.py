"""One sweep: all rows of a step forward through the layers, the loss, and back, while weights stream through
the device.

The model's own `forward` runs, so every family gets the arguments its layers want; the forward of each layer
is replaced, on the instance, by a shim. The shim keeps the layer's input, binds the streamed weights, and
runs the rows of the step in chunks without a graph; in backward it binds the weights again, recomputes each
chunk and adds its weight gradients to the unit's fp32 buffer. So weights are uploaded twice per step whatever
the number of chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from tierstream.engine.activations import ActivationStash
from tierstream.engine.batch import Batch
from tierstream.engine.binding import Binding
from tierstream.engine.device import Device
from tierstream.engine.device_memory import ACTIVATION_GROUP
from tierstream.engine.expert_cache import ExpertCache
from tierstream.engine.experts import StreamedExperts
from tierstream.engine.gradients import GradientBuffers
from tierstream.engine.head import Head, final_norm
from tierstream.engine.layer_call import LayerCall
from tierstream.engine.layer_parts import LayerParts
from tierstream.engine.router_loss import RouterLosses, layer_routers
from tierstream.engine.routing import Choices
from tierstream.engine.trace import Trace, Track
from tierstream.engine.units import ModelUnits, activation_unit, experts_of
from tierstream.engine.upload import StepPlan, Upload, Uploader
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Unit


class Use(NamedTuple):
    """One use of device bytes in a sweep, in the order of uploads.

    Attributes:
        kind: embed, forward, head, activation or backward.
        unit: whose weights, or whose boundary.
        layer: None at the ends.
    """

    kind: str
    unit: str
    layer: int | None = None


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


class Sweep:
    """Streams a model's layers through the device.

    Args:
        model: built by transformers, parameters on `meta`, buffers on the device.
        cache: where weights of experts come from; None: there are none.
        rows_per_chunk: rows that run through a layer at once.
        loss_chunk_tokens, z_loss_coef: see `Head`.
        router_losses: added to the cross-entropy.

    Attributes:
        uses: those of a step.
        forward_uses: how many of them a pass forward makes; they are the first.
    """

    def __init__(
        self,
        model: Any,
        units: ModelUnits,
        device: Device,
        uploader: Uploader,
        gradients: GradientBuffers,
        stash: ActivationStash,
        cache: ExpertCache | None,
        trace: Trace,
        *,
        rows_per_chunk: int,
        loss_chunk_tokens: int,
        z_loss_coef: float,
        router_losses: RouterLosses,
    ) -> None:
        self._units, self._device, self._uploader = units, device, uploader
        self._gradients, self._stash, self._trace = gradients, stash, trace
        self._rows_per_chunk, self._router_losses = rows_per_chunk, router_losses
        self._decoder = model.get_decoder()
        # transformers would keep those of all layers
        keeps_logits = getattr(model.config, "output_router_logits", False)
        self._outputs = {"output_router_logits": False} if keeps_logits else {}
        names = inspect.signature(type(self._decoder).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5
        self._has_cache = False
        self._embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        self._anchor = torch.zeros((), requires_grad=True)
        norm = final_norm(model)
        self._head_binding = Binding(model, [norm, output], units.head)
        self._head = Head(norm, output, self._head_binding, loss_chunk_tokens, z_loss_coef)
        self._embedding_binding = Binding(model, [self._embedding], units.embed)
        self._layers = self._part_layers(model, cache)
        self._embedding_rows = type(self._embedding).forward.__get__(self._embedding)
        self._replace_forwards(norm)
        self.uses = self._list_uses()
        self._use = {use: index for index, use in enumerate(self.uses)}
        self._head_use = Use("head", units.head.name)
        self.forward_uses = self._use[self._head_use] + 1

    def _part_layers(self, model: Any, cache: ExpertCache | None) -> list[LayerParts]:
        units, parts = self._units, []
        before: StreamedExperts | None = None
        for index, layer in enumerate(self._decoder.layers):
            experts = None
            if units.experts[index]:
                module = experts_of(layer)
                assert module is not None
                assert cache is not None
                experts = StreamedExperts(
                    module, units.experts[index], self._device, cache, self._gradients, before=before
                )
                before = experts
            routers = layer_routers(model, layer, self._router_losses)
            own = [units.layers[index], *units.beside[index]]
            parts.append(LayerParts(model, layer, own, experts, routers))
        return parts

    def _list_uses(self) -> list[Use]:
        def layer_uses(kind: str, index: int) -> list[Use]:
            return [Use(kind, unit.name, index) for unit in self._layers[index].units]

        layers = range(len(self._layers))
        uses = [Use("embed", self._units.embed.name)]
        uses += [use for index in layers for use in layer_uses("forward", index)]
        uses += [Use("head", self._units.head.name)]
        for index in reversed(layers):
            if not self._stash.on_device:
                uses.append(Use("activation", activation_unit(index), index))
            uses += layer_uses("backward", index)
        return uses

    def uploads(self, gate: Callable[[str, int], None], group_of: Mapping[str, str]) -> list[Upload]:
        """What a step uploads, one entry for each of `uses`.

        Args:
            group_of: unit -> group of the slots that its weights go to.
            gate: blocks until the pending update of a page of the unit's weights has been applied.
        """

        def upload(use: Use) -> Upload:
            if use.kind == "activation":
                assert use.layer is not None
                wait = partial(self._stash.wait_stored, use.layer)
                return Upload(use.unit, "activation", ACTIVATION_GROUP, lambda page: wait())
            return Upload(use.unit, "weight", group_of[use.unit], partial(gate, use.unit))

        return [upload(use) for use in self.uses]

    def run(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """Forward, loss and backward of one step, enqueued; the gradients are on their way to their planes.

        Returns:
            Means over the step's trained tokens, fp64 [2] on the device: see `Head.loss_and_gradient`.
        """
        self._stash.begin_step()
        hidden = self._hidden_states(plan, batch)
        weights = self._head_binding.tensors(self._take(self._head_use))
        sums = self._gradients.open(self._units.head).views()
        with torch.no_grad(), self._computing("head", self._units.head):
            losses, grad = self._head.loss_and_gradient(
                weights, hidden.detach(), batch.labels, batch.trained_tokens, sums
            )
        self._release(self._head_use)
        if not self._units.tied:
            self._gradients.close(self._units.head)
        torch.autograd.backward(hidden, grad)
        self._uploader.finish()
        return losses

    def evaluate(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """A pass forward over `batch`, enqueued; under `no_grad`.

        Returns:
            The cross-entropy summed over the trained tokens, 0-dim fp64 on the device.
        """
        hidden = self._hidden_states(plan, batch)
        with self._head_weights() as weights:
            return self._head.cross_entropy(weights, hidden, batch.labels)

    def next_logits(self, plan: StepPlan, cache: Any, **inputs: torch.Tensor) -> torch.Tensor:
        """A pass forward over tokens that follow those in `cache`; under `no_grad`.

        Args:
            cache: of transformers; gets keys and values of the new tokens.
            inputs: for the decoder.

        Returns:
            Logits of the last token of each row, fp32 [rows, vocabulary].
        """
        self._router_losses.begin_step(None)
        self._uploader.begin(plan)
        self._has_cache = True
        hidden = self._decoder(**inputs, **{self._cache_name: cache}, use_cache=True, **self._outputs)
        self._has_cache = False
        with self._head_weights() as weights:
            return self._head.logits(weights, hidden.last_hidden_state[:, -1])

    def _hidden_states(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """What the decoder gives, without its final norm; uploads begin."""
        self._router_losses.begin_step(batch.padding)
        self._uploader.begin(plan)
        output = self._decoder(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **self._outputs
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @contextmanager
    def _head_weights(self) -> Iterator[list[torch.Tensor]]:
        """Within, those of the head, the last upload of a pass forward."""
        weights = self._head_binding.tensors(self._take(self._head_use))
        with self._computing("head", self._units.head):
            yield weights
        self._release(self._head_use)
        self._uploader.finish()

    def expert_tokens(self) -> list[dict[int, int]]:
        """Of each layer with experts, in the latest step: expert -> tokens, of those that had any."""
        return [parts.experts.tokens for parts in self._layers if parts.experts is not None]

    def _take(self, use: Use) -> torch.Tensor:
        return self._uploader.take(self._use[use])

    def _release(self, use: Use) -> None:
        self._uploader.release(self._use[use])

    def _computing(self, what: str, unit: Unit) -> AbstractContextManager[None]:
        """The block enqueues the unit's computation; all that it needs was waited for before."""
        return self._trace.on_lane(Track.COMPUTE, self._device.compute, what, unit.name)

    def layer_forward(self, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        self._stash.put(call.layer, hidden)
        call.rng = self._device.rng_state()
        return self._layer_output(call, hidden)

    def _layer_output(self, call: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        with self._layer_weights(call.layer, call.choices):
            return _joined(hidden, ((rows, call.run(hidden[rows], rows)) for rows in self._chunks(call.rows)))

    @contextmanager
    def _layer_weights(self, layer: int, choices: Choices) -> Iterator[None]:
        """Within, a layer has its weights, for a run without a graph that keeps what its routers choose."""
        parts = self._layers[layer]
        uses = [Use("forward", unit.name, layer) for unit in parts.units]
        weights = parts.tensors([self._take(use) for use in uses])
        with self._computing("forward", parts.units[0]), parts.forward(weights, choices):
            yield
        for use in uses:
            self._release(use)

    def layer_backward(self, call: LayerCall, grad_out: torch.Tensor) -> torch.Tensor:
        parts = self._layers[call.layer]
        uses = [Use("backward", unit.name, call.layer) for unit in parts.units]
        hidden = self._stashed(call.layer, grad_out)
        weights = parts.tensors([self._take(use) for use in uses])
        leaves = [[w.detach().requires_grad_() for w in own] for own in weights]
        totals = [self._gradients.open(unit) for unit in parts.units]
        assert call.rng is not None

        def chunk_backward(rows: slice) -> torch.Tensor:
            part = hidden[rows].detach().requires_grad_()
            out = parts.recompute(lambda: call.run(part, rows))
            wanted = [part, *chain(*leaves)]
            shares = parts.router_shares(rows)
            grad_outputs = [grad_out[rows], *map(torch.ones_like, shares)]
            grad_part, *grads = torch.autograd.grad([out, *shares], wanted, grad_outputs, allow_unused=True)
            for total, own in zip(totals, leaves, strict=True):
                total.add(grads[: len(own)])
                del grads[: len(own)]
            return grad_part

        with (
            self._computing("backward", parts.units[0]),
            torch.enable_grad(),
            parts.recomputing(leaves, call.choices),
            self._device.replayed_rng(call.rng),
        ):
            grad_in = _joined(hidden, ((rows, chunk_backward(rows)) for rows in self._chunks(call.rows)))
        for use in uses:
            self._release(use)
        if not self._stash.on_device:
            self._release(Use("activation", activation_unit(call.layer), call.layer))
        for unit in parts.units:
            self._gradients.close(unit)
        for unit in [] if parts.experts is None else parts.experts.idle:
            self._gradients.absent(unit)
        return grad_in

    def embedding_forward(self, ids: torch.Tensor) -> torch.Tensor:
        binding, use = self._embedding_binding, Use("embed", self._units.embed.name)
        weights = binding.tensors(self._take(use))
        with self._computing("forward", binding.unit), binding.bound(weights):
            out = self._embedding_rows(ids)
        self._release(use)
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
        flat = self._take(Use("activation", activation_unit(layer), layer))
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
            layer.forward = self._layer_shim(index, layer)

    def _layer_shim(self, index: int, layer: Any) -> Any:
        forward = layer.forward

        def shim(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._has_cache:  # a few tokens of a few rows, all at once; too many lengths to compile
                with self._layer_weights(index, Choices()):
                    output: torch.Tensor = type(layer).forward(layer, *args, **kwargs)
                return output
            call = LayerCall(index, forward, args, kwargs)
            hidden, call.hidden = call.hidden, None
            if not torch.is_grad_enabled():
                return self._layer_output(call, hidden)
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
