"""Samples to evaluate on are never trained on, and the same ones in every run of a seed."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from support.token_stores import store_of

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.holdout import hold_out
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.shards import TokenStore
from tierstream.io.errors import DataError


def documents(store: TokenStore) -> list[tuple[int, ...]]:
    return [tuple(store.read(i, 0, int(store.lengths[i])).tolist()) for i in range(store.documents)]


def stores() -> list[TokenStore]:
    return [store_of([[10 * entry + i] * (i + 2) for i in range(10)]) for entry in (1, 2)]


def test_each_sample_is_on_one_side() -> None:
    trained_on, held = hold_out(stores(), 0.2, seed=3)
    assert [store.documents for store in trained_on] == [8, 8]
    assert [store.documents for store in held] == [2, 2]
    everything = [documents(store) for store in stores()]
    for whole, part, other in zip(everything, trained_on, held, strict=True):
        assert sorted(documents(part) + documents(other)) == sorted(whole)
        assert part.tokens + other.tokens == sum(map(len, whole))
        assert other.lengths.tolist() == [len(document) for document in documents(other)]
    assert documents(held[0]) != documents(held[1])


def test_the_seed_alone_decides() -> None:
    def held(share: float, seed: int) -> list[tuple[int, ...]]:
        return list(chain.from_iterable(map(documents, hold_out(stores(), share, seed)[1])))

    assert held(0.2, 3) == held(0.2, 3) != held(0.2, 4)
    assert set(held(0.2, 3)) < set(held(0.5, 3))


def test_fingerprints_and_places_are_those_of_the_samples() -> None:
    (trained_on, *_), (held, *_) = hold_out(stores(), 0.2, seed=3)
    again, _ = hold_out(stores(), 0.5, seed=3)
    whole = stores()[0]
    assert len({whole.fingerprint, trained_on.fingerprint, held.fingerprint, again[0].fingerprint}) == 4
    number = documents(whole).index(documents(held)[1])
    assert held.where(1) == whole.where(number)
    assert held.read(1, 1, 3).dtype == np.uint32


def test_a_store_of_one_sample_is_trained_on() -> None:
    one = store_of([[1, 2, 3]])
    trained_on, held = hold_out([one, *stores()], 0.9, seed=0)
    assert trained_on[0] is one
    assert [store.documents for store in (*trained_on[1:], *held)] == [1, 1, 0, 9, 9]
    data = DataConfig(files=["one", "two", "three"], seq_len=8)
    rows = Rows(held, data, rows_per_step=2, seed=0)
    assert rows.describe()[-3] == "one: 0.0% of the tokens, weight 1"
    assert {entry for step in range(rows.total_steps(1)) for entry, _ in rows.samples(step)} == {1, 2}
    with pytest.raises(DataError, match=r"eval\.share is 0\.9, and of 1 samples .* one sample\); raise it"):
        hold_out([one], 0.9, seed=0)
