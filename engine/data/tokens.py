"""The token store of a run: every document tokenised once, in files that are mapped and not read into memory.

    <run_dir>/data/tokens/
        tokens.u32       token ids, little-endian uint32, document after document; each ends with the
        end-of-text id documents.i64    first token of every document and, last, the number of tokens;
        little-endian int64 index.json       fingerprint, counts, the largest id and where it stands; see
        `TokenIndex`

The directory is complete or not there. Its fingerprint covers the content of the text files in their order,
the tokenizer and the format, and nothing else: another seq_len or another place of the files changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.encode import Piece, encode
from tierstream.engine.data.files import SourceFile, read_text
from tierstream.engine.data.tokenizer import document_prefix, tokenizer_fingerprint
from tierstream.engine.new_file import NewFile
from tierstream.io import durable
from tierstream.io.errors import DataError

FORMAT = 1
TOKENS_FILE, DOCUMENTS_FILE, INDEX_FILE = "tokens.u32", "documents.i64", "index.json"


@dataclass(slots=True)
class TokenIndex:
    """What `index.json` holds. `empty_files` had no text and are no documents."""

    fingerprint: str
    documents: int = 0
    tokens: int = 0
    empty_files: int = 0
    end_of_text_id: int = 0
    largest_id: int = -1
    largest_token: str = ""
    largest_at: str = ""
    format: int = FORMAT


@dataclass(frozen=True)
class TokenStore:
    """An open token store; `origin` says in words how it came about."""

    directory: Path
    index: TokenIndex
    tokens: NDArray[np.uint32] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    origin: str = ""


def token_fingerprint(sources: Sequence[SourceFile], tokenizer: Any) -> str:
    parts = [FORMAT, [source.sha256 for source in sources], tokenizer_fingerprint(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def open_tokens(
    sources: Sequence[SourceFile], tokenizer: Any, directory: Path, *, vocab_size: int
) -> TokenStore:
    """The tokens of `sources`: those in `directory` if they are of these files and this tokenizer, else made
    anew.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: a file is no UTF-8 text, there is no text at all, or an id has no row in the embedding.
        StorageError: the tokens cannot be written.
    """
    fingerprint = token_fingerprint(sources, tokenizer)
    index, problem = _read_index(directory)
    if index is not None and index.fingerprint == fingerprint:
        _check_largest(index, vocab_size)
        return _map(directory, index, f"{index.tokens} tokens of {index.documents} documents reused")
    if index is not None:
        before, now = index.fingerprint[:12], fingerprint[:12]
        problem = f"text files or tokenizer changed (fingerprint {before} before, {now} now)"
    temporary = directory.with_name(directory.name + ".tmp")
    durable.remove_tree(temporary)
    durable.make_directories(temporary)
    index = _tokenise(sources, tokenizer, temporary, TokenIndex(fingerprint), vocab_size)
    durable.write_file(temporary / INDEX_FILE, json.dumps(dataclasses.asdict(index), indent=2).encode())
    durable.remove_tree(directory)
    durable.publish_directory(temporary, directory)
    origin = f"{index.tokens} tokens of {index.documents} documents made"
    if index.empty_files:
        origin += f", {index.empty_files} empty files skipped"
    return _map(directory, index, f"{origin}; {problem}" if problem else origin)


def _tokenise(
    sources: Sequence[SourceFile], tokenizer: Any, directory: Path, index: TokenIndex, vocab_size: int
) -> TokenIndex:
    """Write the two arrays and count into `index`."""
    prefix = np.array(document_prefix(tokenizer), np.uint32)
    end = np.array([tokenizer.eos_token_id], np.uint32)
    index.end_of_text_id = int(end[0])
    for special in (*prefix, *end):
        _note_largest(index, tokenizer, int(special), "the start or end of every document", vocab_size)
    with NewFile(directory / TOKENS_FILE) as tokens, NewFile(directory / DOCUMENTS_FILE) as documents:
        texts = (read_text(source.path) for source in sources)
        for number, pieces in _by_document(encode(tokenizer.backend_tokenizer, texts)):
            first = tokens.nbytes // 4
            begun = False
            for piece in pieces:
                if not piece.ids.size:
                    continue
                if not begun:
                    documents.append(np.array([first], np.int64))
                    tokens.append(prefix)
                    begun = True
                largest = int(piece.ids.argmax())
                if piece.ids[largest] > index.largest_id:
                    at = f"{sources[number].path}:{piece.line_of(largest)}"
                    _note_largest(index, tokenizer, int(piece.ids[largest]), at, vocab_size)
                tokens.append(piece.ids)
            if begun:
                tokens.append(end)
            index.documents += begun
            index.empty_files += not begun
        index.tokens = tokens.nbytes // 4
        documents.append(np.array([index.tokens], np.int64))
    if not index.documents:
        raise DataError(f"the {len(sources)} files of data.files hold no text: there is nothing to train on")
    return index


def _by_document(pieces: Iterator[Piece]) -> Iterator[tuple[int, Iterator[Piece]]]:
    """Group pieces; a group must be used up before the next one is asked for."""
    for first in pieces:

        def group(piece: Piece = first) -> Iterator[Piece]:
            yield piece
            while not piece.last:
                piece = next(pieces)
                yield piece

        yield first.document, group()


def _note_largest(index: TokenIndex, tokenizer: Any, token_id: int, at: str, vocab_size: int) -> None:
    if token_id > index.largest_id:
        index.largest_id, index.largest_at = token_id, at
        index.largest_token = str(tokenizer.convert_ids_to_tokens(token_id))
        _check_largest(index, vocab_size)


def _check_largest(index: TokenIndex, vocab_size: int) -> None:
    if index.largest_id >= vocab_size:
        raise DataError(
            f"token {index.largest_token!r} has the id {index.largest_id} ({index.largest_at}), but the "
            f"embedding of the model has only {vocab_size} rows: give this model's tokenizer (data.tokenizer)"
        )


def _read_index(directory: Path) -> tuple[TokenIndex | None, str]:
    """The index of a complete token store, or why there is none (empty: nothing was there)."""
    if not directory.exists():
        return None, ""
    try:
        index = TokenIndex(**json.loads((directory / INDEX_FILE).read_text()))
        sizes = [(directory / name).stat().st_size for name in (TOKENS_FILE, DOCUMENTS_FILE)]
    except (OSError, ValueError, TypeError) as error:
        return None, f"what was in {directory} is damaged ({error})"
    if index.format != FORMAT or sizes != [4 * index.tokens, 8 * (index.documents + 1)]:
        return None, f"what was in {directory} is damaged or of another version"
    return index, ""


def _map(directory: Path, index: TokenIndex, origin: str) -> TokenStore:
    tokens = np.memmap(directory / TOKENS_FILE, "<u4", "r")
    offsets = np.memmap(directory / DOCUMENTS_FILE, "<i8", "r")
    return TokenStore(directory, index, tokens, offsets, origin)
