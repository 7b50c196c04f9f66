"""Rows against a slow oracle that knows nothing of searching or caching; and what a resume needs of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import moe_config
from support.models import tiny_model

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.prepare import check_packing, open_rows, tokenizer_directory
from tierstream.engine.data.rows import Batch, PackedRows
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.data.tokens import TokenIndex, TokenStore
from tierstream.engine.model_config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

END = 0


def store_of(lengths: list[int]) -> TokenStore:
    """Documents of unique ids (100, 101, ...), each but its end-of-text token."""
    ids = count(100)
    documents = [[next(ids) for _ in range(length - 1)] + [END] for length in lengths]
    tokens = np.array([token for document in documents for token in document], np.uint32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    index = TokenIndex("fingerprint", documents=len(lengths), tokens=tokens.size, end_of_text_id=END)
    return TokenStore(Path(), index, tokens, offsets)


def rows_of(
    lengths: list[int], seq_len: int = 8, seed: int = 1, isolate: bool = True, pack: bool = True
) -> PackedRows:
    return PackedRows(store_of(lengths), seq_len=seq_len, seed=seed, isolate_documents=isolate, pack=pack)


def oracle(rows: PackedRows, epoch: int, isolate: bool) -> list[list[tuple[int, int, int]]]:
    """All rows of an epoch as (input id, label, position), built token by token."""
    offsets, tokens, seq_len = rows.store.offsets.tolist(), rows.store.tokens.tolist(), rows.seq_len
    stream = [
        (token, document)
        for document in rows.documents(epoch).tolist()
        for token in tokens[offsets[document] : offsets[document + 1]]
    ]
    cells = []
    for i, (token, document) in enumerate(stream):
        label = -100
        if i + 1 < len(stream) and not (isolate and stream[i + 1][1] != document):
            label = stream[i + 1][0]
        first_of_row = i % seq_len == 0
        begins_document = i == 0 or stream[i - 1][1] != document
        position = 0 if first_of_row or (isolate and begins_document) else cells[-1][2] + 1
        cells.append((token, label, position))
    padding = -len(cells) % seq_len
    for i in range(padding):
        cells.append((END, -100, 0 if isolate and i == 0 else cells[-1][2] + 1))
    return [cells[i : i + seq_len] for i in range(0, len(cells), seq_len)]


def cells(batch: Batch) -> list[list[tuple[int, int, int]]]:
    columns = (batch.input_ids.tolist(), batch.labels.tolist(), batch.position_ids.tolist())
    return [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    seq_len=st.integers(2, 11),
    rows=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    isolate=st.booleans(),
)
def test_rows_equal_the_oracle(lengths: list[int], seq_len: int, rows: int, seed: int, isolate: bool) -> None:
    packed = rows_of(lengths, seq_len, seed, isolate)
    expected = [oracle(packed, epoch, isolate) for epoch in range(3)]
    assert all(len(epoch) == packed.rows_per_epoch for epoch in expected)
    for step in range(3 * packed.rows_per_epoch // rows):
        batch = packed.batch(step, rows)
        assert cells(batch) == [expected[epoch][row] for epoch, row in packed.row_ids(step, rows).tolist()]
        assert batch.trained_tokens == sum(label != -100 for row in cells(batch) for _, label, _ in row)
        for array in (batch.input_ids, batch.labels, batch.position_ids):
            assert array.dtype == np.int64
            assert array.shape == (rows, seq_len)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    seq_len=st.integers(2, 11),
    seed=st.integers(0, 2**63 - 1),
    isolate=st.booleans(),
)
def test_without_packing_every_document_begins_a_row(
    lengths: list[int], seq_len: int, seed: int, isolate: bool
) -> None:
    """Each row is a piece of one document, then padding; what follows a row is its last label."""
    rows = rows_of(lengths, seq_len, seed, isolate, pack=False)
    offsets, tokens = rows.store.offsets.tolist(), rows.store.tokens.tolist()
    expected = []
    for document in rows.documents(0).tolist():
        own = tokens[offsets[document] : offsets[document + 1]]
        for start in range(0, len(own), seq_len):
            ids, labels = own[start : start + seq_len], own[start + 1 : start + seq_len + 1]
            missing = seq_len - len(ids)
            places = list(range(len(ids))) + [i if isolate else len(ids) + i for i in range(missing)]
            expected.append(
                (ids + [END] * missing, labels + [-100] * (seq_len - len(labels)), places, missing)
            )
    assert rows.rows_per_epoch == len(expected)
    batch = rows.batch(0, len(expected))
    for i, (_, row) in enumerate(rows.row_ids(0, len(expected)).tolist()):
        ids, labels, places, missing = expected[row]
        assert batch.input_ids[i].tolist() == ids
        assert batch.labels[i].tolist() == labels
        assert batch.position_ids[i].tolist() == places
        padding = [False] * seq_len if batch.padding is None else batch.padding[i].tolist()
        assert padding == [False] * (seq_len - missing) + [True] * missing


def test_every_token_of_an_epoch_is_an_input_once() -> None:
    packed = rows_of([5, 9, 2, 31, 4], seq_len=7)
    for epoch in range(3):
        batch = packed.batch(epoch, packed.rows_per_epoch)
        padding = packed.rows_per_epoch * 7 - packed.store.index.tokens
        ended = packed.store.tokens.tolist() + [END] * padding
        assert sorted(batch.input_ids.ravel().tolist()) == sorted(ended)
        assert batch.trained_tokens == packed.store.index.tokens - 5  # all but the end of each document
        assert batch.padding is not None
        assert batch.padding.sum() == padding
        assert set(batch.input_ids[batch.padding].tolist()) == {END}
        assert set(batch.labels[batch.padding].tolist()) == {-100}


def test_no_padding_is_told_apart_from_end_of_text() -> None:
    assert rows_of([7, 7, 7], seq_len=7).batch(0, 3).padding is None


def test_counts_by_hand() -> None:
    """A (3 tokens) and B (5): 2 + 4 labels, since B's first token is not predicted from A (C19)."""
    assert rows_of([3, 5]).batch(0, 1).trained_tokens == 6
    assert rows_of([3, 5], isolate=False).batch(0, 1).trained_tokens == 7


