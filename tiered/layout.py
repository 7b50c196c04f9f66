"""What the state of a model is made of: units, planes and pages. Pure arithmetic, no I/O.

A unit packs its tensors into one flat index space of elements; each plane of the unit is an array over that
space. The store cuts a plane into pages of one size (docs/design.md section 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstream.io.errors import InvariantError

#: Tensors start at multiples of this many elements: 256 bytes in bf16, what GPU kernels and vector loads
#: want.
TENSOR_ALIGN_ELEMENTS = 128
#: Units end at multiples of this many elements, so that a 2-byte plane is whole 4096-byte blocks.
UNIT_ALIGN_ELEMENTS = 2048
#: Page sizes are multiples of this many bytes: the block of direct I/O and of virtual memory.
PAGE_ALIGN_BYTES = 4096

#: In place of the index of a group: no optimizer settings apply, for the tensor is not trained.
FROZEN = -1

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "uint16": 2, "float32": 4, "uint8": 1}


class Page(NamedTuple):
    """Name of one page: page `index` of plane `plane` of unit `unit`."""

    unit: str
    plane: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


@dataclass(frozen=True)
class TensorSpec:
    """One tensor in a unit.

    Attributes:
        offset: in elements.
        group: which of the run's optimizer settings apply to it, or `FROZEN`.
        part: the parameter `name` is a stack, and this is the element of this index along its first
            dimension, which `shape` does not have; None: it is the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    part: int | None = None

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def parts(self) -> tuple[TensorSpec, ...]:
        """The elements of a stack along its first dimension, where they are."""
        count, *shape = self.shape
        numel = prod(shape)
        return tuple(
            TensorSpec(self.name, tuple(shape), self.offset + part * numel, self.group, part)
            for part in range(count)
        )


