"""Sizes of DRAM and pages: a refusal names what the user set; pages that a budget made small are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.models import tiny_model
from support.rig import Setup, rig, tiny_config
from support.runs import make_run

from tierstream.engine import page_size, plan_report
from tierstream.engine.bound import Rates
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.measure import machine
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import build_layout
from tierstream.engine.page_size import choose_page_bytes, fit_small_planes, page_warning, paged
from tierstream.engine.plan import Plan, TiersConfig, size_copies, size_dram, size_writeback
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import BudgetError
from tierstream.tiered.layout import PAGE_ALIGN_BYTES, Layout

PAGE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Layout]:
    """Of a small model in pages much larger than its planes."""
    with rig(Setup(config=tiny_config("qwen2"), page=PAGE_BYTES)) as run:
        return run.plan, run.layout


@pytest.mark.parametrize(
    ("dram", "page_bytes"),
    [
        (100 << 30, 64 << 20),  # all of the state: as large as pages become
        (12 << 30, 16 << 20),  # 768 of them
        (64 << 20, 1 << 20),  # fewer than 768, so that a page does not cost more than its bytes
        (12 << 20, 256 << 10),  # but 48 at least
    ],
)
def test_pages_of_a_budget(dram: int, page_bytes: int) -> None:
    tiers = TiersConfig(dram=ByteSize(dram), nvme_dirs=["/drive"])
    assert choose_page_bytes(1 << 30, 90 << 30, tiers, 4 << 40) == page_bytes
    # Without drives DRAM must hold everything: what is missing is told for the pages that it would have then.
    assert choose_page_bytes(1 << 30, 90 << 30, replace(tiers, nvme_dirs=None), 4 << 40) == 64 << 20


@pytest.mark.parametrize(
    ("dram", "page", "drives", "given", "at_once"),
    [
        (12 << 30, 15 << 20, 1, None, 64 << 20),
        (12 << 30, 15 << 20, 3, None, 192 << 20),
        (48 << 30, 60 << 20, 2, None, 480 << 20),  # 4 large pages a drive
        (256 << 20, 1 << 20, 2, None, 32 << 20),  # most of a small DRAM is for other pages
        (12 << 30, 15 << 20, 1, 1 << 30, 1 << 30),
    ],
)
def test_write_backs_at_once(dram: int, page: int, drives: int, given: int | None, at_once: int) -> None:
    """So few that pages which wait to be written keep few others out."""
    own = None if given is None else ByteSize(given)
    tiers = TiersConfig(nvme_dirs=[f"/drive{index}" for index in range(drives)], writeback=own)
    assert size_writeback(tiers, dram, page) == at_once


def test_pages_are_smaller_where_small_planes_would_each_take_one() -> None:
    """36 layers of 400 MB that are frozen but for their norms, which have five planes."""
    frozen, norms = {(400 << 20, True): 36}, {(16 << 10, True): 36 * 5}
    assert fit_small_planes(50 << 20, frozen) == 50 << 20
    assert fit_small_planes(50 << 20, frozen | norms) == 25 << 18
    assert fit_small_planes(50 << 20, norms) == 800 << 10


def test_more_pages_than_a_run_can_keep_account_of_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a remedy that works, and that half of would not do; a page that was set is named alone."""
    units = find_units(tiny_model())
    layout = build_layout(
        units, page_bytes=PAGE_ALIGN_BYTES, boundary_nbytes=None, master="split", grad_dtype="float32"
    )
    monkeypatch.setattr(page_size, "PAGES_MAX", 120)

    def pages(**tiers: str) -> int:
        given = {key: ByteSize(value) for key, value in tiers.items()}
        return paged(units, layout, TiersConfig(nvme_dirs=["/drive"], **given), 4 << 30).page_total

    said = r"^the DRAM tier has 97.66 KiB: .* pages of 4.00 KiB, more than the 120 "
    with pytest.raises(BudgetError, match=said) as caught:
        pages(dram="100kB")
    assert pages(dram=str(caught.value.need_bytes)) <= 120
    with pytest.raises(BudgetError):
        pages(dram=str(caught.value.need_bytes // 2))
    said = r"^tiers.page is 4.00 KiB: .* raise it to .*, or leave it out$"
    with pytest.raises(BudgetError, match=said) as caught:
        pages(page="4KiB", dram="100kB")
    assert pages(page=str(caught.value.need_bytes), dram="100kB") <= 120
    with pytest.raises(BudgetError):
        pages(page=str(caught.value.need_bytes // 2), dram="100kB")


@pytest.mark.parametrize("page", [None, ByteSize(PAGE_BYTES)])
@pytest.mark.parametrize(
    ("dram", "drives", "available_bytes", "said"),
    [
        ("8MiB", None, 4 << 30, "tiers.dram holds 8.00 MiB"),
        (None, None, 8 << 20, "host memory holds 5.60 MiB"),
        ("64MiB", None, 8 << 20, "only 8.00 MiB of host memory are free"),
        ("8MiB", ["/drive"], 4 << 30, "8 pages of 1.00 MiB, and at least 24 are needed"),
    ],
)
def test_a_page_that_was_set_is_named_where_dram_is_too_small(
    planned: tuple[Plan, Layout],
    page: ByteSize | None,
    dram: str | None,
    drives: list[str] | None,
    available_bytes: int,
    said: str,
) -> None:
    tiers = TiersConfig(dram=None if dram is None else ByteSize(dram), nvme_dirs=drives, page=page)
    with pytest.raises(BudgetError) as caught:
        size_dram(tiers, planned[1], available_bytes)
    assert said in str(caught.value)
    assert (", or lower tiers.page (1.00 MiB)" in str(caught.value)) == (page is not None)
    assert str(caught.value).endswith(" bytes are missing)")


@pytest.mark.parametrize(
    ("wanted", "drives", "spare_bytes", "pages"),
    [
        (None, None, 8 * PAGE_BYTES, 2),  # a quarter
        (None, None, 4 << 30, 24),  # all that is durable
        (None, None, -1, 0),
        (0, None, 4 << 30, 0),
        (0, ["/drive"], 0, 2),  # pages that are not in DRAM pass through them
        (5 * PAGE_BYTES + 1, None, 6 * PAGE_BYTES, 5),
    ],
)
def test_memory_for_copies(
    planned: tuple[Plan, Layout], wanted: int | None, drives: list[str] | None, spare_bytes: int, pages: int
) -> None:
    layout = planned[1]
    durable = sum(layout.page_count(*key) for key, spec in layout.planes.items() if spec.durable)
    found = size_copies(wanted, TiersConfig(nvme_dirs=drives), layout, spare_bytes)
    assert found == min(pages, durable) * PAGE_BYTES


def test_files_of_gradients_are_counted_whole_unless_dram_holds_everything(
    planned: tuple[Plan, Layout],
) -> None:
    plan, _ = planned
    everything = plan.durable_bytes + plan.step_local_bytes
    assert replace(plan, dram_bytes=everything).spill_bytes == 0
    short = replace(plan, dram_bytes=everything - 1)
    assert short.spill_bytes == plan.step_local_bytes > 0


def test_more_memory_for_copies_than_is_free_is_refused(planned: tuple[Plan, Layout]) -> None:
    with pytest.raises(BudgetError, match=r"checkpoint.copy_memory is 3.00 MiB, but only 2.00 MiB of host"):
        size_copies(3 << 20, TiersConfig(), planned[1], 2 << 20)


def warning(plan: Plan, *, dram: int, state: int, page: ByteSize | None = None, drives: bool = True) -> str:
    sized = replace(plan, page_bytes=4096, dram_bytes=dram, durable_bytes=state)
    tiers = TiersConfig(dram=ByteSize(dram), nvme_dirs=["/drive"] if drives else None, page=page)
    return page_warning(tiers, sized) or ""


def test_pages_that_a_small_budget_made_small_are_told(planned: tuple[Plan, Layout]) -> None:
    plan, _ = planned
    said = warning(plan, dram=2 << 20, state=1 << 40)
    assert "tiers.dram holds 2.00 MiB" in said
    assert "pages are 4.00 KiB" in said
    assert said.endswith("with 48.00 MiB they are up to 1.00 MiB")
    assert "with 10.00 MiB they" in warning(plan, dram=2 << 20, state=10 << 20)
    assert warning(plan, dram=2 << 20, state=1 << 40, page=ByteSize(4096)) == ""
    assert warning(plan, dram=2 << 20, state=1 << 40, drives=False) == ""
    assert warning(plan, dram=3 << 20, state=1 << 40) == ""
    assert warning(plan, dram=2 << 20, state=2 << 20) == ""


def test_a_run_warns_of_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(flop_per_s=1e9, upload=None, update_parameters_per_s=1e9)
    monkeypatch.setattr(plan_report, "machine_rates", lambda *_: rates)
    monkeypatch.setattr(machine, "measure_drive", lambda *_: None)
    (tmp_path / "drive").mkdir()
    config = make_run(tmp_path / "run", steps=1)
    config.tiers.nvme_dirs, config.tiers.page = [str(tmp_path / "drive")], None
    config.tiers.dram = ByteSize(40 * 4096)
    told: list[str] = []

    class Told(Callback):
        def on_event(self, text: str) -> None:
            told.append(text)

    Trainer(config, [Told()]).run()
    assert any(text.startswith("warning: tiers.dram holds 160.00 KiB of ") for text in told)
