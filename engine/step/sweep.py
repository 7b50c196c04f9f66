"""One sweep: all rows of a step forward through the layers, the loss, and back, while weights stream through
the device.

The model's own `forward` runs, so every family gets the arguments its layers want. What has weights is taken
over: layers (`streamed_layers`), modules that look rows up (`tables`), the final norm and the output matrix
(`head`); other modules around the layers get their weights for the whole sweep (`around`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tierstream.engine.device.device import Device
from tierstream.engine.device.upload import StepPlan, Uploader
from tierstream.engine.model.anatomy import without_router_logits
from tierstream.engine.model.binding import Binding
from tierstream.engine.model.carve import experts_of
from tierstream.engine.model.decoder import decoder_of, layers_of
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.moe.cache import ExpertCache
from tierstream.engine.moe.experts import StreamedExperts
from tierstream.engine.moe.router_loss import RouterLosses, layer_routers
from tierstream.engine.step.activations import ActivationStash
from tierstream.engine.step.around import Around
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.gradients import GradientBuffers
from tierstream.engine.step.head import Head, final_norm, model_logits
from tierstream.engine.step.layer_parts import LayerParts
from tierstream.engine.step.script import StepScript
from tierstream.engine.step.streamed_layers import StreamedLayers
from tierstream.engine.step.streams import Streams, head_uses
from tierstream.engine.step.tables import StreamedTable
from tierstream.engine.trace.trace import Trace


class Sweep:
    """Streams a model's layers through the device.

    Args:
        model: built by transformers, parameters on `meta`, buffers on the device.
        cache: where weights of experts come from; None: there are none.
        rows_per_chunk: rows that run through a layer at once.
        loss_chunk_tokens, z_loss_coef: see `Head`.
        router_losses: added to the cross-entropy.
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
        script: StepScript,
        *,
        rows_per_chunk: int,
        loss_chunk_tokens: int,
        z_loss_coef: float,
        router_losses: RouterLosses,
    ) -> None:
        self._units, self._uploader, self._gradients, self._stash = units, uploader, gradients, stash
        self._router_losses, self._decoder = router_losses, decoder_of(model)
        self._options = without_router_logits(model.config)
        names = inspect.signature(type(self._decoder).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5
        self._head_uses = head_uses(units)
        self._streams = Streams(device, uploader, gradients, trace, script.uses)
        anatomy = units.anatomy
        norm, output = final_norm(model, anatomy), model.get_output_embeddings()
        self._head_binding = Binding(model, [norm, output], units.head, *units.beside_head)
        self._head = Head(
            norm, model_logits(model, anatomy), self._head_binding, loss_chunk_tokens, z_loss_coef
        )
        norm.forward = lambda hidden: hidden  # computed by the head, in chunks, together with the loss
        tables = [model.get_submodule(name) for name in anatomy.tables]
        self._tables = [
            StreamedTable(table, Binding(model, [table], unit), self._streams)
            for table, unit in zip(tables, (units.embed, *units.tables), strict=True)
        ]
        self._around = Around(model, units.around, self._streams)
        self._parts = self._part_layers(model, cache)
        self._layers = StreamedLayers(
            self._parts, self._streams, stash, rows_per_chunk=rows_per_chunk, rows_dim=anatomy.rows_dim,
            backward_from=units.backward_from, tuple_of=anatomy.tuple_of,
        )  # fmt: skip

    def _part_layers(self, model: Any, cache: ExpertCache | None) -> list[LayerParts]:
        units, parts = self._units, []
        before: StreamedExperts | None = None
        for index, layer in enumerate(layers_of(model)):
            experts = None
            if units.experts[index]:
                module = experts_of(layer)
                assert module is not None
                assert cache is not None
                experts = StreamedExperts(
                    module, units.experts[index], self._streams.device, cache, self._gradients, before=before,
                    goes_back=index > units.backward_from,
                )  # fmt: skip
                before = experts
            routers = layer_routers(model, layer, self._router_losses)
            own = [units.layers[index], *units.beside[index]]
            parts.append(LayerParts(model, layer, own, experts, routers))
        return parts

    def run(self, plan: StepPlan, batch: Batch, routed: Callable[[list[str]], None]) -> torch.Tensor:
        """Forward, loss and backward of one step, enqueued; the gradients are on their way to their planes.

        Args:
            routed: told of the experts without tokens, if there are experts, once all layers have run.

        Returns:
            Means over the step's trained tokens, fp64 [2] on the device: see `Head.loss_and_gradient`.
        """
        self._stash.begin_step()
        hidden = self._hidden_states(plan, batch)
        layers = [parts.experts for parts in self._parts if parts.experts is not None]
        if layers:
            routed([unit.name for experts in layers for unit in experts.idle])
        sums = list[torch.Tensor | None]()
        for unit in (self._units.head, *self._units.beside_head):
            sums += self._gradients.open(unit).views() if unit.trained else [None] * len(unit.tensors)
        with torch.no_grad(), self._head_weights() as weights:
            losses, grad = self._head.loss_and_gradient(
                weights, hidden.detach(), batch.labels, batch.trained_tokens, sums,
                of_hidden=hidden.requires_grad,
            )  # fmt: skip
        for unit in self._units.end:
            if unit.trained:
                self._gradients.close(unit)
        if grad is not None:
            torch.autograd.backward(hidden, grad)
        self._around.finish()
        self._uploader.finish()
        return losses

    def evaluate(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """A pass forward over `batch`, enqueued; under `no_grad`.

        Returns:
            The cross-entropy summed over the trained tokens, 0-dim fp64 on the device.
        """
        hidden = self._hidden_states(plan, batch)
        with self._head_weights() as weights:
            loss = self._head.cross_entropy(weights, hidden, batch.labels)
        self._uploader.finish()
        return loss

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
        self._layers.generating = True
        with self._outside_of_layers():
            hidden = self._decoder(**inputs, **{self._cache_name: cache}, use_cache=True, **self._options)
        self._layers.generating = False
        with self._head_weights() as weights:
            logits = self._head.logits(weights, hidden.last_hidden_state[:, -1])
        self._uploader.finish()
        return logits

    def _hidden_states(self, plan: StepPlan, batch: Batch) -> torch.Tensor:
        """What the decoder gives, without its final norm; uploads begin."""
        self._router_losses.begin_step(batch.padding)
        self._uploader.begin(plan)
        with self._outside_of_layers():
            output = self._decoder(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **self._options
            )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @contextmanager
    def _outside_of_layers(self) -> Iterator[None]:
        """Within, modules around the layers have their weights; tables what stands in for theirs."""
        with ExitStack() as parts:
            for table in self._tables:
                parts.enter_context(table.held())
            parts.enter_context(self._around.bound())
            yield

    @contextmanager
    def _head_weights(self) -> Iterator[list[torch.Tensor]]:
        """Within, those of the head, the last uploads of a pass forward."""
        weights = self._head_binding.tensors(*(self._streams.take(use) for use in self._head_uses))
        with self._streams.computing("head", self._units.head):
            yield weights
        for use in self._head_uses:
            self._streams.release(use)

    def expert_tokens(self) -> list[dict[int, int]]:
        """Of each layer with experts, in the latest step: expert -> tokens, of those that had any."""
        return [parts.experts.tokens for parts in self._parts if parts.experts is not None]