@dataclass(frozen=True)
class Unit:
    """Tensors that are streamed as one: all of them are trained, or none.

    `dtype` is that of the weight plane; `numel` includes padding.
    """

    name: str
    dtype: str
    tensors: tuple[TensorSpec, ...]
    numel: int

    @cached_property
    def trained(self) -> bool:
        """Else it has a weight plane alone, which never changes."""
        return any(tensor.group != FROZEN for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Elements without padding."""
        return sum([prod(tensor.shape) for tensor in self.tensors])

    def group_runs(self) -> list[tuple[int, int, int]]:
        """Contiguous element ranges `(start, end, group)` that cover `[0, numel)`.

        Padding joins the run before it.
        """
        runs: list[tuple[int, int, int]] = []
        for tensor in self.tensors:
            if runs and runs[-1][2] == tensor.group:
                runs[-1] = (runs[-1][0], tensor.end, tensor.group)
            else:
                if runs:
                    runs[-1] = (runs[-1][0], tensor.offset, runs[-1][2])
                runs.append((0 if not runs else tensor.offset, tensor.end, tensor.group))
        if runs:
            runs[-1] = (runs[-1][0], self.numel, runs[-1][2])
        return runs


def pack_unit(
    name: str, dtype: str, tensors: Iterable[tuple[str, Sequence[int], int]], part: int | None = None
) -> Unit:
    """Pack `(name, shape, group)` tensors into a unit, sorted by group: each is one contiguous run.

    Args:
        part: of all of them; see `TensorSpec`.
    """
    specs: list[TensorSpec] = []
    end = 0
    for tensor_name, shape, group in sorted(tensors, key=lambda item: item[2]):
        spec = TensorSpec(tensor_name, tuple(shape), end, group, part)
        specs.append(spec)
        end = round_up(spec.end, TENSOR_ALIGN_ELEMENTS)
    return Unit(name, dtype, tuple(specs), round_up(end, UNIT_ALIGN_ELEMENTS))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class PlaneSpec(NamedTuple):
    """A flat array of `numel` elements. A tuple, for plans make a hundred thousand.

    `durable`: it is part of every checkpoint; else it lives within a step (grad, activation).
    """

    unit: str
    plane: str
    dtype: str
    numel: int
    durable: bool
    tensors: tuple[TensorSpec, ...] = ()

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


#: (plane, dtype, elements, durable) -> planes like that.
Kinds: TypeAlias = Mapping[tuple[str, str, int, bool], int]


def kinds_of(planes: Iterable[PlaneSpec]) -> Kinds:
    """Thousands of experts have a handful."""
    return Counter(map(attrgetter("plane", "dtype", "numel", "durable"), planes))


@dataclass(frozen=True)
class Layout:
    """All planes of a run and the page size that cuts them.

    Attributes:
        counted: `kinds`, from who makes many layouts of the same thousands of planes; None: not counted yet.
    """

    page_bytes: int
    planes: Mapping[tuple[str, str], PlaneSpec] = field(repr=False)
    counted: Kinds | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.page_bytes % PAGE_ALIGN_BYTES:
            raise InvariantError(
                f"page_bytes={self.page_bytes} is not a positive multiple of {PAGE_ALIGN_BYTES}"
            )

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for unit, plane in self.planes:
            names.setdefault(unit, []).append(plane)
        return names

    def planes_of(self, unit: str) -> list[str]:
        """Names of the unit's planes."""
        return self._names.get(unit, [])

    def spec(self, unit: str, plane: str) -> PlaneSpec:
        return self.planes[unit, plane]

    def page_count(self, unit: str, plane: str) -> int:
        return -(-self.planes[unit, plane].nbytes // self.page_bytes)

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.planes.values()) if self.counted is None else self.counted

    @cached_property
    def sizes(self) -> Mapping[tuple[int, bool], int]:
        """(bytes, durable) -> planes like that."""
        sizes = Counter[tuple[int, bool]]()
        for (_, dtype, numel, durable), count in self.kinds.items():
            sizes[numel * ITEM_BYTES[dtype], durable] += count
        return sizes

    @cached_property
    def page_total(self) -> int:
        """Pages of all planes."""
        return sum(count * -(-nbytes // self.page_bytes) for (nbytes, _), count in self.sizes.items())

    def page_nbytes(self, page: Page) -> int:
        """Bytes of the page in its frame and its chunk file: `page_bytes`, or all of a plane that fits."""
        nbytes = self.planes[page.unit, page.plane].nbytes
        return self.page_bytes if nbytes > self.page_bytes else nbytes

    def page_span(self, page: Page) -> tuple[int, int]:
        """Elements `[start, end)` of the plane that the page holds (without padding)."""
        spec = self.planes[page.unit, page.plane]
        per_page = self.page_bytes // spec.item_bytes
        return page.index * per_page, min((page.index + 1) * per_page, spec.numel)

    def pages(self, unit: str, plane: str) -> list[Page]:
        return [Page(unit, plane, index) for index in range(self.page_count(unit, plane))]

    def pages_over(self, unit: str, plane: str, start: int, end: int) -> list[Page]:
        """Pages that hold elements `[start, end)` of a plane, in order."""
        per_page = self.page_bytes // self.planes[unit, plane].item_bytes
        return [Page(unit, plane, index) for index in range(start // per_page, -(-end // per_page))]

    def nbytes(self, *, durable: bool) -> int:
        """Bytes of all pages of durable (or of step-local) planes, padding included."""
        return self._page_nbytes[durable]

    @cached_property
    def _page_nbytes(self) -> Mapping[bool, int]:
        page, found = self.page_bytes, {True: 0, False: 0}
        for (nbytes, durable), count in self.sizes.items():
            found[durable] += count * (nbytes if nbytes <= page else round_up(nbytes, page))
        return found

    def range_bytes(self, unit: str, plane: str, start: int, values: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of an array that holds elements `[start, start + len(values))` of a plane.

        Args:
            unit: name of the unit.
            plane: name of the plane.
            start: first element.
            values: flat array of the plane's dtype; bfloat16 also as uint16 bit patterns.

        Raises:
            InvariantError: unknown plane, wrong dtype, not flat, or out of range.
        """
        spec = self.planes.get((unit, plane))
        if spec is None:
            raise InvariantError(f"plane {unit}/{plane} is not in the layout")
        fits = values.dtype.name == spec.dtype or (spec.dtype == "bfloat16" and values.dtype == np.uint16)
        if not (fits and values.dtype.isnative and values.ndim == 1 and values.flags.c_contiguous):
            raise InvariantError(
                f"plane {unit}/{plane} takes a flat {spec.dtype} array, not {values.dtype} of {values.shape}"
            )
        if not 0 <= start <= start + values.size <= spec.numel:
            raise InvariantError(
                f"elements [{start}, {start + values.size}) are not in plane {unit}/{plane} of {spec.numel}"
            )
        return values.view(np.uint8)

    def pieces(self, unit: str, plane: str, start: int, count: int) -> Iterator[tuple[Page, slice, slice]]:
        """Cut elements `[start, start + count)` of a plane at pages.

        Yields the page, the bytes in the page, and the bytes in the range.
        """
        item_bytes = self.planes[unit, plane].item_bytes
        for page in self.pages_over(unit, plane, start, start + count) if count else ():
            first, last = self.page_span(page)
            low, high = max(first, start), min(last, start + count)
            inside = slice((low - first) * item_bytes, (high - first) * item_bytes)
            yield page, inside, slice((low - start) * item_bytes, (high - start) * item_bytes)
