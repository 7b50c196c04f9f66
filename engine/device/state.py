"""The state of units that stay on the device: loaded from the store, updated in place, and given back to it
when the store must be up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tierstream.engine.device.device import Device
from tierstream.engine.device.kernels import TORCH_DTYPES
from tierstream.engine.trace.trace import Trace, Track
from tierstream.engine.update.optimizer import Group, OptimizerConfig, Verdict, adamw_settings
from tierstream.tiered.layout import Layout, Page, Unit
from tierstream.tiered.store import Intent, Store


class DeviceState:
    """Durable planes of some units, on the device.

    Everything is enqueued on the compute lane, in the order of the calls; `load` and `save` wait for it.

    Args:
        weights: of a unit, where they are computed with, flat bytes; they are part of the state.
        groups: by the index that tensors have.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        layout: Layout,
        units: Iterable[Unit],
        weights: Callable[[str], torch.Tensor],
        config: OptimizerConfig,
        groups: Sequence[Group],
        trace: Trace,
    ) -> None:
        self._device, self._store, self._layout = device, store, layout
        self._config, self._groups, self._trace = config, groups, trace
        self._units = {unit.name: unit for unit in units}
        self._planes: dict[tuple[str, str], torch.Tensor] = {}
        for spec in layout.planes.values():
            if spec.unit in self._units and spec.durable:
                buffer = weights(spec.unit) if spec.plane == "weight" else device.buffer(spec.nbytes)
                self._planes[spec.unit, spec.plane] = buffer[: spec.nbytes]
        self._loaded = False
        self._changed = False

    def load(self) -> None:
        """Bring everything from the store, unless it is here."""
        if self._loaded:
            return
        lane = self._device.compute
        for page, part in self._pages():
            with self._store.acquire([(page, Intent.READ)], scheduled=False) as lease:
                with lane.active():
                    lane.copy_in(part, lease.arrays[0][: part.numel()])
                lane.record().synchronize()
        self._loaded, self._changed = True, False

    def update(self, unit: Unit, gradient: torch.Tensor, verdict: Verdict) -> None:
        """AdamW in place. `gradient`: fp32, flat, all of the unit."""
        planes = {
            plane: buffer.view(TORCH_DTYPES[self._layout.spec(name, plane).dtype])
            for (name, plane), buffer in self._planes.items()
            if name == unit.name
        }
        if unit.dtype == self._config.grad_dtype == "bfloat16":  # the bits of one that waited in the store
            gradient = self._rounded(gradient)
        planes["grad"] = gradient
        with self._trace.on_lane(Track.COMPUTE, self._device.compute, "adamw", unit.name):
            for start, end, group in unit.group_runs():
                settings = adamw_settings(self._config, verdict, self._groups[group])
                self._device.kernels.adamw({p: values[start:end] for p, values in planes.items()}, settings)
        self._changed = True

    def save(self) -> None:
        """Bring the store up to date."""
        if not self._changed:
            return
        lane = self._device.compute
        for page, part in self._pages(trained=True):
            with self._store.acquire([(page, Intent.OVERWRITE)], scheduled=False) as lease:
                with lane.active():
                    lane.copy_out(lease.arrays[0][: part.numel()], part)
                lane.record().synchronize()
        self._changed = False

    def invalidate(self) -> None:
        """The planes in the store are others than those here."""
        self._loaded = False

    def _rounded(self, gradient: torch.Tensor) -> torch.Tensor:
        """To bf16 and back, in place: its bits fit, and the kernel takes fp32 as well."""
        for part in gradient.split(self._layout.page_bytes // 2):
            part.copy_(part.to(torch.bfloat16))
        return gradient

    def _pages(self, *, trained: bool = False) -> Iterable[tuple[Page, torch.Tensor]]:
        """With the place of each on the device. `trained`: only of units that are."""
        for (unit, plane), buffer in self._planes.items():
            if trained and not self._units[unit].trained:
                continue
            for page in self._layout.pages(unit, plane):
                start = page.index * self._layout.page_bytes
                yield page, buffer[start : start + self._layout.page_bytes]
