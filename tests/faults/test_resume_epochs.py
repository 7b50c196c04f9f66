"""Epochs, short steps at their ends, the samples of each step: over stops and kills as in an unbroken run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.children import FORKS
from support.models import edit_json
from support.runs import dump, final_planes, make_run, records, train, train_and_be_killed

from tierstream.engine.config import RunConfig
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.io.errors import CheckpointError, ConfigError

SAMPLES, STEPS = 7, 4
Uninterrupted = tuple[RunConfig, dict, list[dict]]


def make(folder: Path) -> RunConfig:
    """7 samples of different lengths, 4 in a step, one at once, 2 epochs (C13)."""
    config = make_run(folder)
    for number in range(SAMPLES):
        (folder / f"{number}.sample").write_text("the pages of every plane " * (1 + number % 3))
    config.data.files, config.data.seq_len = [str(folder / "*.sample")], 24
    config.data.packing = "none"
    config.train.steps, config.train.epochs, config.train.log_samples = None, 2, True
    config.train.rows_per_step, config.train.rows_per_chunk = 4, 1
    config.checkpoint.every_steps, config.checkpoint.keep = 1, STEPS
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    config = make(tmp_path_factory.mktemp("uninterrupted"))
    train(config)
    return config, final_planes(config), records(config)


def trajectory(found: list[dict]) -> list[tuple]:
    keys = ("step", "epoch", "samples", "trained_tokens", "lr", "loss", "grad_norm")
    names = [[Path(name).name for name in record["sample_ids"]] for record in found]
    return [(*(record[key] for key in keys), own) for record, own in zip(found, names, strict=True)]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def test_the_last_step_of_an_epoch_is_a_short_one(uninterrupted: Uninterrupted) -> None:
    found = trajectory(uninterrupted[2])
    assert [(step, epoch, samples) for step, epoch, samples, *_ in found] == [
        (1, 0.5, 4), (2, 1, 3), (3, 1.5, 4), (4, 2, 3),
    ]  # fmt: skip
    epochs = [found[0][-1] + found[1][-1], found[2][-1] + found[3][-1]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"{n}.sample:1" for n in range(SAMPLES)]
    assert epochs[0] != epochs[1]
    rates = [record["lr"] for record in uninterrupted[2]]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])  # two of warm-up, then cosine to the end
    assert rates[3] == pytest.approx(1e-2 * (0.1 + 0.9 / 2))


@pytest.mark.parametrize("k", range(1, STEPS))
def test_resume_after_every_step(tmp_path: Path, uninterrupted: Uninterrupted, k: int) -> None:
    config = make(tmp_path)
    config.checkpoint.resume = f"{uninterrupted[0].run_dir}/checkpoints/step-{k:08d}"
    train(config)
    assert trajectory(records(config)) == trajectory(uninterrupted[2][k:])
    assert same(final_planes(config), uninterrupted[1])


def test_killed_in_every_step(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """`kill -9` in each step of a run, after its record and before its checkpoint."""
    config = make(tmp_path)
    config.checkpoint.resume = "auto"
    path = dump(config, tmp_path / "run.json")
    for step in range(1, STEPS + 1):
        killed = FORKS.Process(target=train_and_be_killed, args=(str(path), step))
        killed.start()
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
    train(config)
    assert trajectory(records(config)) == trajectory(uninterrupted[2])
    assert same(final_planes(config), uninterrupted[1])


def test_what_decides_the_rows_is_compared(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """C61: each difference with both values: settings, the model, one sample more."""
    config = make(tmp_path)
    config.checkpoint.resume = f"{uninterrupted[0].run_dir}/checkpoints/step-00000002"
    config.train.rows_per_step, config.train.epochs, config.train.seed = 2, 3, 9
    config.data.seq_len, config.data.packing, config.data.weights = 32, "whole", [2.0]
    with pytest.raises(CheckpointError) as error:
        train(config)
    for text in (
        "train.rows_per_step: 4 in the checkpoint, 2 now", "train.epochs: 2", "train.seed: 0 in the",
        "data.seq_len: 24 in the", "data.packing: 'none' in the", "data.weights: None in the",
    ):  # fmt: skip
        assert text in str(error.value)
    config = make(tmp_path / "wider")
    config.checkpoint.resume = f"{uninterrupted[0].run_dir}/checkpoints/step-00000002"
    edit_json(tmp_path / "wider" / "model" / "config.json", lambda model: model.update(intermediate_size=80))
    with pytest.raises(CheckpointError, match=r"architecture\.intermediate_size: 77 in the .*, 80 now"):
        train(config)
    config = make(tmp_path / "more")
    (tmp_path / "more" / "8.sample").write_text("one more")
    config.checkpoint.resume = f"{uninterrupted[0].run_dir}/checkpoints/step-00000002"
    with pytest.raises(CheckpointError, match="training data or the tokenizer changed"):
        train(config)


def test_steps_or_epochs(tmp_path: Path) -> None:
    config = make(tmp_path)
    config.train.epochs = None
    train(config)
    assert records(config)[-1]["epoch"] == 1
    with pytest.raises(ConfigError, match=r"train\.steps is 3 and train\.epochs is 2; give one of them"):
        type(config.train)(steps=3, epochs=2)
    with pytest.raises(ConfigError, match=r"train\.epochs is 0; it must be a number above 0"):
        type(config.train)(epochs=0)


def test_resume_where_texts_are_tokenised_meanwhile(tmp_path: Path) -> None:
    """Blocks of 3, 3 and 1 samples: 5 steps of 2 an epoch."""

    def make_streamed(folder: Path) -> RunConfig:
        config = make(folder)
        sources = fingerprint_files(sorted(folder.glob("*.sample")))
        config.data.tokenizer = str(train_tokenizer(sources, 258, folder / "tokenizer"))
        config.data.streaming, config.data.shuffle_window = True, 3
        config.train.epochs, config.train.steps = None, 7
        config.train.rows_per_step, config.checkpoint.keep = 2, 7
        return config

    whole = make_streamed(tmp_path / "whole")
    train(whole)
    assert [record["samples"] for record in records(whole)] == [2, 1, 2, 1, 1, 2, 1]
    names = [Path(name).name for record in records(whole)[:5] for name in record["sample_ids"]]
    assert sorted(names) == [f"{n}.sample:1" for n in range(SAMPLES)]
    for step in (1, 4, 5):
        config = make_streamed(tmp_path / str(step))
        config.checkpoint.resume = f"{whole.run_dir}/checkpoints/step-{step:08d}"
        train(config)
        assert trajectory(records(config)) == trajectory(records(whole)[step:])
        assert same(final_planes(config), final_planes(whole))
    with pytest.raises(ConfigError, match=r"data\.streaming is true, so .* set train\.steps"):
        type(config)(run_dir="x", model=config.model, data=config.data)
