"""The size of a page: large, for each costs some time, but not so large that the DRAM tier holds few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tierstream.engine.byte_size import ByteSize
from tierstream.io.errors import BudgetError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.layout import ITEM_BYTES, PAGE_ALIGN_BYTES, Layout, round_up

if TYPE_CHECKING:
    from tierstream.engine.model.units import ModelUnits
    from tierstream.engine.plan import Plan, TiersConfig

#: Share of the memory that is free at start which an automatic DRAM budget takes.
AUTO_DRAM_SHARE = 0.7
#: A page is at most this large. A drive and a link gain nothing beyond 16 MiB, but every page costs some
#: 0.2 ms of Python, in threads that share one interpreter lock with the one that launches the layers.
_PAGE_MAX_BYTES = 64 << 20
#: And a DRAM budget smaller than the state holds at least this many pages, so that eviction has a choice ...
_FRAMES_WANTED = 768
#: ... but this many, where pages would else be smaller than one that costs little.
_FRAMES_LEAST = 48
#: Below this a page costs more time in Python than on its way to a drive; one of 1 MiB costs little.
_PAGE_SMALL_BYTES, _PAGE_GOOD_BYTES = 64 << 10, 1 << 20
#: Share of the state's bytes that may be lost in frames which are not full, where pages can be smaller.
_WASTE_MAX = 1 / 8
#: More pages than that are refused: the books of each take about a kilobyte beside the tiers, and some
#: microseconds in every step.
PAGES_MAX = 1 << 20


def paged(units: ModelUnits, layout: Layout, tiers: TiersConfig, available_bytes: int) -> Layout:
    """The planes of a layout, in pages of the size that is best.

    Raises:
        BudgetError: so small a DRAM tier, or `tiers.page`, makes more pages than a run can keep
            account of.
    """
    pieces = [unit for experts in units.experts for unit in experts] or units.layers
    piece_nbytes = max(unit.numel * ITEM_BYTES[unit.dtype] for unit in pieces)
    held_bytes = layout.nbytes(durable=True) + layout.nbytes(durable=False)

    def in_pages(tiers: TiersConfig) -> Layout:
        chosen = choose_page_bytes(piece_nbytes, held_bytes, tiers, available_bytes)
        if tiers.page is None:
            chosen = fit_small_planes(chosen, layout.sizes)
        return Layout(chosen, layout.planes, layout.counted)

    found = in_pages(tiers)
    if found.page_total <= PAGES_MAX:
        return found
    many = (
        f"state, gradients and activations of {format_bytes(held_bytes)} lie in {found.page_total:,} pages "
        f"of {format_bytes(found.page_bytes)}, more than the {PAGES_MAX:,} that a run keeps account of"
    )
    if tiers.page is not None:
        page = int(tiers.page)
        while page < held_bytes and in_pages(replace(tiers, page=ByteSize(page))).page_total > PAGES_MAX:
            page *= 2
        remedy = f"raise it to {ByteSize(page)}, or leave it out"
        raise BudgetError(
            f"tiers.page is {format_bytes(tiers.page)}: {many}; {remedy}",
            need_bytes=page, key="tiers.page",
        )  # fmt: skip
    wanted = dram = int(AUTO_DRAM_SHARE * available_bytes if tiers.dram is None else tiers.dram)
    while wanted < held_bytes:
        wanted = max(1, 2 * wanted)
        if in_pages(replace(tiers, dram=ByteSize(wanted))).page_total <= PAGES_MAX:
            raise BudgetError(
                f"the DRAM tier has {format_bytes(dram)}: {many}; raise tiers.dram to {ByteSize(wanted)}",
                need_bytes=wanted, limit_bytes=dram, key="tiers.dram",
            )  # fmt: skip
    raise BudgetError(f"{many}; lower train.rows_per_step or data.seq_len")


def choose_page_bytes(piece_nbytes: int, held_bytes: int, config: TiersConfig, available_bytes: int) -> int:
    """Page size: a whole fraction of the weight plane of a layer, or of an expert where there are some: the
    last page of a plane then wastes next to nothing.
    """
    if config.page is not None:
        return int(config.page)
    largest = _PAGE_MAX_BYTES
    dram = int(AUTO_DRAM_SHARE * available_bytes if config.dram is None else config.dram)
    if dram < held_bytes and config.nvme_dirs is not None:  # without drives DRAM must hold all of it
        largest = min(largest, max(dram // _FRAMES_WANTED, min(dram // _FRAMES_LEAST, _PAGE_GOOD_BYTES)))
    pieces = max(1, -(-piece_nbytes // max(largest, PAGE_ALIGN_BYTES)))
    return round_up(-(-piece_nbytes // pieces), PAGE_ALIGN_BYTES)


def fit_small_planes(page_bytes: int, sizes: Mapping[tuple[int, bool], int]) -> int:
    """A smaller page where many planes are much smaller than that one, and each takes a whole frame: what is
    trained of layers frozen but for few vectors. Never one that costs more than its bytes. `sizes`: Layout's.
    """
    most = _WASTE_MAX * sum(count * nbytes for (nbytes, _), count in sizes.items())
    while page_bytes > _PAGE_GOOD_BYTES and sum(k * (-n % page_bytes) for (n, _), k in sizes.items()) > most:
        page_bytes = round_up(-(-page_bytes // 2), PAGE_ALIGN_BYTES)
    return page_bytes


def page_warning(config: TiersConfig, plan: Plan) -> str | None:
    """What to say where a small DRAM budget over drives made the pages small."""
    if config.page is not None or config.nvme_dirs is None or plan.dram_bytes >= plan.durable_bytes:
        return None
    if plan.dram_bytes // _FRAMES_LEAST >= _PAGE_SMALL_BYTES:
        return None
    enough = min(_FRAMES_LEAST * _PAGE_GOOD_BYTES, plan.durable_bytes)
    return (
        f"tiers.dram holds {format_bytes(plan.dram_bytes)} of {format_bytes(plan.durable_bytes)} of state, "
        f"so pages are {format_bytes(plan.page_bytes)}, each as costly for the processor as a large one; "
        f"with {format_bytes(enough)} they are up to {format_bytes(_PAGE_GOOD_BYTES)}"
    )
