"""From the files of a run to its rows: tokenizer, token store, and what the model's layers ask of packing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import find_files
from tierstream.engine.data.hashes import HASHES_FILE, fingerprint_remembered
from tierstream.engine.data.progress import OnProgress, Progress, not_told
from tierstream.engine.data.samples import Recipe
from tierstream.engine.data.shards import TokenStore
from tierstream.engine.data.tokenise import Tokeniser
from tierstream.engine.data.tokenizer import has_tokenizer, load_tokenizer, train_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.parity.verdict import Verdict
from tierstream.io import durable
from tierstream.io.errors import ConfigError, DataError


def open_data(
    data: DataConfig,
    model: ModelConfig,
    directory: Path,
    *,
    vocab_size: int,
    on_progress: OnProgress = not_told,
) -> list[TokenStore]:
    """The tokens of a run, a store for each entry of `data.files`: made now, or found in the cache.

    Args:
        directory: of the run's data; the cache too, where `data.cache_dir` names no other.
        vocab_size: rows of the model's embedding.
        on_progress: told a few times a second at most.

    Raises:
        DataError, ConfigError: files, tokenizer or vocabulary that cannot be used.
        StorageError: `directory` or the cache cannot be written.
    """
    cache = directory if data.cache_dir is None else Path(os.path.abspath(data.cache_dir))
    entries = _find_entries(data.files)
    chosen = tokenizer_directory(data, model, directory)
    trained = data.tokenizer is None and chosen == directory / "tokenizer"
    if trained:
        _check_trained(data, model, vocab_size)
    durable.make_directories(cache)
    hashed = fingerprint_remembered(
        list(chain.from_iterable(entries)),
        cache / HASHES_FILE,
        lambda done, total: on_progress(Progress("hashing data.files", done, total)),
    )
    if trained:
        if not any(source.nbytes for source in hashed):
            raise DataError(
                f"the {len(hashed)} files of data.files hold no text: there is nothing to train on; name "
                "others"
            )
        train_tokenizer(hashed, data.vocab_size, chosen)
    tokenizer = load_tokenizer(chosen)
    tokeniser = Tokeniser(
        recipe=Recipe.of(data, chosen, tokenizer),
        tokenizer=tokenizer,
        cache=cache,
        vocab_size=vocab_size,
        workers=data.workers,
        on_progress=on_progress,
    )
    files = iter(hashed)
    return [
        tokeniser.open(list(islice(files, len(entry))), name)
        for entry, name in zip(entries, data.files, strict=True)
    ]


def _find_entries(names: Sequence[str]) -> list[list[Path]]:
    """The files of each entry of `data.files`, without those of entries before."""
    seen: set[Path] = set()
    entries = []
    for name in names:
        entry = [path for path in find_files([name]) if path not in seen]
        if not entry:
            raise DataError(
                f"data.files: entries before {name!r} have all of its files; leave it out (data.weights says "
                "how often files are seen)"
            )
        seen.update(entry)
        entries.append(entry)
    return entries


def position_warning(data: DataConfig, hf_config: Any) -> str | None:
    """What to say where a document of a row may be longer than the model has positions; None: nothing."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    if positions is None or data.seq_len <= positions:
        return None
    return (
        f"data.seq_len is {data.seq_len}, and the model is made for {positions} positions "
        "(max_position_embeddings): what is longer than that is trained on where it may have learnt nothing"
    )


def check_packing(data: DataConfig, attention: str, verdict: Verdict) -> None:
    """Raises ConfigError: documents of a row would not be isolated.

    What attention may see follows from positions that restart. Layers of other kinds (linear attention, state
    spaces) carry a state from each token to the next, whatever the positions say; and models with sinks
    (gpt-oss) make the masks of transformers' own attention without them.

    Args:
        attention: `model.attention`. verdict: on the model with it.
    """
    if verdict.packs or data.packing == "none" or not data.isolate_documents:
        return
    other = "" if attention == "auto" else f"leave model.attention ({attention}) to auto, or "
    raise ConfigError(
        f"data.packing is {data.packing}, and {verdict.model} does not keep documents of a row apart "
        f"({verdict.found('packing')}); {other}use data.packing: none, so that each begins a row "
        "(data.too_long says what becomes of long ones), or data.isolate_documents: false"
    )


def _check_trained(data: DataConfig, model: ModelConfig, vocab_size: int) -> None:
    """May a tokenizer be trained for this model?"""
    if model.path is not None:
        raise DataError(
            f"model.path {model.path} holds no tokenizer, and its weights know the tokens of theirs alone: "
            "copy its files there (tokenizer.json, tokenizer_config.json), or name its directory in "
            "data.tokenizer"
        )
    if data.vocab_size > vocab_size:
        raise ConfigError(
            f"no tokenizer is given (data.tokenizer), and the one to train is of data.vocab_size "
            f"{data.vocab_size}, but the embedding of the model has only {vocab_size} rows; lower it to at "
            f"most {vocab_size}, or raise model.vocab_size"
        )


def tokenizer_directory(data: DataConfig, model: ModelConfig, directory: Path) -> Path:
    """Where a run's tokenizer is: `data.tokenizer`, else the model's own, else trained in `directory`."""
    if data.tokenizer is not None:
        return Path(os.path.abspath(data.tokenizer))
    return model.directory if has_tokenizer(model.directory) else directory / "tokenizer"