def test_each_epoch_has_its_own_order_of_all_documents() -> None:
    packed = rows_of([3] * 23)
    orders = [tuple(packed.documents(epoch).tolist()) for epoch in range(5)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len(set(orders)) == 5
    assert tuple(rows_of([3] * 23, seed=2).documents(0).tolist()) not in orders


def test_each_epoch_has_its_own_order_of_all_rows() -> None:
    """Every row once an epoch, and a step does not hold neighbours: what one document gives is spread."""
    packed = rows_of([101] * 5, seq_len=5)
    count = packed.rows_per_epoch
    orders = [packed.row_ids(epoch, count)[:, 1].tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    neighbours = sum(abs(a - b) == 1 for order in orders for a, b in itertools.pairwise(order))
    assert neighbours < 4 * count // 10


def test_order_is_fixed_for_ever() -> None:
    """Frozen values: with another order no run of today could be resumed."""
    assert rows_of([3] * 8, seed=0).documents(0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert rows_of([3] * 8, seed=2**63 - 1).documents(7).tolist() == [6, 2, 3, 1, 7, 4, 5, 0]


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_stopping_after_any_step_gives_the_rows_of_an_unbroken_run(rows: int) -> None:
    """23 documents, 3 epochs (C55)."""
    lengths = [2 + i % 9 for i in range(23)]
    unbroken = rows_of(lengths)
    steps = 3 * unbroken.rows_per_epoch // rows
    expected = [
        (unbroken.row_ids(step, rows).tolist(), cells(unbroken.batch(step, rows))) for step in range(steps)
    ]
    for stop in range(steps):
        resumed = rows_of(lengths)
        step = stop + (steps - stop) // 2  # any later step, asked for first
        assert (resumed.row_ids(step, rows).tolist(), cells(resumed.batch(step, rows))) == expected[step]
    ids = [tuple(row) for rows_of_step, _ in expected for row in rows_of_step]
    assert [epoch for epoch, _ in ids] == sorted(epoch for epoch, _ in ids)
    assert len(set(ids)) == len(ids)
    if len(ids) == 3 * unbroken.rows_per_epoch:
        assert set(ids) == {(e, r) for e in range(3) for r in range(unbroken.rows_per_epoch)}


def test_rows_per_step_only_groups_the_same_rows() -> None:
    packed = rows_of([5, 9, 2, 31, 4], seq_len=7)
    one_by_one = [cells(packed.batch(step, 1))[0] for step in range(12)]
    for rows in (2, 3, 4, 6):
        assert [row for step in range(12 // rows) for row in cells(packed.batch(step, rows))] == one_by_one


def test_end_of_text_is_a_label_even_where_padding_is_the_same_id(tmp_path: Path) -> None:
    """Masks come from lengths, never from an id (C37): "a" + EOS and "a b c" + EOS give 1 + 3 labels."""
    (tmp_path / "0.txt").write_text("a")
    (tmp_path / "1.txt").write_text("abc")
    packed = open_text(tmp_path, vocab_size=258, seq_len=16)
    batch = packed.batch(0, 1)
    assert packed.store.index.end_of_text_id == 0
    assert batch.trained_tokens == 4
    assert np.count_nonzero(batch.labels == 0) == 2
    assert np.count_nonzero(batch.input_ids == 0) == 2 + 10


def test_end_of_text_inside_a_document_is_an_ordinary_token(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("ab<|endoftext|>cd")
    batch = open_text(tmp_path, vocab_size=258, seq_len=8).batch(0, 1)
    assert batch.trained_tokens == 5
    assert batch.input_ids[0].tolist().count(0) == 2 + 2
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("lengths", "seq_len", "rows"), [([3, 5, 9, 2, 4], 32, 1), ([4] * 9, 12, 3)])
def test_isolated_documents_give_the_loss_of_separate_ones(
    attention: str, lengths: list[int], seq_len: int, rows: int
) -> None:
    """Transformers sees documents by their positions: packed loss = unpacked loss, gradients too (C19)."""
    model = tiny_model(dtype=torch.float32, attn_implementation=attention)
    packed = rows_of(lengths, seq_len)
    assert packed.rows_per_epoch == rows
    packed.store.tokens[:] %= 250
    batch = packed.batch(0, rows)

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
    for document in range(len(lengths)):
        ids = packed.store.tokens[
            packed.store.offsets[document] : packed.store.offsets[document + 1]
        ].tolist()
        expected = expected + summed_loss([ids], [[*ids[1:], -100]], [list(range(len(ids)))])
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


# From files to rows


def open_text(root: Path, model: ModelConfig | None = None, rows: int = 300, **keys: Any) -> PackedRows:
    data = DataConfig(files=[str(root / "*.txt")], **keys)
    return open_rows(data, model or ModelConfig(config="none"), root / "data", vocab_size=rows, seed=0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} of the little corpus\n" * (number + 1))
    return tmp_path


def test_text_comes_back_from_the_rows(corpus: Path) -> None:
    packed = open_text(corpus, vocab_size=300, seq_len=64)
    tokenizer = load_tokenizer(corpus / "data" / "tokenizer")
    batch = packed.batch(0, packed.rows_per_epoch)
    in_stream_order = np.argsort(packed.row_ids(0, packed.rows_per_epoch)[:, 1])
    text = tokenizer.decode(batch.input_ids[in_stream_order].ravel()[: packed.store.index.tokens])
    texts = [(corpus / f"{number:02}.txt").read_text() for number in packed.documents(0)]
    assert text == "".join(t + "<|endoftext|>" for t in texts)


def test_second_opening_reuses_tokenizer_and_tokens(corpus: Path) -> None:
    first = open_text(corpus, vocab_size=300, seq_len=64)
    stats = {path: path.stat().st_ino for path in (corpus / "data").rglob("*")}
    again = open_text(corpus, vocab_size=300, seq_len=100)
    assert {path: path.stat().st_ino for path in (corpus / "data").rglob("*")} == stats
    assert again.fingerprint == first.fingerprint
    (corpus / "07.txt").write_text("changed")
    assert open_text(corpus, vocab_size=300, seq_len=64).fingerprint != first.fingerprint


def test_tokenizer_is_the_given_one_else_the_models_else_a_trained_one(corpus: Path) -> None:
    open_text(corpus, vocab_size=280)
    own = corpus / "model"
    load_tokenizer(corpus / "data" / "tokenizer").save_pretrained(own)
    data, given = corpus / "data", str(corpus / "given")
    with_own, bare = ModelConfig(path=str(own)), ModelConfig(config="none")
    for config, model, expected in [
        (DataConfig(files=["x"], tokenizer=given), with_own, corpus / "given"),
        (DataConfig(files=["x"]), with_own, own),
        (DataConfig(files=["x"]), ModelConfig(config=str(own)), own),
        (DataConfig(files=["x"]), bare, data / "tokenizer"),
    ]:
        assert tokenizer_directory(config, model, data) == expected
    packed = open_text(corpus, with_own, vocab_size=999, rows=280)
    assert packed.store.index.largest_id < 280


def test_trained_vocabulary_must_fit_the_embedding(corpus: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.vocab_size is 301, but the embedding of the model has only 300 rows"
    ):
        open_text(corpus, vocab_size=301)
    assert not (corpus / "data").exists()


def test_nothing_to_train_on_is_refused_before_a_tokenizer_is_trained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"the 1 files of data\.files hold no text"):
        open_text(tmp_path, vocab_size=258)
    with pytest.raises(DataError, match=r"'.*none\*\.txt' matches no file"):
        open_rows(
            DataConfig(files=[str(tmp_path / "none*.txt")]),
            ModelConfig(config="x"),
            tmp_path,
            vocab_size=9,
            seed=0,
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"files": []}, r"data\.files is \[\]"),
        ({"files": ["a", ""]}, "none empty"),
        ({"files": ["a"], "vocab_size": 257}, r"data\.vocab_size is 257; it must be at least 258"),
        ({"files": ["a"], "seq_len": 1}, r"data\.seq_len is 1; it must be at least 2"),
        ({"files": ["a"], "tokenizer": ""}, r"data\.tokenizer is empty"),
    ],
)
def test_configuration_is_checked(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(**keys)


def test_configuration_module_does_not_import_torch() -> None:
    heavy = "{'torch', 'transformers'}"
    code = f"import sys, tierstream.engine.data.prepare; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_that_carry_a_state_over_documents_are_refused() -> None:
    data = DataConfig(files=["a"])
    check_packing(data, moe_config("gpt_oss"))  # windows, but attention
    recurrent = moe_config("qwen3_next")
    said = r"data\.pack is true, and layers of Qwen3NextConfig \(linear_attention\) carry .*pack: false"
    with pytest.raises(ConfigError, match=said):
        check_packing(data, recurrent)
    check_packing(DataConfig(files=["a"], pack=False), recurrent)
    check_packing(DataConfig(files=["a"], isolate_documents=False), recurrent)
