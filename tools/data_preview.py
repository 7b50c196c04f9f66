"""`tierstream data preview RUN.yaml [--rows N] [--section.key value ...]`"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from tierstream.engine.config import RunConfig
from tierstream.io.errors import ConfigError
from tierstream.tools.live import ConsoleCallback
from tierstream.tools.options import parse_run
from tierstream.tools.tables import open_console, table

if TYPE_CHECKING:
    from tierstream.engine.data.rows import Batch, Rows
    from tierstream.engine.data.shards import TokenStore

_DESCRIPTION = """\
Show the data of a run as the model will see it.
- All of `data.files` is tokenised, as in training, and training finds it done.
- Trained tokens are green on a terminal, {+so+} elsewhere.
- Neither a GPU nor the weights of the model are needed.
"""
#: Sizes of what is shown: bars of the histogram, places of samples, the characters at either end of a part of
#: a row that is longer.
_BAR_COLUMNS, _PLACES, _EDGE_CHARACTERS = 28, 5, 300
_NAME_COLUMNS = 30


@dataclass(kw_only=True, slots=True)
class PreviewConfig(RunConfig):
    """What to show; the rest is the run."""

    rows: int = 2
    """Rows to show, the first that are trained on."""
    whole: bool = False
    """Show rows as a whole, not only the ends of their long parts."""


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    config = parse_run(PreviewConfig, args, command="tierstream data preview", description=_DESCRIPTION)
    if config.rows < 0:
        raise ConfigError(f"--rows is {config.rows}; it must be >= 0")
    preview(config, open_console(sys.stdout))
    return 0


def preview(config: PreviewConfig, console: Console) -> None:
    """Prepare the data and show it. Raises TierstreamError, as training does."""
    from tierstream.engine.data.prepare import check_packing, tokenizer_directory
    from tierstream.engine.data.rows import Rows
    from tierstream.engine.data.tokenizer import load_tokenizer
    from tierstream.engine.model.meta_model import read_hf_config
    from tierstream.engine.parity.gate import pass_gate

    data, directory = config.data, Path(config.run_dir) / "data"
    hf_config = read_hf_config(config.model)
    check_packing(data, config.model.attention, pass_gate(config.model, console.print))
    # A step of one row: the rows of the run in their order, whatever the steps.
    single = _open_rows(config, directory, hf_config.vocab_size)
    names = ["the first block"] if data.streaming else [_shortened(name) for name in data.files]
    _print_entries(console, names, single.stores)
    _print_lengths(console, np.concatenate([store.lengths for store in single.stores]), data.seq_len)
    rows = Rows(single.stores, data, rows_per_step=config.train.rows_per_step, seed=config.train.seed)
    for line in rows.describe():
        console.print(line.replace("an epoch", "a block") if data.streaming else line)
    _print_places(console, rows)
    if config.rows:
        tokenizer = load_tokenizer(tokenizer_directory(data, config.model, directory))
        for number in range(min(config.rows, single.total_steps(1))):
            _print_row(console, tokenizer, single, number, whole=config.whole)


def _open_rows(config: PreviewConfig, directory: Path, vocab_size: int) -> Rows:
    """The rows that are trained on, in steps of one; with `data.streaming` those of the first block."""
    from tierstream.engine.data.holdout import hold_out
    from tierstream.engine.data.prepare import open_data
    from tierstream.engine.data.rows import Rows
    from tierstream.engine.data.stream import open_stream

    settings, seed = (config.data, config.model, directory), config.train.seed
    if config.data.streaming:
        stream = open_stream(*settings, vocab_size=vocab_size, rows_per_step=1, seed=seed, cursor=None)
        try:
            return stream.block(0)
        finally:
            stream.close()
    with ConsoleCallback() as screen:
        stores = open_data(*settings, vocab_size=vocab_size, on_progress=screen.on_progress)
    if config.eval.share is not None:
        stores, _ = hold_out(stores, config.eval.share, seed)
    return Rows(stores, config.data, rows_per_step=1, seed=seed)


def _print_entries(console: Console, names: Sequence[str], stores: Sequence[TokenStore]) -> None:
    lines = []
    for name, store in zip(names, stores, strict=True):
        formats = ", ".join(f"{what} {number:,}" for what, number in store.counts.by_format.items())
        tokens, trained = store.tokens, trained_tokens(store)
        share = f"{100 * trained / tokens:.1f} %"
        lines.append((name, formats, f"{store.documents:,}", f"{tokens:,}", f"{trained:,}", share))
    columns = ("files", "records", "samples", "tokens", "trained", "share")
    console.print(table("Data", columns, lines, text_columns=2))
    for name, store in zip(names, stores, strict=True):
        counts = store.counts
        for number, what in (
            (counts.bad_records, "records that cannot be used, skipped (data.bad_lines)"),
            (counts.empty, "records without text"),
            (counts.untrained, "samples without a token to train on, left out"),
            (counts.rewritten, "conversations whose template renders earlier turns anew"),
        ):
            if number:
                console.print(f"{name}: {number:,} {what}")
        for problem in counts.problems[:_PLACES]:
            console.print(f"  {problem}", soft_wrap=True)


def trained_tokens(store: TokenStore) -> int:
    """Tokens that are labels: marked as trained on, and not the first of a document."""
    from tierstream.engine.data.samples import UNTRAINED

    if not store.masked:
        return store.tokens - store.documents
    documents = (store.read(document, 1, int(store.lengths[document])) for document in range(store.documents))
    return sum(int(np.count_nonzero(ids < UNTRAINED)) for ids in documents)


def _print_lengths(console: Console, lengths: NDArray[np.int64], seq_len: int) -> None:
    """A histogram whose bins end at powers of two, and at the length of a row."""
    median, longest = int(np.median(lengths)), int(lengths.max())
    console.print(f"Tokens of a sample: median {median:,}, longest {longest:,}; a row has {seq_len:,}")
    first = int(lengths.min()).bit_length() - 1
    edges = sorted({1 << power for power in range(first, longest.bit_length() + 1)} | {seq_len + 1})
    counts, _ = np.histogram(lengths, edges)
    for (low, high), number in zip(pairwise(edges), counts.tolist(), strict=True):
        if number:
            bar = "#" * max(1, round(_BAR_COLUMNS * number / counts.max()))
            beyond = "  longer than a row" if low > seq_len else ""
            console.print(f"{low:>9,} - {high - 1:<9,} {bar} {number:,}{beyond}", soft_wrap=True)


def _print_places(console: Console, rows: Rows) -> None:
    """Where the samples are that the last lines have counted as left out."""
    places = rows.left_out()
    for place in places[:_PLACES]:
        console.print(f"  left out: {place}", soft_wrap=True)
    if len(places) > _PLACES:
        console.print(f"  and {len(places) - _PLACES:,} more")


def _print_row(console: Console, tokenizer: Any, rows: Rows, number: int, *, whole: bool) -> None:
    batch, on_terminal = rows.batch(number), console.is_terminal
    held = rows.seq_len - (0 if batch.padding is None else int(batch.padding.sum()))
    console.print(f"\nRow {number + 1}: {held:,} tokens, {batch.trained_tokens:,} trained", style="bold")
    places = iter(rows.where(number))
    text = Text()
    for ids, trained, begins in parts(batch):
        if begins:
            text.append(("\n" if text else "") + f"-- {next(places)}\n", "dim")
        words = _shown(tokenizer.decode(ids.tolist(), skip_special_tokens=False), whole=whole)
        text.append(f"{{+{words}+}}" if trained and not on_terminal else words, "green" if trained else "")
    console.print(text, soft_wrap=True)  # the text as it is; a terminal wraps it


def parts(batch: Batch) -> Iterator[tuple[NDArray[np.int64], bool, bool]]:
    """The tokens of a row in runs, whether a run is trained on as labels, and whether a sample begins with it
    (as far as positions say it).
    """
    from tierstream.engine.data.rows import NOT_TRAINED

    ids, labels, begins = batch.input_ids[0], batch.labels[0], batch.position_ids[0] == 0
    if batch.padding is not None:
        held = int(np.count_nonzero(~batch.padding[0]))
        ids, labels, begins = ids[:held], labels[:held], begins[:held]
    # A label stands one place before its token; the first token of a row is none.
    trained = np.concatenate([[False], labels[:-1] != NOT_TRAINED])
    inner = np.flatnonzero(np.diff(trained) | begins[1:]) + 1
    for begin, end in pairwise([0, *inner.tolist(), ids.size]):
        yield ids[begin:end], bool(trained[begin]), bool(begins[begin])


def _shown(text: str, *, whole: bool) -> str:
    """A text from the data, safe on a terminal; of a long one its ends."""
    hidden = len(text) - 2 * _EDGE_CHARACTERS
    if hidden > 0 and not whole:
        text = f"{text[:_EDGE_CHARACTERS]} (... {hidden:,} characters ...) {text[-_EDGE_CHARACTERS:]}"
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_COLUMNS else f"...{name[3 - _NAME_COLUMNS :]}"
