"""Rows against a slow oracle that knows nothing of searching or caching; and what a resume needs of them."""

from __future__ import annotations

import itertools
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import tiny_model
from support.token_stores import UNTRAINED, store_of

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.packing import Layout
from tierstream.engine.data.rows import Batch, Rows
from tierstream.engine.data.shards import TokenStore
from tierstream.io.errors import ConfigError, DataError

END = 0
Cell = tuple[int, int, int, bool]  # input id, label, position, padding


def documents_of(lengths: list[int], first: int = 100) -> list[list[int]]:
    """Unique ids (100, 101, ...), each document ends with `END`."""
    ids = count(first)
    return [[next(ids) for _ in range(length - 1)] + [END] for length in lengths]


def rows_over(stores: list[TokenStore], rows_per_step: int = 4, seed: int = 1, **keys: Any) -> Rows:
    data = DataConfig(files=[f"{i}.jsonl" for i in range(len(stores))], **{"seq_len": 8, **keys})
    return Rows(stores, data, rows_per_step=rows_per_step, seed=seed)


def rows_of(lengths: list[int], rows_per_step: int = 4, seed: int = 1, **keys: Any) -> Rows:
    return rows_over([store_of(documents_of(lengths))], rows_per_step, seed, **keys)


def read(rows: Rows, layout: Layout, at: int) -> list[int]:
    """All tokens of a sample, with the bit."""
    number = layout.samples[at]
    store = rows.stores[int(rows._entries(number))]
    return store.read(int(rows._documents[number]), 0, int(layout.lengths[at])).tolist()


def oracle(rows: Rows, epoch: int, isolate: bool) -> list[list[Cell]]:
    """All rows of an epoch, built token by token from the places of samples."""
    layout, seq_len = rows._epoch(epoch), rows.seq_len
    tokens: dict[int, tuple[int, int]] = {}  # position -> token, place of its sample
    for at, begin in enumerate(layout.begins.tolist()):
        end = begin + len(read(rows, layout, at))
        if rows.packing == "none" and (end - begin) % seq_len == 1:
            end -= 1  # it predicts nothing
        for i in range(begin, end):
            assert i not in tokens
            tokens[i] = read(rows, layout, at)[i - begin], at
    cells: list[Cell] = []
    for i in range(layout.rows * seq_len):
        first = i % seq_len == 0
        if i not in tokens:
            restarts = first or (isolate and i - 1 in tokens)
            cells.append((END, -100, 0 if restarts else cells[-1][2] + 1, True))
            continue
        token, at = tokens[i]
        after = i + 1 - int(layout.begins[at])
        if after < layout.lengths[at]:
            label = read(rows, layout, at)[after]
        elif not isolate and i + 1 in tokens and (rows.packing == "stream" or (i + 1) % seq_len):
            label = tokens[i + 1][0]
        else:
            label = UNTRAINED
        begins = isolate and i == int(layout.begins[at])
        position = 0 if first or begins else cells[-1][2] + 1
        cells.append((token & ~UNTRAINED, -100 if label & UNTRAINED else label, position, False))
    return [cells[i : i + seq_len] for i in range(0, len(cells), seq_len)]


def cells(batch: Batch) -> list[list[Cell]]:
    padding = np.zeros_like(batch.labels, np.bool_) if batch.padding is None else batch.padding
    columns = (batch.input_ids, batch.labels, batch.position_ids, padding)
    return [list(zip(*(c[i].tolist() for c in columns), strict=True)) for i in range(len(padding))]


@st.composite
def stores(draw: st.DrawFn) -> list[TokenStore]:
    """One to three entries, some tokens of which are not trained on."""
    made = []
    for entry in range(draw(st.integers(1, 3))):
        documents = documents_of(
            draw(st.lists(st.integers(2, 30), min_size=1, max_size=9)), 100 + 1000 * entry
        )
        for document in documents:
            for i in range(draw(st.integers(0, len(document) - 1))):
                document[i] |= UNTRAINED
        made.append(store_of(documents, name=f"{entry}.jsonl"))
    return made


