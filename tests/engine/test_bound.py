"""What drives must move, against caches that see it all; and what sets a bound, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import PAGE_BYTES, layout_of

from tierstream.engine.bound import UPDATE_THEN_BACKWARD, Bound, Rates, least_traffic, step_bound
from tierstream.engine.device.memory import DeviceMemory
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.replay import Acquire, Begin, Event, Release, replay
from tierstream.tiered.store import Intent

Lease = list[tuple[Page, Intent]]


def a_model(weights: int, boundaries: int) -> Layout:
    """In pages: weights, twice as many of a moment, gradients, and boundaries."""
    sizes = [("weight", weights, True), ("exp_avg", 2 * weights, True), ("grad", weights, False)]
    planes = [("u", plane, "uint8", pages * PAGE_BYTES, durable) for plane, pages, durable in sizes]
    return layout_of(*planes, ("b", "activation", "uint8", boundaries * PAGE_BYTES, False))


def a_step(layout: Layout, *, early: bool) -> tuple[list[Lease], list[Lease]]:
    """Leases of forward and of backward."""
    weights, moments, grads = (layout.pages("u", plane) for plane in ("weight", "exp_avg", "grad"))
    boundaries = layout.pages("b", "activation")
    updates: list[Lease] = [
        [
            (grads[i], Intent.CONSUME),
            *((page, Intent.UPDATE) for page in (weights[i], *moments[2 * i : 2 * i + 2])),
        ]
        for i in range(len(weights))
    ]
    stored: list[Lease] = [[(page, Intent.OVERWRITE)] for page in boundaries]
    taken: list[Lease] = [[(page, Intent.CONSUME)] for page in reversed(boundaries)]
    read: list[Lease] = [[(page, Intent.READ)] for page in weights]
    summed: list[Lease] = [[(page, Intent.OVERWRITE)] for page in grads]
    forward = [*([] if early else updates), *read, *stored]
    return forward, [*taken, *read, *summed, *(updates if early else [])]


def a_plan(frames: int, sums: int = 0, slots: int = 0) -> Any:
    """With buffers for so many pages of gradients, and of weights, on the device."""
    device = DeviceMemory(
        slots={"u": (1, slots * PAGE_BYTES)}, sums={"u": (1, sums * PAGE_BYTES)}, group_of={"u": "u"},
        resident=(), expert_slots=None, layer_slots=0, nbytes=0,
    )  # fmt: skip
    return SimpleNamespace(dram_bytes=frames * PAGE_BYTES, device=device)


def flat(*parts: Sequence[Lease]) -> list[tuple[Page, Intent]]:
    return [use for part in parts for lease in part for use in lease]


def test_what_neither_of_two_instants_can_hold() -> None:
    """4 weights, 8 of a moment, 4 gradients, 3 boundaries. The update begins with 16 of them; at the turn the
    3 boundaries and the 4 weights are wanted again.
    """
    layout = a_model(4, 3)
    uses = flat(*a_step(layout, early=False))
    pages = {
        (frames, sums): tuple(n // PAGE_BYTES for n in least_traffic(uses, a_plan(frames, sums), layout))
        for frames, sums in ((16, 0), (10, 0), (5, 0), (10, 2))
    }
    assert pages == {(16, 0): (0, 0), (10, 0): (6, 6), (5, 0): (11 + 2, 11), (10, 2): (4, 5)}
    early = flat(*a_step(layout, early=True))  # 15 at the turn, and the weights when forward begins
    assert least_traffic(early, a_plan(3), layout) == ((12 + 1) * PAGE_BYTES, 12 * PAGE_BYTES)


def test_a_slot_for_weights_spares_no_read_for_their_update() -> None:
    """At the turn two weights lie in a slot: backward does without their pages, an update does not."""
    layout = a_model(4, 3)
    deferred, early = (flat(*a_step(layout, early=early)) for early in (False, True))
    assert least_traffic(deferred, a_plan(5, slots=2), layout) == (11 * PAGE_BYTES, 11 * PAGE_BYTES)
    assert least_traffic(early, a_plan(3, slots=2), layout) == (12 * PAGE_BYTES, 12 * PAGE_BYTES)
    frozen = [use for use in early if use[1] is not Intent.UPDATE]  # 4 weights, of which 2 have no frame
    assert least_traffic(frozen, a_plan(2), layout)[0] == (2 + 3 + 2) * PAGE_BYTES
    assert least_traffic(frozen, a_plan(2, slots=2), layout)[0] == (0 + 3 + 0) * PAGE_BYTES


@given(
    st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from(sorted(POLICIES)),
    st.integers(0, 4), st.integers(5, 12),
)  # fmt: skip
def test_no_order_and_no_policy_moves_less(
    data: st.DataObject, weights: int, boundaries: int, early: bool, policy: str, prefetch: int, frames: int
) -> None:
    layout, steps = a_model(weights, boundaries), 3
    forward, backward = a_step(layout, early=early)
    least = least_traffic(flat(forward, backward), a_plan(frames), layout)

    def shuffled(leases: list[Lease], cut: int) -> list[Lease]:
        return [lease for part in (leases[:cut], leases[cut:]) for lease in data.draw(st.permutations(part))]

    forward = shuffled(forward, 0 if early else weights)
    backward = shuffled(backward, len(backward) - weights if early else 0)
    before, (first, then) = ("b", "activation"), (backward, forward)
    if not early:
        before, (first, then) = ("u", "grad"), (forward, backward)
    made: list[Lease] = [[(page, Intent.OVERWRITE)] for page in layout.pages(*before)]
    following = [page for page, _ in flat(first, then)]
    events: list[Event] = []
    for leases in (made, *[first + then] * steps):
        events.append(Begin([page for page, _ in flat(leases)], following))
        for lease in leases:
            events += [Acquire(len(events), lease, True), Release(len(events))]
    moved = replay(
        layout, events, frames=frames, policy=POLICIES[policy], prefetch_bytes=prefetch * PAGE_BYTES,
        writeback_bytes=2 * PAGE_BYTES,
    )  # fmt: skip
    assert moved.reads.total() * PAGE_BYTES >= steps * least[0]
    assert moved.writes.total() * PAGE_BYTES >= (steps - 1) * least[1]


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


def test_backward_begins_when_the_updates_before_it_are_done() -> None:
    """0.3 s of updates and 0.75 of the products, where compute alone takes 1 s."""
    rates = Rates(flop_per_s=1e12, upload=None, update_parameters_per_s=1e9)

    def bound(parameters: int, after_updates_flop: float | None) -> Bound:
        return step_bound(
            rates, flop=1e12, upload_bytes=0, parameters=parameters, read_bytes=0, written_bytes=0,
            after_updates_flop=after_updates_flop,
        )  # fmt: skip

    deferred = bound(3 * 10**8, 0.75e12)
    assert deferred.seconds == pytest.approx({"compute": 1.0, "update": 0.3, UPDATE_THEN_BACKWARD: 1.05})
    assert (deferred.resource, deferred.step_s) == (UPDATE_THEN_BACKWARD, pytest.approx(1.05))
    assert bound(3 * 10**8, None).seconds == {"compute": 1.0, "update": 0.3}
    assert bound(0, 0.75e12).seconds == {"compute": 1.0, "update": 0.0}, "nothing is updated"


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


def test_an_update_is_no_faster_than_host_memory_wherever_it_is_computed() -> None:
    rates = Rates(flop_per_s=1e12, upload=1e9, update_parameters_per_s=1e9, host_memory=28e9)
    for device_bytes, cpu in ((0, True), (14 * 10**6, True), (14 * 10**6, False)):
        bound = step_bound(
            rates, flop=1e12, upload_bytes=0, parameters=10**9, read_bytes=0, written_bytes=0,
            host_update_bytes=28 * 10**9, device_update_bytes=device_bytes, cpu_updates=cpu,
            after_updates_flop=0.5e12,
        )  # fmt: skip
        assert bound.seconds["update"] == pytest.approx(1.0)
        assert bound.seconds[UPDATE_THEN_BACKWARD] == pytest.approx(1.5)


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
