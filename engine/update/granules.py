"""Cuts the update of a unit into granules: what is updated under one lease, by one call after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tierstream.tiered.layout import ITEM_BYTES, PAGE_ALIGN_BYTES, Layout, Page, Unit, round_up
from tierstream.tiered.store import Intent

#: Granules on their way through the GPU at once: one up, one down. Weights wait behind their copies.
DEVICE_GRANULES = 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kernel.

    Attributes:
        group: of these elements (`TensorSpec.group`).
        pieces: plane -> (index into the granule's pages, first and last byte there).
    """

    group: int
    pieces: Mapping[str, tuple[int, int, int]]

    def planes(self, pages: Sequence[Any], dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """Plane -> its elements, as views into the bytes of the granule's pages, wherever these are.

        Args:
            pages: flat uint8, arrays or tensors. dtypes: plane -> dtype of the same library.
        """
        return {
            plane: pages[index][first:last].view(dtypes[plane])
            for plane, (index, first, last) in self.pieces.items()
        }


@dataclass(frozen=True, slots=True)
class Granule:
    """One page of a unit's weight plane and the pages of its other planes over the same elements. No page is
    in two granules.
    """

    unit: str
    index: int
    """Of the weight page, which is that of the granule in its unit."""
    uses: tuple[tuple[Page, Intent], ...]
    calls: tuple[Call, ...]
    gradient: frozenset[Page]
    """Pages that must be stored before it can be updated."""

    def without_gradient(self) -> Granule:
        """The same elements where the gradient is zero, which no page holds."""
        return replace(
            self,
            uses=tuple(use for use in self.uses if use[0] not in self.gradient),
            calls=tuple(
                Call(call.group, {plane: piece for plane, piece in call.pieces.items() if plane != "grad"})
                for call in self.calls
            ),
            gradient=frozenset(),
        )


def granules(layout: Layout, unit: Unit) -> list[Granule]:
    """The unit's granules in the order of its elements; calls cross no page and no border of a group."""
    planes = sorted(  # the gradient last: without it, the others keep their places
        layout.planes_of(unit.name), key="grad".__eq__
    )
    per_page = {plane: layout.page_bytes // layout.spec(unit.name, plane).item_bytes for plane in planes}
    result = []
    for weight_page in layout.pages(unit.name, "weight"):
        start, end = layout.page_span(weight_page)
        uses: list[tuple[Page, Intent]] = []
        for plane in planes:
            intent = Intent.CONSUME if plane == "grad" else Intent.UPDATE
            uses += [(page, intent) for page in layout.pages_over(unit.name, plane, start, end)]
        cuts = {start, end}
        cuts.update(k for n in per_page.values() for k in range(-(-start // n) * n, end, n))
        cuts.update(first for first, _, _ in unit.group_runs() if start < first < end)
        edges = pairwise(sorted(cuts))
        calls = [_call(layout, unit, uses, planes, first, last) for first, last in edges]
        gradient = frozenset(page for page, intent in uses if intent is Intent.CONSUME)
        result.append(Granule(unit.name, weight_page.index, tuple(uses), tuple(calls), gradient))
    return result


class UnitGranules:
    """Granules of units, in forward order; none of what is frozen.

    Attributes:
        own: unit -> its granules. idle: the same where the gradient is zero.
    """

    def __init__(self, layout: Layout, units: Iterable[Unit]) -> None:
        self.own = {unit.name: granules(layout, unit) if unit.trained else [] for unit in units}
        self.idle = {name: [each.without_gradient() for each in own] for name, own in self.own.items()}

    def uses(self, unit: str, *, idle: bool) -> list[tuple[Page, Intent]]:
        """Page uses of the unit's update, in order; none where its state is on the device.

        Args:
            idle: its gradient is zero.
        """
        own = (self.idle if idle else self.own).get(unit, ())
        return [use for granule in own for use in granule.uses]


def _call(
    layout: Layout,
    unit: Unit,
    uses: Sequence[tuple[Page, Intent]],
    planes: Sequence[str],
    first: int,
    last: int,
) -> Call:
    """The call for elements `[first, last)`."""
    index_of = {page: i for i, (page, _) in enumerate(uses)}
    group = next(own for begin, stop, own in unit.group_runs() if begin <= first < stop)
    pieces = {}
    for plane in planes:
        item = ITEM_BYTES[layout.spec(unit.name, plane).dtype]
        per_page = layout.page_bytes // item
        page = Page(unit.name, plane, first // per_page)
        offset = (first - page.index * per_page) * item
        pieces[plane] = (index_of[page], offset, offset + (last - first) * item)
    return Call(group, pieces)


def device_nbytes(layout: Layout, granule: Granule) -> int:
    """Bytes that the granule's pages take in a device buffer, each one aligned."""
    return sum(round_up(layout.page_nbytes(page), PAGE_ALIGN_BYTES) for page, _ in granule.uses)


def device_granule_nbytes(layout: Layout, units: Iterable[Unit]) -> int:
    """Bytes of a device buffer that holds the pages of any granule."""
    return max(device_nbytes(layout, granule) for unit in units for granule in granules(layout, unit))
