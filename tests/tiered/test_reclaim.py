"""Where frames come from: eviction and write-back, transfer by transfer."""

from __future__ import annotations

import numpy as np
from support.cache_bench import Bench, bench
from support.stores import PAGE_BYTES, Frame, layout_of

from tierstream.tiered.cache import Kind
from tierstream.tiered.frames import State
from tierstream.tiered.layout import Layout
from tierstream.tiered.lease import Intent


def weights_and_gradients(pages: int) -> Layout:
    """Of one unit, so many pages each."""
    nbytes = pages * PAGE_BYTES
    return layout_of(("u", "weight", "uint8", nbytes, True), ("u", "grad", "uint8", nbytes, False))


def test_what_fits_is_never_written() -> None:
    layout = weights_and_gradients(4)
    it = Bench(layout, 8, prefetch=4, writeback=4)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    step = [*grads, *(page for pair in zip(grads, weights, strict=True) for page in pair)]
    it.begin(step, step)
    for _ in range(3):
        for grad in grads:
            it.use(grad, Intent.OVERWRITE)
        for grad, weight in zip(grads, weights, strict=True):
            it.use(grad, Intent.CONSUME)
            it.use(weight, Intent.UPDATE)
    assert it.log == []
    assert it.stats.evictions == 0


def test_gradients_that_are_used_up_in_time_never_touch_nvme() -> None:
    """Weights do not fit and are streamed; gradients are consumed before they would have to go."""
    layout = weights_and_gradients(12)
    it = Bench(layout, 4, prefetch=2, writeback=2)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    it.fill(weights)
    step = [page for grad, weight in zip(grads, weights, strict=True) for page in (grad, grad, weight)]
    it.begin(step, step)
    for _ in range(3):
        for grad, weight in zip(grads, weights, strict=True):
            it.use(grad, Intent.OVERWRITE)
            it.use(grad, Intent.CONSUME)
            it.use(weight, Intent.UPDATE)
            it.end_all()
    assert not any(transfer.entry.page.plane == "grad" for transfer in it.transfers)
    assert it.stats.nvme_bytes_read == sum(kind is not Kind.WRITE for kind, _ in it.log) * PAGE_BYTES
    assert not it.cache.entry(grads[0]).stored
    assert it.stats.nvme_bytes_written > 0


def test_write_back_runs_ahead_of_need_within_its_bytes() -> None:
    it, pages = bench(12, 6, prefetch=3, writeback=2)
    it.begin(pages, pages)
    it.end_all()
    for page in pages[:4]:
        it.use(page, Intent.UPDATE)
        assert sum(transfer.kind is Kind.WRITE for transfer in it.transfers) <= 2
    writes = [index for kind, index in it.log if kind is Kind.WRITE]
    assert writes, "dirty victims are written before a request waits for them"
    it.end_all()
    assert all(transfer.kind is not Kind.DEMAND for transfer in it.transfers)


def test_frames_of_half_the_pages_that_begin_without_content_are_seen_to_ahead() -> None:
    """The other half finds frames of what was used up by then; here nothing is."""
    layout = weights_and_gradients(8)
    it = Bench(layout, 8, prefetch=6, writeback=8)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    it.fill(weights)
    for weight in weights:
        it.use(weight, Intent.UPDATE, scheduled=False)
    it.log.clear()
    it.begin([*grads, *weights], [])
    assert it.log == [(Kind.WRITE, index) for index in (7, 6, 5)], "half of the six in the window"


def test_what_was_written_to_leave_does_leave() -> None:
    """A scan that changes all pages: whenever one is done with, it is the one that is used last, in place of
    victims that were chosen before.
    """
    it, pages = bench(12, 7, prefetch=3, writeback=4)
    for _ in range(4):
        it.log.clear()
        it.begin(pages, pages)
        for page in pages:
            it.use(page, Intent.UPDATE)
            it.end_all()
    writes = [index for kind, index in it.log if kind is Kind.WRITE]
    assert len(writes) == len(it.log) - len(writes), "a page that stayed was written"


def test_gradients_stay_in_place_of_weights_that_are_used_sooner() -> None:
    """With the fewest reads, those of the last weights would be written, and read again."""
    layout = weights_and_gradients(12)
    it = Bench(layout, 14, prefetch=1)
    weights, grads = layout.pages("u", "weight"), layout.pages("u", "grad")
    it.fill(weights)
    forward, backward = list(zip(grads, weights, strict=True)), list(zip(weights, grads, strict=True))[::-1]
    step = [page for pair in (*backward, *forward) for page in pair]
    for _ in range(3):
        it.begin(step, step)
        for weight, grad in backward:
            it.use(weight)
            it.use(grad, Intent.OVERWRITE)
            it.end_all()
        assert all(it.cache.entry(grad).dirty for grad in grads), "one was written"
        for grad, weight in forward:
            it.use(grad, Intent.CONSUME)
            it.use(weight, Intent.UPDATE)
            it.end_all()
    assert it.stats.nvme_bytes_written > 0