@settings(max_examples=300, deadline=None)
@given(
    stores=stores(),
    packing=st.sampled_from(["stream", "whole", "none", "split"]),
    seq_len=st.integers(2, 11),
    rows_per_step=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    isolate=st.booleans(),
)
def test_rows_equal_the_oracle(
    stores: list[TokenStore], packing: str, seq_len: int, rows_per_step: int, seed: int, isolate: bool
) -> None:
    keys = {"packing": "none", "too_long": "split"} if packing == "split" else {"packing": packing}
    try:
        rows = rows_over(stores, rows_per_step, seed, seq_len=seq_len, isolate_documents=isolate, **keys)
    except DataError:
        assert all((s.first_trained >= s.lengths.clip(max=seq_len)).all() for s in stores)
        return
    step = 0
    for epoch in range(3):
        expected = oracle(rows, epoch, isolate)
        seen, samples = [], 0
        while rows.rows_of_step(step)[0] == epoch:
            batch, own = rows.batch(step), rows.rows_of_step(step)[1].tolist()
            assert 0 < len(own) <= rows_per_step
            found = cells(batch)
            assert found[: len(own)] == [expected[row] for row in own]
            filling = [(END, -100, i, True) for i in range(seq_len)]
            assert found[len(own) :] == [filling] * (rows_per_step - len(own))
            assert batch.trained_tokens == sum(cell[1] != -100 for row in found for cell in row)
            for array in (batch.input_ids, batch.labels, batch.position_ids):
                assert array.dtype == np.int64
                assert array.shape == (rows_per_step, seq_len)
            seen += own
            samples += batch.samples
            step += 1
        assert sorted(seen) == list(range(len(expected)))
        assert len(seen) > (step - 1 - rows._first_step(epoch)) * rows_per_step  # only the last is short
        assert samples == rows._documents.size
        assert rows.total_steps(epoch + 1) == step


def test_no_padding_is_told_apart_from_end_of_text() -> None:
    assert rows_of([7, 7, 7], 3, seq_len=7).batch(0).padding is None


def test_counts_by_hand() -> None:
    """A (3 tokens) and B (5): 2 + 4 labels, since B's first token is not predicted from A (C19)."""
    for packing in ("stream", "whole", "none"):
        assert rows_of([3, 5], packing=packing).batch(0).trained_tokens == 6
    assert rows_of([3, 5], isolate_documents=False).batch(0).trained_tokens == 7


def test_order_is_fixed_for_ever() -> None:
    """Frozen values: with another order no run of today could be resumed."""

    def order(rows: Rows, epoch: int) -> list[tuple[int, int]]:
        first = rows.total_steps(epoch) if epoch else 0
        steps = range(first, rows.total_steps(epoch + 1))
        return [sample for step in steps for sample in rows.samples(step)]

    one = rows_of([3] * 8, seed=0, packing="none")
    assert [document for _, document in order(one, 0)] == [6, 7, 3, 2, 4, 5, 0, 1]
    lengths = [[2, 9, 4, 4], [5, 3, 7]]
    two = rows_over([store_of(documents_of(own)) for own in lengths], seed=2**63 - 1, packing="whole")
    assert order(two, 7) == [(0, 1), (1, 0), (1, 1), (0, 0), (0, 2), (0, 3), (1, 2)]


@pytest.mark.parametrize("packing", ["none", "whole"])
@pytest.mark.parametrize(
    ("samples", "epochs", "expected"), [(7, 2, [4, 3, 4, 3]), (3, 2, [3, 3]), (8, 1, [4, 4]), (1, 3, [1] * 3)]
)
def test_the_last_step_of_an_epoch_is_a_short_one(
    samples: int, epochs: int, expected: list[int], packing: str
) -> None:
    """C13. Samples of 5 tokens, so that one fills a row."""
    rows = rows_of([5] * samples, packing=packing)
    steps = [rows.batch(step) for step in range(rows.total_steps(epochs))]
    assert [batch.samples for batch in steps] == expected
    assert [batch.trained_tokens for batch in steps] == [4 * n for n in expected]
    assert all(batch.input_ids.shape == (4, 8) for batch in steps)


