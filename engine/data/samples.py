"""From a job to samples of token ids, each id marked as trained on or not.

Marks come from where a token stands in its text, never from which token it is: an end-of-text inside of a
prompt is not trained on, the one that ends an answer is.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.encode import Piece, encode
from tierstream.engine.data.files import Job, read_text
from tierstream.engine.data.tokenizer import tokenizer_fingerprint
from tierstream.io.errors import DataError

#: Set in an id that is not trained on, as a label.
UNTRAINED = np.uint32(1 << 31)
#: Part of every fingerprint: raised when the same files and recipe come to mean other ids.
FORMAT = 2
#: Problems that are told in words.
PROBLEMS_MAX = 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the ids of a job, together with the bytes of its file. The fields are those of
    `DataConfig`, but for `tokenizer`, a directory, and `chat_template`, the template itself.
    """

    tokenizer: str
    format: str = "auto"
    text_field: str = "text"
    train_on: str = "answers"
    rewritten_turns: str = "split"
    chat_template: str | None = None
    bad_lines: str = "error"

    @classmethod
    def of(cls, data: DataConfig, directory: Path, tokenizer: Any) -> Recipe:
        """Of a run whose `tokenizer` is from `directory`.

        Raises:
            DataError: the file `data.chat_template` cannot be read.
        """
        template = Codec.of(tokenizer).chat_template
        if data.chat_template is not None:
            template = "".join(read_text(Path(data.chat_template)))
        return cls(
            str(directory),
            data.format,
            data.text_field,
            data.train_on,
            data.rewritten_turns,
            template,
            data.bad_lines,
        )

    def fingerprint(self, tokenizer: Any) -> str:
        """Changes with anything that decides ids, but not with the place of the tokenizer."""
        parts = asdict(self) | {"tokenizer": tokenizer_fingerprint(tokenizer), "recipe": FORMAT}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class TokenPiece:
    """Ids of a sample in their order (uint32, with `UNTRAINED`), all of them or, of a long text, a part.

    Attributes:
        line: of the file, from 1, where the sample begins; the row in parquet and arrow.
        last: the sample ends here.
    """

    ids: NDArray[np.uint32]
    line: int
    last: bool


@dataclass(slots=True)
class Counts:
    """What became of the records of a job.

    Attributes:
        samples: handed out.
        bad_records: skipped since they could not be used (`data.bad_lines: skip`).
        empty: without any text.
        untrained: samples kept out since nothing of them would be trained on.
        rewritten: conversations whose template renders earlier turns anew.
        by_format: records of each format.
        problems: the first ones, with file and line.
    """

    records: int = 0
    samples: int = 0
    bad_records: int = 0
    empty: int = 0
    untrained: int = 0
    rewritten: int = 0
    by_format: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def add(self, other: Counts) -> None:
        """Add those of another job, which comes after."""
        for name in ("records", "samples", "bad_records", "empty", "untrained", "rewritten"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, number in other.by_format.items():
            self.by_format[name] = self.by_format.get(name, 0) + number
        for text in other.problems:
            self.problem(text)


@dataclass(slots=True)
class _Sample:
    """A text on its way through the encoder. `spans`: characters that are trained on; None: all of them."""

    texts: Iterable[str]
    line: int
    spans: list[tuple[int, int]] | None = None


class SampleMaker:
    """Makes the samples of jobs, one job after another.

    Args:
        codec: of the tokenizer of the recipe.
        vocab_size: rows of the model's embedding.

    Attributes:
        counts: of the last job; complete when its samples are used up.

    Raises:
        DataError: the ids that begin or end a document have no row in the embedding.
    """

    def __init__(self, recipe: Recipe, codec: Codec, *, vocab_size: int) -> None:
        self._recipe = recipe
        self._codec = codec
        self._vocab_size = vocab_size
        self.counts = Counts()
        self._prefix = np.array(codec.prefix, np.uint32)
        self._end = np.array([codec.end_of_text_id], np.uint32)
        for token_id in (*codec.prefix, codec.end_of_text_id):
            self._check_id(token_id, "the start or end of every document")

    def make(self, job: Job) -> Iterator[TokenPiece]:
        """The samples of a job, in its order; each ends with a piece that is `last`.

        Raises:
            DataError: a file or record that cannot be used, with file and line; an id without a row in the
                embedding.
        """
        self.counts = Counts()
        samples: deque[_Sample] = deque()  # in the encoder, which reads ahead

        def documents() -> Iterator[Iterable[str]]:
            for sample in self._samples(job):
                samples.append(sample)
                yield sample.texts

        for pieces in _by_document(encode(self._codec.backend, documents())):
            yield from self._plain(samples.popleft(), pieces, job)

    def _samples(self, job: Job) -> Iterator[_Sample]:
        if job.kind == "text":
            self.counts.records += 1
            self.counts.by_format["text"] = self.counts.by_format.get("text", 0) + 1
            yield _Sample(read_text(Path(job.path)), 1)

    def _plain(self, sample: _Sample, pieces: Iterator[Piece], job: Job) -> Iterator[TokenPiece]:
        """Begin of text, the text, end of text, as they come."""
        begun = False
        for piece in pieces:
            parts = [piece.ids]
            if piece.ids.size and not begun:
                parts.insert(0, self._prefix)
                begun = True
            if piece.last and begun:
                parts.append(self._end)
            self._check(piece, sample.line, job)
            ids = np.concatenate(parts)
            if ids.size:
                yield TokenPiece(ids, sample.line, piece.last)
        self.counts.samples += begun
        self.counts.empty += not begun

    def _check(self, piece: Piece, line: int, job: Job) -> None:
        if piece.ids.size:
            at = int(piece.ids.argmax())
            if job.kind == "text":
                line = piece.line_of(at)
            self._check_id(int(piece.ids[at]), f"{job.path}:{line}")

    def _check_id(self, token_id: int, at: str) -> None:
        if token_id >= self._vocab_size:
            raise DataError(
                f"token {self._codec.token(token_id)!r} has the id {token_id} ({at}), but the embedding of "
                f"the model has only {self._vocab_size} rows: give this model's tokenizer (data.tokenizer)"
            )


def _by_document(pieces: Iterator[Piece]) -> Iterator[Iterator[Piece]]:
    """Group pieces; a group must be used up before the next one is asked for."""
    for first in pieces:

        def group(piece: Piece = first) -> Iterator[Piece]:
            yield piece
            while not piece.last:
                piece = next(pieces)
                yield piece

        yield group()
