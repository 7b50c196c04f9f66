"""Modules around the layers (projections, norms): on the device for the whole sweep.

They run in the model's own forward, for all rows at once, and are leaves of its graph; so each parameter has
one gradient in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from tierstream.engine.model.binding import Binding
from tierstream.engine.step.streams import Streams, Use
from tierstream.tiered.layout import Unit


class Around:
    """Their units: bound while the decoder runs, kept until backward has ended."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], streams: Streams) -> None:
        self._bindings = [Binding(model, [model], unit) for unit in units]
        self._streams = streams
        self._leaves: list[list[torch.Tensor]] = []

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within, the model has these weights; with gradients enabled, `finish` must follow its backward."""
        flats = [self._streams.take(use) for use in self._uses]
        pairs = list(zip(self._bindings, flats, strict=True))
        records = torch.is_grad_enabled()
        leaves = [
            [w.detach().requires_grad_(records and own.unit.trained) for w in own.tensors(flat)]
            for own, flat in pairs
        ]
        with ExitStack() as stack:
            for binding, own in zip(self._bindings, leaves, strict=True):
                stack.enter_context(binding.bound(own))
            yield
        if records:
            self._leaves = leaves
        else:
            self._release()

    def finish(self) -> None:
        """Send the gradients away."""
        for binding, leaves in zip(self._bindings, self._leaves, strict=True):
            if binding.unit.trained:
                self._streams.gradients.open(binding.unit).add([leaf.grad for leaf in leaves])
                self._streams.gradients.close(binding.unit)
        self._leaves = []
        self._release()

    @property
    def _uses(self) -> list[Use]:
        return [Use("around", binding.unit.name) for binding in self._bindings]

    def _release(self) -> None:
        for use in self._uses:
            self._streams.release(use)
