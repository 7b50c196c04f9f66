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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstream.engine.data import formats
from tierstream.engine.data.chat import Rendered, given_template
from tierstream.engine.data.codec import Codec, default_template
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.encode import Piece, encode
from tierstream.engine.data.files import Job, read_text
from tierstream.engine.data.formats import Completion, Plain
from tierstream.engine.data.records import BadRecord, Record, read_records
from tierstream.engine.data.tokenizer import tokenizer_fingerprint
from tierstream.io.errors import DataError

#: Set in an id that is not trained on, as a label.
UNTRAINED = np.uint32(1 << 31)
#: Part of every fingerprint: raised when the same files and recipe come to mean other ids.
FORMAT = 3
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
        given = given_template(data)
        return cls(
            str(directory),
            data.format,
            data.text_field,
            data.train_on,
            data.rewritten_turns,
            default_template(tokenizer) if given is None else given,
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
        records: with those that are bad; a text file is one.
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
    """A text on its way through the encoder.

    Attributes:
        spans: characters that are trained on, ascending; None: all.
        prefix: the tokenizer's own first ids belong in front.
        end: end-of-text belongs behind, and is trained on; None: it does not belong there.
    """

    texts: Iterable[str]
    line: int
    spans: list[tuple[int, int]] | None = None
    prefix: bool = True
    end: bool | None = True


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
        self.counts = Counts()
        self._recipe = recipe
        self._codec = codec
        self._vocab_size = vocab_size
        self._specials = tuple(codec.special_texts())
        self._added = frozenset(codec.backend.get_added_tokens_decoder())
        self._template = None
        if recipe.chat_template is not None:
            self._template = codec.template(recipe.chat_template)
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
            sample = samples.popleft()
            checked = (self._checked(piece, sample, job) for piece in pieces)
            if sample.spans is None:
                yield from self._plain(sample, checked)
            else:
                yield from self._marked(sample, checked, job)

    def _samples(self, job: Job) -> Iterator[_Sample]:
        if job.kind == "text":
            self.counts.records += 1
            self._count_format("text")
            yield _Sample(read_text(Path(job.path)), 1)
            return
        for record in read_records(job, self._unreadable):
            self.counts.records += 1
            try:
                samples = self._of_record(record)
            except DataError as error:
                self._bad(BadRecord(record.path, record.line, 0, str(error)))
                continue
            yield from samples

    def _unreadable(self, bad: BadRecord) -> None:
        self.counts.records += 1
        self._bad(bad)

    def _of_record(self, record: Record) -> list[_Sample]:
        """Raises DataError: the record cannot be used, without its place."""
        recipe = self._recipe
        kind = recipe.format
        if kind == "auto":
            kind = formats.recognise(record.value, recipe.text_field)
        chat, answers = self._template is not None, recipe.train_on == "answers"
        sample = formats.to_sample(record.value, kind, recipe.text_field, chat=chat)
        if isinstance(sample, Plain):
            samples = [_Sample((sample.text,), record.line)]
        elif isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            spans = [(len(sample.prompt), len(text))] if answers else None
            samples = [_Sample((text,), record.line, spans)]
        elif self._template is None:
            raise DataError(
                f"a conversation needs a chat template, and the tokenizer in {recipe.tokenizer} has none; "
                "name a file with one (data.chat_template)"
            )
        else:
            texts = self._template.render(sample, answers=answers, rewritten_turns=recipe.rewritten_turns)
            self.counts.rewritten += any(text.rewritten for text in texts)
            samples = [self._of_rendered(text, record.line) for text in texts]
        self._count_format(kind)
        return samples

    def _of_rendered(self, rendered: Rendered, line: int) -> _Sample:
        """End-of-text only where the text does not end with a special token, such as that of a turn's end."""
        text = rendered.text.rstrip()
        end = None
        if not text.endswith(self._specials):
            end = bool(rendered.spans) and rendered.spans[-1][1] >= len(text)
        return _Sample((rendered.text,), line, rendered.spans, prefix=False, end=end)

    def _plain(self, sample: _Sample, pieces: Iterable[Piece]) -> Iterator[TokenPiece]:
        """Prefix, text and end of text, as they come: a text may be longer than memory."""
        begun = False
        for piece in pieces:
            ids = piece.ids
            if ids.size and not begun:
                ids = np.concatenate([np.array(self._codec.prefix, np.uint32), ids])
                begun = True
            if piece.last and begun:
                ids = np.append(ids, np.uint32(self._codec.end_of_text_id))
            if ids.size:
                yield TokenPiece(ids, sample.line, piece.last)
        self.counts.samples += begun
        self.counts.empty += not begun

    def _marked(self, sample: _Sample, pieces: Iterable[Piece], job: Job) -> Iterator[TokenPiece]:
        found = self._with_marks(sample, list(pieces))
        if found is None:
            reason = "prompt and answer, encoded one by one, do not decode to their texts"
            self._bad(BadRecord(job.path, sample.line, 0, reason))
            return
        ids, trained = found
        if not ids.size:
            self.counts.empty += 1
            return
        head = self._codec.prefix if sample.prefix else []
        tail = [self._codec.end_of_text_id] if sample.end is not None else []
        ids = np.concatenate([np.array(head, np.uint32), ids, np.array(tail, np.uint32)])
        trained = np.concatenate([np.zeros(len(head), bool), trained, np.full(len(tail), sample.end, bool)])
        if not trained[1:].any():  # the first token is nobody's label
            self.counts.untrained += 1
            self.counts.problem(f"{job.path}:{sample.line}: nothing in it is trained on")
            return
        ids[~trained] |= UNTRAINED
        self.counts.samples += 1
        yield TokenPiece(ids, sample.line, last=True)

    def _with_marks(
        self, sample: _Sample, pieces: list[Piece]
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]] | None:
        """Ids, and which of them are trained on; None: it cannot be said of each token."""
        ids = np.concatenate([piece.ids for piece in pieces])
        starts = np.concatenate([piece.starts + piece.begin for piece in pieces])
        ends = np.concatenate([piece.ends + piece.begin for piece in pieces])
        text = "".join(sample.texts)
        edges = [edge for span in sample.spans or [] for edge in span]
        firsts = np.searchsorted(starts, edges).tolist()  # the first token behind each edge
        for number, (edge, first) in enumerate(zip(edges, firsts, strict=True)):
            end = ends[first - 1] if first else 0
            begin = starts[first] if first < ids.size else len(text)
            if end > edge and int(ids[first - 1]) in self._added:
                # Some added tokens take in the white space beside them. They are where their own text is.
                firsts[number] = first if text[starts[first - 1] : edge].strip() else first - 1
            elif not end == edge == begin:  # a token of both sides, or a character that is in none
                return self._apart(text, edges)
        trained = np.zeros(ids.size, bool)
        for first, last in zip(firsts[::2], firsts[1::2], strict=True):
            trained[first:last] = True
        return ids, trained

    def _apart(self, text: str, edges: list[int]) -> tuple[NDArray[np.uint32], NDArray[np.bool_]] | None:
        """The parts of a text encoded one by one, as at inference: there no token begins in the prompt and
        ends in the answer. None: they do not decode to what they are.
        """
        parts = [text[begin:end] for begin, end in pairwise([0, *edges, len(text)])]
        ids: list[list[NDArray[np.uint32]]] = [[] for _ in parts]
        for piece in encode(self._codec.backend, ((part,) for part in parts)):
            ids[piece.document].append(piece.ids)
        joined = [np.concatenate(each) for each in ids]
        whole = np.concatenate(joined)
        for part, part_ids in zip((*parts, text), (*joined, whole), strict=True):
            if self._codec.decode(part_ids.tolist()) != part:
                return None
        return whole, np.concatenate([np.full(each.size, bool(i % 2)) for i, each in enumerate(joined)])

    def _bad(self, bad: BadRecord) -> None:
        if self._recipe.bad_lines == "error":
            raise bad.error()
        self.counts.bad_records += 1
        self.counts.problem(str(bad))

    def _count_format(self, kind: str) -> None:
        self.counts.by_format[kind] = self.counts.by_format.get(kind, 0) + 1

    def _checked(self, piece: Piece, sample: _Sample, job: Job) -> Piece:
        if piece.ids.size:
            at = int(piece.ids.argmax())
            line = piece.line_of(at) if job.kind == "text" else sample.line
            self._check_id(int(piece.ids[at]), f"{job.path}:{line}")
        return piece

    def _check_id(self, token_id: int, at: str) -> None:
        if token_id >= self._vocab_size:
            raise DataError(
                f"token {self._codec.token(token_id)!r} has the id {token_id} ({at}), but the embedding of "
                f"the model has only {self._vocab_size} rows: give this model's tokenizer (data.tokenizer), "
                "or the model as many rows as this one has tokens (model.vocab_size)"
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
