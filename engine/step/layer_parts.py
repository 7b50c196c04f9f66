"""One layer of a streamed model: where its units sit in its modules, and what its recompute may leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tierstream.engine.model.binding import Binding
from tierstream.engine.model.carve import experts_of
from tierstream.engine.moe.experts import StreamedExperts
from tierstream.engine.moe.router_loss import LayerRouters
from tierstream.engine.moe.routing import Choices
from tierstream.engine.step.recompute import last_projection, only_summed, without_output
from tierstream.tiered.layout import Unit


class LayerParts:
    """A layer's units: its own, those of another type beside it, and its experts.

    Args:
        units: those that all tokens need.
        experts: of the module that holds experts; its forward is replaced. None: a dense layer, or one whose
            experts are part of its unit.
        routers: those whose losses are wanted.
    """

    def __init__(
        self,
        model: Any,
        layer: nn.Module,
        units: Sequence[Unit],
        experts: StreamedExperts | None,
        routers: LayerRouters | None,
    ) -> None:
        self.layer, self.units, self.experts = layer, units, experts
        self._routers = routers
        self._compiled = getattr(layer, "compiled_whole", False)  # see kernels.compile_layers
        # torch cannot compile all that routers do in a mode that keeps their choices.
        self._chooses = experts_of(layer) is not None and not self._compiled
        self._bindings = [Binding(model, [layer], unit) for unit in units]
        self._unneeded: nn.Linear | None = None
        self._examined = False
        if experts is not None:
            experts.module.forward = experts.forward  # type: ignore[method-assign]

    def tensors(self, flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Views into the bytes of each unit: one list for each of `units`."""
        return [binding.tensors(flat) for binding, flat in zip(self._bindings, flats, strict=True)]

    @property
    def anchors(self) -> list[torch.Tensor]:
        """What must be differentiated as well, lest autograd passes over experts that are trained."""
        return [] if self.experts is None or not self.experts.trained else [self.experts.anchor]

    @contextlib.contextmanager
    def forward(self, weights: Sequence[Sequence[torch.Tensor]], choices: Choices) -> Iterator[None]:
        """Within, the layer runs all rows with these weights, and what its routers choose is kept."""
        with self._bound(weights), choices.recorded() if self._chooses else contextlib.nullcontext():
            yield
        if self._routers is not None:
            self._routers.add()

    @contextlib.contextmanager
    def recomputing(self, leaves: Sequence[Sequence[torch.Tensor]], choices: Choices) -> Iterator[None]:
        """Within, it runs them again, some at a time, and its routers choose what they did."""
        with self._bound(leaves), choices.replayed() if self._chooses else contextlib.nullcontext():
            yield

    def router_shares(self, rows: slice) -> list[torch.Tensor]:
        """What its routers, recomputed for `rows`, add to the loss; 0-dim each."""
        return [] if self._routers is None else self._routers.shares(rows)

    def recompute(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The layer's results with their graph; what no gradient needs is left out once it is known."""
        if self._compiled:
            return run()
        if self._examined:
            with without_output(self._unneeded):
                results = run()
            if self.experts is not None:
                self.experts.take_output()
            return results
        results, self._unneeded = last_projection(self.layer, run)
        if self.experts is not None:
            output = self.experts.take_output()
            ends = [result.grad_fn for result in results]
            self.experts.output_needed = not only_summed(ends, output.grad_fn)
        self._examined = True
        return results

    @contextlib.contextmanager
    def _bound(self, tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for binding, own in zip(self._bindings, tensors, strict=True):
                stack.enter_context(binding.bound(own))
            yield
