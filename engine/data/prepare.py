"""From the files of a run to its rows: tokenizer, token store, and what the model's layers ask of packing."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import find_files, fingerprint_files
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.tokenizer import has_tokenizer, load_tokenizer, train_tokenizer
from tierstream.engine.data.tokens import TokenStore as TokenFiles
from tierstream.engine.data.tokens import open_tokens
from tierstream.engine.model_config import ModelConfig
from tierstream.io.errors import ConfigError, DataError

#: Kinds of layers, as transformers names them, in which documents of a row do not see each other.
_SEEN_BY_POSITIONS = {"full_attention", "sliding_attention", "chunked_attention"}


def open_rows(
    data: DataConfig, model: ModelConfig, directory: Path, *, vocab_size: int, rows_per_step: int, seed: int
) -> Rows:
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
    files = open_tokens(sources, load_tokenizer(chosen), directory / "tokens", vocab_size=vocab_size)
    store: Any = _TextFiles(files, [str(source.path) for source in sources if source.nbytes])
    return Rows([store], dataclasses.replace(data, weights=None), rows_per_step=rows_per_step, seed=seed)


class _TextFiles:
    """Documents of plain text, as rows read them."""

    def __init__(self, files: TokenFiles, paths: list[str]) -> None:
        self.fingerprint, self.end_of_text_id = files.index.fingerprint, files.index.end_of_text_id
        self.documents, self.origin, self.masked = files.index.documents, files.origin, False
        self.lengths = np.diff(files.offsets)
        self.first_trained = np.ones_like(self.lengths)
        self._tokens, self._offsets, self._paths = files.tokens, files.offsets, paths

    def read(self, document: int, start: int, stop: int) -> NDArray[np.uint32]:
        begin, end = self._offsets[document : document + 2]
        return self._tokens[begin + start : min(begin + stop, end)]

    def where(self, document: int) -> str:
        return f"{self._paths[document]}:1"


def check_packing(data: DataConfig, hf_config: Any) -> None:
    """Raises ConfigError: documents of a row would not be isolated.

    What attention may see follows from positions that restart. Layers of other kinds (linear attention, state
    spaces) carry a state from each token to the next, whatever the positions say.
    """
    kinds = sorted(set(getattr(hf_config, "layer_types", None) or ()) - _SEEN_BY_POSITIONS)
    if kinds and data.packing != "none" and data.isolate_documents:
        raise ConfigError(
            f"data.packing is {data.packing}, and layers of {type(hf_config).__name__} ({', '.join(kinds)}) "
            "carry a state from one document of a row to the next; use data.packing: none, so that each "
            "begins a row (data.too_long says what becomes of long ones), or data.isolate_documents: false"
        )


def tokenizer_directory(data: DataConfig, model: ModelConfig, directory: Path) -> Path:
    """Where a run's tokenizer is: `data.tokenizer`, else the model's own, else trained in `directory`."""
    if data.tokenizer is not None:
        return Path(os.path.abspath(data.tokenizer))
    for source in (model.path, model.config):
        if source is not None and has_tokenizer(Path(source)):
            return Path(os.path.abspath(source))
    return directory / "tokenizer"
