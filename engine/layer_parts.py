"""One layer of a streamed model: where its units sit in its modules, and what its recompute may leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tierstream.engine.binding import Binding
from tierstream.engine.experts import StreamedExperts
from tierstream.engine.recompute import last_projection, only_summed, without_output
from tierstream.engine.routing import Choices
from tierstream.tiered.layout import Unit


class LayerParts:
    """A layer's units: its own, those of another type beside it, and its experts.

    Args:
        units: those that all tokens need.
        experts: of the module that holds experts; its forward is replaced. None: a dense layer.
    """

    def __init__(
        self, model: Any, layer: nn.Module, units: Sequence[Unit], experts: StreamedExperts | None
    ) -> None:
        self.layer, self.units, self.experts = layer, units, experts
        self._bindings = [Binding(model, [layer], unit) for unit in units]
        self._unneeded: nn.Linear | None = None
        self._examined = False
        if experts is not None:
            experts.module.forward = experts.forward  # type: ignore[method-assign]

    def tensors(self, flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Views into the bytes of each unit: one list for each of `units`."""
        return [binding.tensors(flat) for binding, flat in zip(self._bindings, flats, strict=True)]

    @contextlib.contextmanager
    def bound(self, tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        """Within, the layer's parameters are these."""
        with contextlib.ExitStack() as stack:
            for binding, own in zip(self._bindings, tensors, strict=True):
                stack.enter_context(binding.bound(own))
            yield

    def choices_recorded(self, choices: Choices) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.experts is None else choices.recorded()

    def choices_replayed(self, choices: Choices) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.experts is None else choices.replayed()

    def recompute(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The layer's output with its graph; what no gradient needs is left out once it is known."""
        if getattr(self.layer, "compiled_whole", False):  # see kernels.compile_layers
            return run()
        if self._examined:
            with without_output(self._unneeded):
                return run()
        out, self._unneeded = last_projection(self.layer, run)
        if self.experts is not None:
            output, self.experts.last_output = self.experts.last_output, None
            assert output is not None
            self.experts.output_needed = not only_summed(out.grad_fn, output.grad_fn)
        self._examined = True
        return out
