"""Uses of device bytes in a sweep, in the order of uploads, and what makes them available."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from tierstream.engine.model.units import ModelUnits, activation_unit
from tierstream.engine.trace.trace import Trace, Track
from tierstream.tiered.layout import Unit

if TYPE_CHECKING:
    import torch

    from tierstream.engine.device.device import Device
    from tierstream.engine.device.upload import Uploader
    from tierstream.engine.step.gradients import GradientBuffers


class Use(NamedTuple):
    """One use of device bytes in a sweep.

    Attributes:
        kind: table, around, forward, head, activation or backward.
        unit: whose weights, or whose boundary.
        layer: None at the ends.
    """

    kind: str
    unit: str
    layer: int | None = None


def list_uses(units: ModelUnits, *, stashes: bool) -> list[Use]:
    """Those of a step; those of a pass forward, up to the head, come first. Layers that have no backward are
    used once, and their inputs are not kept.

    Args:
        stashes: the layers' inputs wait in the store.
    """

    def layer_uses(kind: str, index: int) -> list[Use]:
        own = (units.layers[index], *units.beside[index])
        return [Use(kind, unit.name, index) for unit in own]

    layers, backward = range(len(units.layers)), range(units.backward_from, len(units.layers))
    uses = [Use("table", unit.name) for unit in (units.embed, *units.tables)]
    uses += [Use("around", unit.name) for unit in units.around]
    uses += [use for index in layers for use in layer_uses("forward", index)]
    uses += head_uses(units)
    for index in reversed(backward):
        if stashes:
            uses.append(Use("activation", activation_unit(index), index))
        uses += layer_uses("backward", index)
    return uses


def head_uses(units: ModelUnits) -> list[Use]:
    return [Use("head", unit.name) for unit in (units.head, *units.beside_head)]


class Streams:
    """What the parts of a sweep share: weights that come, gradients that leave, and who tells of it."""

    def __init__(
        self, device: Device, uploader: Uploader, gradients: GradientBuffers, trace: Trace, uses: list[Use]
    ) -> None:
        self.device, self.gradients = device, gradients
        self._uploader, self._trace = uploader, trace
        self._index = {use: index for index, use in enumerate(uses)}

    def take(self, use: Use) -> torch.Tensor:
        """Its bytes, ready for the compute lane; see `Uploader.take`."""
        return self._uploader.take(self._index[use])

    def release(self, use: Use) -> None:
        """The compute lane has been given all that reads them."""
        self._uploader.release(self._index[use])

    def computing(self, what: str, unit: Unit) -> AbstractContextManager[None]:
        """The block enqueues the unit's computation; all that it needs was waited for before."""
        return self._trace.on_lane(Track.COMPUTE, self.device.compute, what, unit.name)