def test_steps_of_parts_of_an_epoch() -> None:
    rows = rows_of([5] * 40, packing="none")
    assert [rows.total_steps(epochs) for epochs in (0.01, 0.5, 1, 1.25, 3)] == [1, 5, 10, 12, 30]
    assert [rows.epochs(steps) for steps in (1, 10, 12, 30)] == [0.1, 1, 1.2, 3]


@pytest.mark.parametrize("packing", ["stream", "whole", "none"])
def test_stopping_after_any_step_gives_the_rows_of_an_unbroken_run(packing: str) -> None:
    """23 documents, 3 epochs (C55)."""
    lengths = [2 + i % 7 for i in range(23)]
    unbroken = rows_of(lengths, packing=packing)
    steps = unbroken.total_steps(3)
    expected = [(unbroken.samples(step), cells(unbroken.batch(step))) for step in range(steps)]
    for step in reversed(range(steps)):
        resumed = rows_of(lengths, packing=packing)
        assert (resumed.samples(step), cells(resumed.batch(step))) == expected[step]
    if packing == "none":
        ids = [document for samples, _ in expected for _, document in samples]
        assert (steps, len(ids)) == (18, 69)
        epochs = [tuple(ids[e : e + 23]) for e in (0, 23, 46)]
        assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
        assert len(set(epochs)) == 3


