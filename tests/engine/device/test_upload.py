"""Which upload goes to which slot: decided before the step, as if by Belady."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstream.engine.device.upload import Upload, assign_slots


def palindrome(layers: int) -> list[Upload]:
    order = [*range(layers), *reversed(range(layers))]
    return [Upload(f"layers.{i}", "weight", "layers") for i in order]


def fetches(uploads: list[Upload], slots: int) -> int:
    assignments, _ = assign_slots(uploads, [None] * slots)
    return sum(a.fetch for a in assignments)


@pytest.mark.parametrize("slots", [2, 3, 4, 8])
def test_a_sweep_saves_the_uploads_of_the_layers_at_the_turn(slots: int) -> None:
    """Forward and back over 8 layers: the last `slots` layers are still there when backward begins."""
    assert fetches(palindrome(8), slots) == 16 - slots


def test_two_slots_double_buffer() -> None:
    """An upload never takes the slot of the layer that is being computed, so it can run beside it."""
    assignments, _ = assign_slots(palindrome(8), [None, None])
    for before, now in itertools.pairwise(assignments):
        assert not now.fetch or now.slot != before.slot


def test_what_a_slot_holds_is_used_by_the_next_step() -> None:
    uploads = palindrome(3)
    _, held = assign_slots(uploads, [None] * 3)
    again, _ = assign_slots(uploads, held)
    assert not any(a.fetch for a in again)


@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.integers(1, 4),
)
def test_slots_always_hold_what_their_user_wants(order: list[int], slots: int) -> None:
    """Replay: every use finds its own bytes, and waits for the one that used the slot before it."""
    uploads = [Upload(str(i), "weight", "g") for i in order]
    assignments, held = assign_slots(uploads, [None] * slots)
    content: list[tuple[str, str] | None] = [None] * slots
    last_use = [-1] * slots
    for index, (upload, assignment) in enumerate(zip(uploads, assignments, strict=True)):
        if assignment.fetch:
            content[assignment.slot] = upload.content
        assert content[assignment.slot] == upload.content
        assert assignment.after == last_use[assignment.slot]
        last_use[assignment.slot] = index
    assert content == held
