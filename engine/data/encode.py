"""Texts of any length to token ids, in bounded memory and with all cores, and the same ids as in one piece.

A long text is cut into overlapping windows, which are encoded independently. Tokenisers are local: what a
token is depends on the text around it, not on text far away. So in the middle of an overlap, where both
windows see thousands of characters on either side, they must give the same tokens; there they are joined. If
they do not agree (one endless word), the two windows are encoded as one, at worst up to the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Characters of a window, and of the overlap of two.
WINDOW_CHARS = 256 << 10
OVERLAP_CHARS = 8 << 10
#: Characters that are encoded at once, over all cores.
BATCH_CHARS = 4 << 20


@dataclass(slots=True)
class Window:
    """A part of a document. `begin`, `line`: characters and line feeds of the document before it; `last`: the
    document ends here.
    """

    document: int
    text: str
    begin: int
    line: int
    last: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Ids of a document. `starts`, `ends`: the characters of `text` that each stands for; `begin`, `line`:
    where `text` begins in the document, from 0.
    """

    document: int
    ids: NDArray[np.uint32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    text: str
    begin: int
    line: int
    last: bool

    def line_of(self, index: int) -> int:
        """Line of a token in the document, from 1."""
        return self.line + self.text.count("\n", 0, int(self.starts[index])) + 1


def encode(
    backend: Any,
    documents: Iterable[Iterable[str]],
    *,
    window_chars: int = WINDOW_CHARS,
    overlap_chars: int = OVERLAP_CHARS,
    batch_chars: int = BATCH_CHARS,
) -> Iterator[Piece]:
    """Encode documents, each given as pieces of text; every document ends with a piece that is `last`.

    Args:
        backend: a `tokenizers.Tokenizer`; its truncation and padding are turned off.
    """
    backend.no_truncation()
    backend.no_padding()
    windows = (
        window
        for number, texts in enumerate(documents)
        for window in cut(number, texts, window_chars, overlap_chars)
    )
    left: _Encoded | None = None
    for batch in _batches(windows, batch_chars):
        encodings = backend.encode_batch([window.text for window in batch], add_special_tokens=False)
        for window, encoding in zip(batch, encodings, strict=True):
            right = _Encoded.of(window, encoding)
            if left is not None:
                seam = left.seam_with(right, overlap_chars)
                if seam is None:
                    right = left.merged_with(right.window, backend, overlap_chars)
                else:
                    yield left.piece(seam[0], last=False)
                    right.begin = seam[1]
            if right.window.last:
                yield right.piece(len(right.ids), last=True)
                left = None
            else:
                left = right


def cut(document: int, texts: Iterable[str], window_chars: int, overlap_chars: int) -> Iterator[Window]:
    """Windows over a document; each but the first begins with the last `overlap_chars` of the one before."""
    held, begin, line = "", 0, 0
    step = window_chars - overlap_chars
    for text in texts:
        held += text
        at = 0
        while len(held) - at > window_chars:
            yield Window(document, held[at : at + window_chars], begin, line, last=False)
            line += held.count("\n", at, at + step)
            begin += step
            at += step
        held = held[at:]
    yield Window(document, held, begin, line, last=True)


def _batches(windows: Iterable[Window], batch_chars: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    chars = 0
    for window in windows:
        batch.append(window)
        chars += len(window.text)
        if chars >= batch_chars:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


@dataclass(slots=True)
class _Encoded:
    """One encoded window. Its tokens before `begin` were handed out with the window before."""

    window: Window
    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    begin: int = 0

    @classmethod
    def of(cls, window: Window, encoding: Any, begin: int = 0) -> _Encoded:
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return cls(window, np.array(encoding.ids, np.uint32), offsets, begin)

    def seam_with(self, right: _Encoded, overlap_chars: int) -> tuple[int, int] | None:
        """Token indices in both windows at which this one ends and the next begins; None if they disagree."""
        shift = len(self.window.text) - overlap_chars
        low, high = overlap_chars // 4, overlap_chars - overlap_chars // 4
        mine = self._within(shift + low, shift + high)
        its = right._within(low, high)
        same = (
            mine.size > 0
            and np.array_equal(self.ids[mine], right.ids[its])
            and np.array_equal(self.offsets[mine] - shift, right.offsets[its])
        )
        middle = mine.size // 2
        return (int(mine[middle]), int(its[middle])) if same else None

    def merged_with(self, after: Window, backend: Any, overlap_chars: int) -> _Encoded:
        """Both windows encoded as one."""
        window, text = self.window, self.window.text + after.text[overlap_chars:]
        merged = Window(window.document, text, window.begin, window.line, after.last)
        return _Encoded.of(merged, backend.encode(text, add_special_tokens=False), self.begin)

    def _within(self, low: int, high: int) -> NDArray[np.intp]:
        """Indices of the tokens whose characters all lie in `[low, high)`."""
        return np.flatnonzero((self.offsets[:, 0] >= low) & (self.offsets[:, 1] <= high))

    def piece(self, end: int, *, last: bool) -> Piece:
        window, chosen = self.window, slice(self.begin, end)
        starts, ends = self.offsets[chosen, 0], self.offsets[chosen, 1]
        return Piece(
            window.document, self.ids[chosen], starts, ends, window.text, window.begin, window.line, last
        )
