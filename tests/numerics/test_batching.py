"""The same samples give the same update however they are laid on rows and cut into chunks, that of plain
PyTorch.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import chat_templates
from support.command import told, use_drive
from support.exports import stored
from support.rig import PlainTraining, Setup, reference_model, rig, same_bits, tiny_config
from support.runs import make_run, records, train
from support.token_stores import UNTRAINED, store_of

from tierstream.engine.config import RunConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.mixture import ROWS, draw_order
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig

#: With so large an eps AdamW's first step is one of SGD, but for a factor: it does not blow rounding up.
OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, clip_norm=None, weight_decay=0.0, schedule="constant")


def setup(**changes: Any) -> Setup:
    config = tiny_config(max_position_embeddings=512)
    return Setup(config=config, optimizer=OPTIMIZER, loss_chunk_tokens=64, **changes)


def samples(*trained: int) -> list[list[int]]:
    """Documents with so many trained tokens each, after some that are not."""
    random = np.random.default_rng(1)
    made = []
    for count in trained:
        prompt = random.integers(3, 259, random.integers(1, 9)) | UNTRAINED
        made.append([*prompt.tolist(), *random.integers(3, 259, count).tolist()])
    return made


def rows_over(documents: list[list[int]], rows_per_step: int, **data: Any) -> Rows:
    return Rows([store_of(documents)], DataConfig(files=["a"], **data), rows_per_step=rows_per_step, seed=3)


def on_torch(rows: Rows, step: int) -> Batch:
    packed = rows.batch(step)
    padding = None if packed.padding is None else torch.from_numpy(packed.padding)
    tensors = map(torch.from_numpy, (packed.input_ids, packed.labels, packed.position_ids))
    return Batch(*tensors, packed.trained_tokens, padding)


def by_hand(documents: list[list[int]]) -> Batch:
    """One sample a row, without anything of `Rows`."""
    width = max(map(len, documents))
    ids = torch.zeros((len(documents), width), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        for column, token in enumerate(document):
            ids[row, column] = token & ~UNTRAINED
            if column and not token & UNTRAINED:
                labels[row, column - 1] = token
    positions = torch.arange(width).repeat(len(documents), 1)
    return Batch(ids, labels, positions, int((labels != -100).sum()))


def trained(made: Setup, steps: list[Batch]) -> tuple[list[float], dict, dict[str, torch.Tensor]]:
    """Losses, durable planes, weights after all steps."""
    made = made.but(rows=steps[0].input_ids.shape[0], seq_len=steps[0].input_ids.shape[1])
    with rig(made) as run:
        losses = [outcome.loss for outcome in run.train(steps)]
        return losses, run.planes(), run.tensors()


def check_against_plain(made: Setup, steps: list[Batch], reference: list[Batch]) -> None:
    """Steps through the streamed runtime against those of autograd on samples of a row each."""
    losses, _, weights = trained(made, steps)
    plain = PlainTraining(made)
    for loss, batch in zip(losses, reference, strict=True):
        assert loss == pytest.approx(plain.step(batch, OPTIMIZER.lr)[0], rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain.masters[name].detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("packing", "rows", "seq_len", "chunk"),
    [
        ("none", 4, 224, 1), ("none", 4, 224, 2), ("none", 4, 224, 4), ("none", 7, 224, 3),
        ("whole", 1, 272, 1), ("whole", 2, 224, 1), ("whole", 4, 224, 2), ("stream", 1, 272, 1),
    ],
)  # fmt: skip
def test_one_update_in_every_batching(
    packing: str, rows: int, seq_len: int, chunk: int, attention: str
) -> None:
    """1, 3, 40 and 200 trained tokens (C01); packed or not (C19)."""
    documents = samples(1, 3, 40, 200)
    made = rows_over(documents, rows, packing=packing, seq_len=seq_len)
    assert made.total_steps(1) == 1
    batch = on_torch(made, 0)
    assert batch.trained_tokens == 244
    check_against_plain(setup(attention=attention, rows_per_chunk=chunk), [batch], [by_hand(documents)])


def test_short_steps_at_the_end_of_an_epoch() -> None:
    """C13: 7 samples, 4 in a step, one at once, 2 epochs; each step is divided by its own tokens."""
    documents = samples(4, 17, 1, 9, 30, 2, 11)
    rows = rows_over(documents, 4, packing="none", seq_len=40)
    numbers = [[document for _, document in rows.samples(step)] for step in range(rows.total_steps(2))]
    assert [len(own) for own in numbers] == [4, 3, 4, 3]
    assert sorted(numbers[0] + numbers[1]) == sorted(numbers[2] + numbers[3]) == list(range(7))
    steps = [on_torch(rows, step) for step in range(4)]
    reference = [by_hand([documents[number] for number in own]) for own in numbers]
    assert [b.trained_tokens for b in steps] == [b.trained_tokens for b in reference]
    assert sum(b.trained_tokens for b in steps) == 2 * 74
    check_against_plain(setup(rows_per_chunk=1), steps, reference)


def test_rows_of_padding_change_no_bit() -> None:
    """The rows of a short step, with the padding that fills it up and without."""
    rows = rows_over(samples(5, 9, 2), 4, packing="none", seq_len=24)
    filled = on_torch(rows, 0)
    tensors = (t[:3] for t in (filled.input_ids, filled.labels, filled.position_ids))
    assert filled.padding is not None
    assert filled.padding[3].all()
    bare = Batch(*tensors, filled.trained_tokens, filled.padding[:3])
    (loss, planes, _), (expected, others, _) = (
        trained(setup(rows_per_chunk=1), [batch]) for batch in (filled, bare)
    )
    assert loss == expected
    assert same_bits(planes, others) == []


@pytest.mark.parametrize("place", range(4))
def test_samples_without_a_trained_token_take_no_part(place: int) -> None:
    """C35: one good sample and three that are masked, the good one in each place."""
    good, made = samples(12), setup(rows_per_chunk=1)
    masked = [[token | UNTRAINED for token in document] for document in samples(3, 5, 7)]
    mixed = rows_over([*masked[:place], *good, *masked[place:]], 4, packing="none", seq_len=24)
    alone = rows_over(good, 4, packing="none", seq_len=24)
    found, expected = (trained(made, [on_torch(rows, 0)]) for rows in (mixed, alone))
    assert found[0] == expected[0]
    assert same_bits(found[1], expected[1]) == []


def test_every_chunk_of_a_step_counts(tmp_path: Path) -> None:
    """C03, from drives: three chunks, the first without a trained token, in all six orders."""
    documents = samples(1, 14, 20)
    documents[0][-1] |= UNTRAINED
    reference = by_hand(documents)
    for number, order in enumerate(itertools.permutations(range(3))):
        chosen = list(order)
        batch = Batch(
            reference.input_ids[chosen], reference.labels[chosen], reference.position_ids[chosen], 34
        )
        drive = tmp_path / str(number)
        drive.mkdir()
        check_against_plain(setup(rows_per_chunk=1, nvme=drive, dram=96 * 8192), [batch], [reference])


# Whole runs: from a file of prompts and answers, a token for each letter, to the exported weights


def whole_run(folder: Path, lengths: list[tuple[int, int]], **data: Any) -> tuple[RunConfig, list[list[int]]]:
    """A run over one sample for each (letters of the prompt, trained tokens), its state on a drive with
    little DRAM, one row at once; and the samples as documents.
    """
    config = make_run(folder)
    setting = setup().config
    reference_model(setting, torch.float32).save_pretrained(folder / "weights")
    config.model = ModelConfig(path=str(folder / "weights"), dtype="float32")
    config.optimizer = OPTIMIZER
    tokenizer = load_tokenizer(chat_templates.byte_tokenizer(folder / "tokenizer"))
    draw, lines, documents = np.random.default_rng(7), [], []
    for prompt, trained_tokens in lengths:
        text = "".join(draw.choice(list("abcdefgh"), prompt + trained_tokens - 1).tolist())
        lines.append(json.dumps({"prompt": text[:prompt], "completion": text[prompt:]}) + "\n")
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        documents.append([token | UNTRAINED * (at < prompt) for at, token in enumerate(ids)])
        assert len(ids) == prompt + trained_tokens
    (folder / "rows.jsonl").write_text("".join(lines))
    config.data = DataConfig(
        files=[str(folder / "rows.jsonl")], tokenizer=str(folder / "tokenizer"), packing="none", **data
    )
    config.train.steps, config.train.epochs, config.train.rows_per_chunk = None, 1, 1
    use_drive(config, folder / "drive")
    return config, documents


def check_whole_run(config: RunConfig, reference: list[Batch]) -> None:
    """Losses, counts of trained tokens, and what is exported, against plain torch."""
    train(config)
    plain = PlainTraining(setup())
    found = records(config)
    assert [m["trained_tokens"] for m in found] == [batch.trained_tokens for batch in reference]
    for record, batch in zip(found, reference, strict=True):
        assert record["loss"] == pytest.approx(plain.step(batch, OPTIMIZER.lr)[0], rel=1e-6)
    out = Path(config.run_dir) / "exported"
    assert told(["export", config.run_dir, str(out)]) == (0, "")
    for name, weight in stored(out).items():
        torch.testing.assert_close(weight, plain.masters[name].detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_run_over_samples_of_any_length(tmp_path: Path, chunk: int) -> None:
    """C01: 1, 3, 40 and 200 trained tokens, as 1 x 4, 2 x 2 and 4 x 1."""
    config, documents = whole_run(tmp_path, [(5, 1), (2, 3), (1, 40), (9, 200)], seq_len=224)
    config.train.rows_per_step, config.train.rows_per_chunk = 4, chunk
    reference = by_hand(documents)
    assert reference.trained_tokens == 244
    check_whole_run(config, [reference])


def test_a_run_with_short_steps(tmp_path: Path) -> None:
    """C13: 7 samples, 4 in a step, one at once, 2 epochs."""
    trained_tokens = [4, 17, 1, 9, 30, 2, 11]
    config, documents = whole_run(tmp_path, [(3, count) for count in trained_tokens], seq_len=40)
    config.train.rows_per_step, config.train.epochs, config.train.log_samples = 4, 2, True
    rows = Rows([store_of(documents)], config.data, rows_per_step=4, seed=config.train.seed)
    chosen = [[document for _, document in rows.samples(step)] for step in range(4)]
    assert [len(own) for own in chosen] == [4, 3, 4, 3]
    check_whole_run(config, [by_hand([documents[number] for number in own]) for own in chosen])
    lines = [[int(name.rpartition(":")[2]) for name in m["sample_ids"]] for m in records(config)]
    assert [[line - 1 for line in own] for own in lines] == chosen


def test_a_run_with_a_chunk_that_has_no_trained_token(tmp_path: Path) -> None:
    """C03: one sample over three rows, its first row all prompt: that comes first, in the middle and last."""
    seeds = {draw_order(seed, 0, 3, stream=ROWS).tolist().index(0): seed for seed in range(20)}
    assert sorted(seeds) == [0, 1, 2]
    for seed in seeds.values():
        config, (document,) = whole_run(tmp_path / str(seed), [(20, 29)], seq_len=16, too_long="split")
        config.train.rows_per_step, config.train.seed = 3, seed
        ids = torch.tensor([token & ~UNTRAINED for token in document])
        labels = ids[1:].masked_fill(torch.arange(48) < 19, -100).view(3, 16)
        assert [int((row != -100).sum()) for row in labels] == [0, 13, 16]
        check_whole_run(config, [Batch(ids[:48].view(3, 16), labels, torch.arange(16).repeat(3, 1), 29)])
