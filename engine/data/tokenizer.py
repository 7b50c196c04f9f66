"""The tokenizer of a run: from a local directory or trained on the run's files, never from the network."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tierstream.engine.data.files import SourceFile, cut_jobs, read_text
from tierstream.engine.data.records import read_records
from tierstream.io import durable
from tierstream.io.errors import DataError, storage_errors

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
#: 256 bytes and the two special tokens.
TRAINED_VOCAB_MIN = 258
#: A tokenizer is trained on at most this much text, the same share from the start of every file.
TRAINING_BYTES_MAX = 256 << 20
#: What a trained tokenizer was made of.
ORIGIN_FILE = "trained_from.json"
#: One of these makes a directory one that holds a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a local directory.

    Raises:
        DataError: there is none, it has no fast implementation (character offsets are needed), or no
            end-of-text token.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise DataError(
            f"tokenizer directory {directory} does not exist (names on the hub are not looked up)"
        )
    if not has_tokenizer(directory):
        raise DataError(f"{directory} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file leads to
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"transformers cannot load the tokenizer in {directory}: {reason}") from error
    if not tokenizer.is_fast:
        raise DataError(f"the tokenizer in {directory} has no fast version; convert it to a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {directory} has no eos_token, which ends every document; add one to its "
            "tokenizer_config.json"
        )
    return tokenizer


def train_tokenizer(sources: Sequence[SourceFile], vocab_size: int, directory: Path) -> Path:
    """Train a byte-level BPE (Sennrich et al. 2016 on bytes, as GPT-2) into `directory`, or reuse what is
    there. Of records all strings are taken, whatever their field; those that cannot be read are left out.

    The same texts give the same tokenizer. Special tokens: `<|endoftext|>` (0) and `<|pad|>` (1).

    Raises:
        DataError: a file is no UTF-8 text, or damaged.
        StorageError: it cannot be written.
    """
    made_of = {
        "sha256": [source.sha256 for source in sources],
        "kinds": [source.kind for source in sources],
        "vocab_size": vocab_size,
        "format": 2,
    }
    origin = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    if _trained_from(directory) == origin:
        return directory
    tokenizer = _train(sources, vocab_size)
    temporary = directory.with_name(directory.name + ".tmp")
    durable.remove_tree(temporary)
    durable.make_directories(temporary)
    with storage_errors("writing", temporary):
        tokenizer.save_pretrained(temporary)
        (temporary / ORIGIN_FILE).write_text(json.dumps({"fingerprint": origin}))
    durable.remove_tree(directory)
    durable.publish_directory(temporary, directory)
    return directory


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Changes with anything that decides the ids of a document."""
    parts = [tokenizer.backend_tokenizer.to_str(), document_prefix(tokenizer), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def document_prefix(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer itself puts in front of a text (such as a begin-of-text token)."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a", add_special_tokens=True).input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


def _trained_from(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / ORIGIN_FILE).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _train(sources: Sequence[SourceFile], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = sum(source.nbytes for source in sources)
    share = min(1.0, TRAINING_BYTES_MAX / max(total, 1))
    texts = chain.from_iterable(_head(source, share) for source in sources)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PAD)


def _head(source: SourceFile, share: float) -> Iterator[str]:
    """About the first `share` of a file's text."""
    left = math.ceil(share * source.nbytes)
    for text in _texts(source):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _texts(source: SourceFile) -> Iterator[str]:
    if source.kind == "text":
        yield from read_text(source.path)
        return
    for job in cut_jobs(source):
        for record in read_records(job, on_bad=lambda bad: None):
            yield from _strings(record.value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
