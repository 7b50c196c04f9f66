"""From the files of a run to its rows: tokenizer, token store, and what the model's layers ask of packing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import find_files, fingerprint_files
from tierstream.engine.data.rows import PackedRows
from tierstream.engine.data.tokenizer import has_tokenizer, load_tokenizer, train_tokenizer
from tierstream.engine.data.tokens import open_tokens
from tierstream.engine.model_config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

#: Kinds of layers, as transformers names them, in which documents of a row do not see each other.
_SEEN_BY_POSITIONS = {"full_attention", "sliding_attention", "chunked_attention"}


def open_rows(
    data: DataConfig, model: ModelConfig, directory: Path, *, vocab_size: int, seed: int
) -> PackedRows:
    """Tokenise the training data of a run into `directory`, or reuse what is there.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        DataError, ConfigError: files, tokenizer or vocabulary that cannot be used.
        StorageError: `directory` cannot be written.
    """
    sources = fingerprint_files(find_files(data.files))
    chosen = tokenizer_directory(data, model, directory)
    if chosen == directory / "tokenizer":
        if data.vocab_size > vocab_size:
            raise ConfigError(
                f"data.vocab_size is {data.vocab_size}, but the embedding of the model has only {vocab_size} "
                f"rows; lower it to at most {vocab_size}"
            )
        if not any(source.nbytes for source in sources):
            raise DataError(
                f"the {len(sources)} files of data.files hold no text: there is nothing to train on"
            )
        train_tokenizer(sources, data.vocab_size, chosen)
    store = open_tokens(sources, load_tokenizer(chosen), directory / "tokens", vocab_size=vocab_size)
    return PackedRows(
        store, seq_len=data.seq_len, seed=seed, isolate_documents=data.isolate_documents, pack=data.pack
    )


def check_packing(data: DataConfig, hf_config: Any) -> None:
    """Raises ConfigError: documents of a row would not be isolated.

    What attention may see follows from positions that restart. Layers of other kinds (linear attention, state
    spaces) carry a state from each token to the next, whatever the positions say.
    """
    kinds = sorted(set(getattr(hf_config, "layer_types", None) or ()) - _SEEN_BY_POSITIONS)
    if kinds and data.pack and data.isolate_documents:
        raise ConfigError(
            f"data.pack is true, and layers of {type(hf_config).__name__} ({', '.join(kinds)}) carry a state "
            "from one document of a row to the next; use data.pack: false, so that each document begins a "
            "row, or data.isolate_documents: false"
        )


def tokenizer_directory(data: DataConfig, model: ModelConfig, directory: Path) -> Path:
    """Where a run's tokenizer is: `data.tokenizer`, else the model's own, else trained in `directory`."""
    if data.tokenizer is not None:
        return Path(os.path.abspath(data.tokenizer))
    for source in (model.path, model.config):
        if source is not None and has_tokenizer(Path(source)):
            return Path(os.path.abspath(source))
    return directory / "tokenizer"