def test_a_dirty_page_is_read_back_as_it_was_written() -> None:
    it, pages = bench(4, 2)
    lease = it.ask((pages[0], Intent.OVERWRITE))
    it.end_all()
    lease.arrays[0].fill(9)
    it.release(lease)
    assert it.cache.entry(pages[0]).dirty
    frames: dict[int, Frame] = {}
    for page in pages[1:]:
        it.ask((page, Intent.READ), scheduled=False)
        for transfer in it.transfers:
            if transfer.kind is Kind.WRITE:
                frames[transfer.entry.page.index] = transfer.entry.view().copy()
        if len(frames):
            break
    assert np.array_equal(frames[0], np.full(PAGE_BYTES, 9, np.uint8))


def test_the_head_takes_its_pages_as_frames_become_free() -> None:
    it, pages = bench(8, 4)
    held = it.ask(*((page, Intent.READ) for page in pages[6:8]), scheduled=False)
    waiting = it.ask(*((page, Intent.READ) for page in pages[0:4]), scheduled=False)
    assert it.log == [(Kind.DEMAND, 0), (Kind.DEMAND, 1)], "reads start before all frames are there"
    assert not waiting.granted
    it.end_all()
    it.release(held)
    assert waiting.granted
    assert waiting.unfilled == 2
    it.end_all()
    assert not waiting.unfilled


def test_a_request_for_many_frames_writes_no_more_at_once_than_allowed() -> None:
    it, pages = bench(16, 8, writeback=2)
    for page in pages[8:]:
        it.use(page, Intent.UPDATE)
    lease = it.ask(*((page, Intent.READ) for page in pages[:8]), scheduled=False)
    most = 0
    while not lease.granted:
        most = max(most, sum(transfer.kind is Kind.WRITE for transfer in it.transfers))
        it.end()
    assert most == 2


def test_a_clean_page_does_not_go_in_place_of_the_dirty_victim() -> None:
    """Page 1 is dirty and used last, page 0 clean and used sooner: the request waits for page 1."""
    it, pages = bench(3, 2)
    it.use(pages[0])
    it.use(pages[1], Intent.UPDATE)
    it.end_all()
    it.begin([pages[2], pages[0], pages[1]])
    lease = it.ask((pages[2], Intent.READ))
    assert not lease.granted
    it.end()
    assert it.resident() == {0, 2}


def test_pages_needed_within_the_window_are_not_written_ahead() -> None:
    """All that is resident is dirty and used within the window; the missing page comes last."""
    it, pages = bench(5, 4, prefetch=5)
    for page in pages[1:]:
        it.use(page, Intent.UPDATE)
    it.begin([*pages[1:], pages[0]])
    assert it.log == []
    it.use(pages[1])
    assert it.log == [(Kind.WRITE, 1)]


def test_a_request_at_the_head_keeps_its_pages_while_others_read_them() -> None:
    it, pages = bench(6, 3)
    for page in pages[:3]:
        it.use(page)
    it.log.clear()
    held = it.ask((pages[1], Intent.READ))
    waiting = it.ask(*((pages[index], Intent.READ) for index in (0, 4, 5)))
    assert it.log == [(Kind.DEMAND, 4)]
    it.use(pages[0])
    it.end_all()
    assert not waiting.granted
    it.release(held)
    assert waiting.granted
    assert it.log == [(Kind.DEMAND, 4), (Kind.DEMAND, 5)], "page 0 was evicted and read again"


def test_discarding_a_page_in_transit_frees_its_frame_at_the_end() -> None:
    layout = layout_of(
        ("u", "weight", "uint8", 4 * PAGE_BYTES, True), ("u", "grad", "uint8", PAGE_BYTES, False)
    )
    it = Bench(layout, 2)
    (grad,), weights = layout.pages("u", "grad"), layout.pages("u", "weight")
    it.use(grad, Intent.OVERWRITE)
    it.fill(weights[:1])
    lease = it.ask((weights[1], Intent.OVERWRITE), (weights[2], Intent.OVERWRITE))
    assert [transfer.entry.page for transfer in it.transfers] == [grad]
    entry = it.cache.entry(grad)
    assert entry.state is State.WRITING
    it.cache.discard([entry])
    assert entry.state is State.WRITING
    it.end()
    assert entry.state is State.FREE
    assert lease.granted
