"""What epochs take of each entry."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tierstream.engine.data.mixture import SAMPLES, Mixture, draw_order


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.5, 0.4, 1.25])
def test_weights_are_passes_in_an_epoch(weight: float) -> None:
    """After any number of epochs no sample is more than once ahead of another."""
    mixture, seen = Mixture([10], [weight], 3), Counter(range(10))
    for epoch in range(12):
        seen.update(mixture.samples(epoch).tolist())
        assert seen.total() == 10 + round((epoch + 1) * weight * 10)
        assert max(seen.values()) - min(seen.values()) <= 1


def test_entries_are_mixed() -> None:
    mixture = Mixture([40, 200], [2, 0.5], 3)
    samples = mixture.samples(0)
    assert Counter(Counter(samples[samples < 40].tolist()).values()) == {2: 40}
    assert len(set(samples[samples >= 40].tolist())) == 100
    first_half = np.count_nonzero(samples[:90] < 40)
    assert 25 < first_half < 55
    assert sorted([*mixture.samples(0)[samples >= 40], *_others(mixture, 1)]) == list(range(40, 240))
    assert mixture.samples(0).tolist() != mixture.samples(2).tolist()


def _others(mixture: Mixture, epoch: int) -> list[int]:
    return [sample for sample in mixture.samples(epoch).tolist() if sample >= 40]


def test_an_entry_has_its_own_order_in_every_pass() -> None:
    orders = [tuple(Mixture([23], [1.0], 1).samples(epoch).tolist()) for epoch in range(5)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len(set(orders)) == 5


def test_orders_are_fixed_for_ever() -> None:
    """Frozen values: with another order no run of today could be resumed."""
    assert draw_order(0, 0, 8, stream=SAMPLES).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert draw_order(2**63 - 1, 7, 8, stream=SAMPLES).tolist() == [6, 2, 3, 1, 7, 4, 5, 0]
    assert draw_order(0, 0, 8, stream=SAMPLES, entry=1).tolist() != [0, 2, 1, 5, 4, 3, 6, 7]


def test_an_epoch_may_have_nothing_of_an_entry() -> None:
    mixture = Mixture([1, 4], [0.25, 1], 0)
    sizes = [mixture.samples(epoch).size for epoch in range(8)]
    assert sum(sizes) == 8 * 4 + 2