def test_a_step_does_not_hold_neighbouring_rows() -> None:
    """What one document gives is spread."""
    rows = rows_of([101] * 5, 103, seq_len=5, packing="stream")
    orders = [rows.rows_of_step(epoch)[1].tolist() for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    neighbours = sum(abs(a - b) == 1 for order in orders for a, b in itertools.pairwise(order))
    assert neighbours < 4 * len(orders[0]) // 10


def test_samples_of_a_step_are_named() -> None:
    rows = rows_over([store_of(documents_of([5] * 3), name="a.jsonl")], 2, packing="none")
    names = rows.where(0) + rows.where(1)
    assert sorted(names) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    long = rows_of([30], 1, packing="stream")
    assert [long.samples(step) for step in range(4)] == [[(0, 0)]] * 4
    assert [long.batch(step).samples for step in range(4)].count(1) == 1


def masked(prompt: int, answer: int) -> list[int]:
    """A sample with so many tokens that are not trained on, then so many that are."""
    return [(100 + i) | (UNTRAINED if i < prompt else 0) for i in range(prompt + answer)]


def test_samples_without_a_trained_token_on_their_row_are_left_out() -> None:
    """C35: the prompt alone fills the row."""
    bad = store_of([masked(8, 4), masked(9, 1), masked(30, 2)])
    with pytest.raises(DataError, match="0 trainable tokens: of 3 samples 3 have no token to train on"):
        rows_over([bad], packing="none")
    with pytest.raises(DataError, match="and 2 are dropped"):
        rows_over([store_of([masked(8, 4), masked(3, 9)])], packing="none", too_long="drop")
    good = store_of([masked(8, 4), masked(7, 5), masked(9, 1)])
    rows = rows_over([good], packing="none")
    batch = rows.batch(0)
    assert (rows.total_steps(1), batch.samples, batch.trained_tokens) == (1, 1, 1)
    assert rows.samples(0) == [(0, 1)]
    assert any("2 samples have no token to train on" in line for line in rows.describe())


@pytest.mark.parametrize(
    ("packing", "too_long", "tokens", "said"),
    [
        ("whole", "cut", 7 + 4, "1 samples are longer than a row and are cut, by 12 tokens in all"),
        ("none", "cut", 7 + 4, "1 samples are longer than a row and are cut, by 12 tokens in all"),
        ("whole", "drop", 4, "1 samples are longer than a row and are left out"),
        ("none", "split", 19 + 4, ""),
        ("stream", "cut", 19 + 4, ""),
    ],
)
def test_samples_longer_than_a_row(packing: str, too_long: str, tokens: int, said: str) -> None:
    rows = rows_of([20, 5], packing=packing, too_long=too_long)
    assert rows.batch(0).trained_tokens == tokens
    assert [line for line in rows.describe() if "are longer" in line] == ([said] if said else [])


def test_samples_longer_than_a_row_can_be_refused() -> None:
    said = r"made-up:2: this sample has 9 tokens, but a row \(data.seq_len\) only 8, .* 2 samples"
    with pytest.raises(DataError, match=said):
        rows_of([8, 9, 20], packing="whole", too_long="error")
    assert rows_of([8, 3], packing="whole", too_long="error").total_steps(1) == 1


def test_packing_is_chosen_by_what_is_trained_on() -> None:
    plain, chat = store_of(documents_of([5])), store_of([masked(2, 3)])
    assert rows_over([plain]).packing == "stream"
    assert rows_over([plain, chat]).packing == "whole"
    plain.counts.by_format["messages"] = 1  # trained on as a whole, but no text to be cut anywhere
    assert rows_over([plain]).packing == "whole"


def test_what_an_epoch_holds_is_said() -> None:
    stores = [store_of(documents_of([6] * 5)), store_of(documents_of([4] * 10))]
    rows = rows_over(stores, weights=[2, 0.5], packing="none")
    assert rows.describe() == [
        "15 samples on 15 rows of 8 tokens (packing none), 4 steps an epoch; 33.3% padding",
        "0.jsonl: 75.0% of the tokens, weight 2",
        "1.jsonl: 25.0% of the tokens, weight 0.5",
    ]
    with pytest.raises(ConfigError, match="rounds to no sample"):
        rows_over(stores, weights=[0.01, 0.01])


def test_steps_with_more_rows_than_an_epoch_are_warned_of() -> None:
    rows = {count: rows_over([store_of(documents_of([4] * 3))], count, packing="none") for count in (3, 7)}
    assert rows[3].padding_warning() is None
    assert rows[7].padding_warning() == (
        "train.rows_per_step is 7, and an epoch has 3 rows: each step is filled up with 4 rows of padding, "
        "which are computed like others; lower train.rows_per_step to 3, give more data, or lower "
        "data.seq_len"
    )


def test_fingerprint_is_that_of_the_tokens() -> None:
    a, b = store_of(documents_of([5]), name="a"), store_of(documents_of([5]), name="b")
    prints = [rows_over(own).fingerprint for own in ([a], [b], [a, b], [b, a])]
    assert len(set(prints)) == 4
    assert rows_over([a], 2, 9, seq_len=4).fingerprint == prints[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize(("lengths", "seq_len", "rows"), [([3, 5, 9, 2, 4], 32, 1), ([4] * 9, 12, 3)])
def test_isolated_documents_give_the_loss_of_separate_ones(
    attention: str, packing: str, lengths: list[int], seq_len: int, rows: int
) -> None:
    """Transformers sees documents by their positions: packed loss = unpacked loss, gradients too (C19)."""
    model = tiny_model(dtype=torch.float32, attn_implementation=attention)
    documents = [[token % 250 for token in document] for document in documents_of(lengths)]
    packed = rows_over([store_of(documents)], rows, seq_len=seq_len, packing=packing)
    assert packed.total_steps(1) == 1
    batch = packed.batch(0)

    def summed_loss(ids: Any, labels: Any, positions: Any) -> torch.Tensor:
        logits = model(
            input_ids=torch.tensor(ids), position_ids=torch.tensor(positions), use_cache=False
        ).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(labels).flatten(), ignore_index=-100, reduction="sum"
        )

    got = summed_loss(batch.input_ids, batch.labels, batch.position_ids)
    got.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = torch.zeros(())
    for ids in documents:
        expected = expected + summed_loss([ids], [[*ids[1:], -100]], [list(range(len(ids)))])
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
