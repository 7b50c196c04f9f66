"""Traffic of an optimal cache, against a slow oracle that looks into the future by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.engine.bound import Bound, Rates, drive_traffic, step_bound
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Intent


def brute_force(uses: list[tuple[Page, Intent]], frames: int) -> tuple[int, int]:
    trace = uses * 12
    resident: set[Page] = set()
    dirty: set[Page] = set()
    on_drive = {page for page, intent in uses if intent in (Intent.READ, Intent.UPDATE)}
    reads = writes = 0
    for now in range(len(uses) * 3):
        page, intent = trace[now]
        last_cycle = now >= 2 * len(uses)
        if page not in resident:
            if intent is not Intent.OVERWRITE and page in on_drive:
                reads += last_cycle
            while len(resident) >= frames:
                victim = max(resident, key=lambda p: ([q for q, _ in trace[now:]].index(p), p))
                resident.remove(victim)
                if victim in dirty:
                    dirty.remove(victim)
                    on_drive.add(victim)
                    writes += last_cycle
        if intent is Intent.CONSUME:
            resident.discard(page)
            dirty.discard(page)
            continue
        if intent is not Intent.READ:
            dirty.add(page)
        resident.add(page)
    return reads, writes


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=20), st.integers(1, 6))
def test_reads_of_an_optimal_cache(order: list[tuple[int, bool]], frames: int) -> None:
    uses = [(Page("u", "weight", i), Intent.UPDATE if update else Intent.READ) for i, update in order]
    assert drive_traffic(uses, frames)[0] == brute_force(uses, frames)[0]


def test_a_cyclic_scan_hits_the_share_that_fits() -> None:
    """10 pages updated in turn, room for 6: optimal keeps 5 from round to round, the rest goes through one
    frame.
    """
    uses = [(Page("u", "exp_avg", i), Intent.UPDATE) for i in range(10)]
    reads, writes = drive_traffic(uses, 6)
    assert 4 <= reads <= 5
    assert writes == reads


def test_a_step_local_page_that_stays_costs_nothing() -> None:
    page = Page("u", "grad", 0)
    assert drive_traffic([(page, Intent.CONSUME), (page, Intent.OVERWRITE)], 4) == (0, 0)


def test_the_bound_is_the_slowest_resource_and_reads_overlap_writes() -> None:
    rates = Rates(
        flop_per_s=1e12, upload=1e9, update_parameters_per_s=1e9, nvme_read=2e9, nvme_write=2e9,
        nvme_read_mixed=1e9, nvme_write_mixed=1e9,
    )  # fmt: skip
    bound = step_bound(
        rates, flop=1e12, upload_bytes=10**9, parameters=10**8, read_bytes=3 * 10**9, written_bytes=10**9
    )
    assert bound.seconds == {"compute": 1.0, "update": 0.1, "upload": 1.0, "nvme": 1.0 + 1.0}
    assert (bound.resource, bound.step_s) == ("nvme", 2.0)


def updated_by(update_s: float, upload_s: float, through_device_s: float, *, cpu: bool, gpu: bool) -> Bound:
    """The bound of a step whose update takes `update_s` on the CPU alone, or `through_device_s` of the link,
    which needs `upload_s` for the weights.
    """
    rates = Rates(flop_per_s=1e12, upload=1e9, update_parameters_per_s=1e9)
    return step_bound(
        rates, flop=0, upload_bytes=round(upload_s * 1e9), parameters=round(update_s * 1e9), read_bytes=0,
        written_bytes=0, device_update_bytes=round(through_device_s * 1e9) if gpu else 0, cpu_updates=cpu,
    )  # fmt: skip


def test_cpu_and_link_share_the_update_until_both_are_busy_equally_long() -> None:
    """By hand: 1 s on the CPU, 0.25 s more on a link that is busy for 0.2 s: the device takes 64 %."""
    both = updated_by(1.0, 0.2, 0.25, cpu=True, gpu=True)
    assert both.seconds == pytest.approx({"compute": 0.0, "upload": 0.36, "update": 0.36})
    assert updated_by(1.0, 0.2, 0.25, cpu=True, gpu=False).seconds == pytest.approx(
        {"compute": 0.0, "upload": 0.2, "update": 1.0}
    )
    assert updated_by(1.0, 0.2, 0.25, cpu=False, gpu=True).seconds == pytest.approx(
        {"compute": 0.0, "upload": 0.45, "update": 0.0}
    )


@given(*[st.floats(0.001, 10.0)] * 3)
def test_sharing_the_update_is_never_slower_and_no_split_is_faster(
    update_s: float, upload_s: float, through_device_s: float
) -> None:
    """Moving a little from one to the other makes one of the two take longer."""
    both = updated_by(update_s, upload_s, through_device_s, cpu=True, gpu=True)
    splits = [
        max((1 - share) * update_s, upload_s + share * through_device_s)
        for share in (step / 1000 for step in range(1001))
    ]
    assert both.step_s <= min(splits) * (1 + 1e-6)
    assert both.step_s >= min(splits) - 0.002 * (update_s + through_device_s)
