"""The data section of a run file. Knows nothing of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tierstream.engine.data.tokenizer import TRAINED_VOCAB_MIN
from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Texts and conversations, from files to rows of tokens."""

    files: list[str]
    """Files, patterns such as corpus/**/*.txt, or directories made by `save_to_disk` of datasets. The ending
    says what a file is: .jsonl .ndjson .json .csv .tsv .parquet .arrow hold records, any other is one text
    (UTF-8).
    """

    format: Literal["auto", "text", "prompt", "alpaca", "sharegpt", "messages"] = "auto"
    """What a record is, by its fields; auto: recognised from them. text: `text_field`; prompt: prompt and
    completion, texts or lists of messages; alpaca: instruction, input, output, system, history; sharegpt:
    conversations of from and value; messages: role, content, tool_calls, with tools beside them.
    """

    text_field: str = "text"
    """The field of a record that holds a plain text."""

    train_on: Literal["answers", "everything"] = "answers"
    """Which tokens of prompts with completions and of conversations are trained on: those that the model is
    to write, or all. Plain texts are trained on as a whole.
    """

    chat_template: str | None = None
    """File with the Jinja template of conversations; null: the tokenizer's own."""

    rewritten_turns: Literal["split", "last", "error"] = "split"
    """What to do where a template renders earlier turns in another way than when the model wrote them
    (without their thinking, say). split: a sample for each answer, just as the model sees the conversation
    when it writes that answer; last: the last answer alone is trained on; error: refused.
    """

    bad_lines: Literal["error", "skip"] = "error"
    """A record that cannot be used ends the run with its file and line, or is skipped and counted."""

    tokenizer: str | None = None
    """Directory of a transformers tokenizer; null: that of the model. With `model.config` one is trained
    where there is none."""

    vocab_size: int = 4096
    """Tokens of a tokenizer that is trained; of no meaning otherwise."""

    seq_len: int = 1024
    """Tokens of a row."""

    isolate_documents: bool = True
    """Attention stays within a document, and positions restart at each one."""

    weights: list[float] | None = None
    """Passes over each entry of `files` in an epoch; null: 1 each. With 0.5 an epoch sees half of it, and the
    next one the other half."""

    packing: Literal["auto", "stream", "whole", "none"] = "auto"
    """stream: samples end to end, cut into rows. whole: samples share rows, and none lies on two. none: each
    begins a row. auto: stream where all samples are plain texts, else whole."""

    too_long: Literal["cut", "drop", "error", "split"] = "cut"
    """What becomes of samples that are longer than a row, with packing whole or none. split, with none: they
    go on in the next row, without what came before."""

    workers: int | None = None
    """Processes that tokenise, at most; 0 or 1: none but the run's own. null: one for each core but one, and
    none for a few MB."""

    streaming: bool = False
    """Tokenise while the run trains, and keep nothing: for texts that are too many to be kept as tokens, or
    for a quick start. Samples are mixed within blocks only; needs train.steps and a tokenizer."""

    shuffle_window: int = 4096
    """Samples of a block, with `streaming`."""

    cache_dir: str | None = None
    """Where tokens are kept; null: run_dir/data. Runs may share it: what one has tokenised others find."""

    def __post_init__(self) -> None:
        if not self.files or not all(self.files):
            raise ConfigError(
                f"data.files is {self.files}; name at least one text file or pattern, and none empty"
            )
        if self.vocab_size < TRAINED_VOCAB_MIN:
            raise ConfigError(
                f"data.vocab_size is {self.vocab_size}; it must be at least {TRAINED_VOCAB_MIN} "
                "(256 bytes and two special tokens)"
            )
        if self.seq_len < 2:
            raise ConfigError(f"data.seq_len is {self.seq_len}; it must be at least 2 tokens")
        self._check_packing()
        if self.tokenizer == "":
            raise ConfigError("data.tokenizer is empty; name a directory, or leave it out")
        if not self.text_field:
            raise ConfigError("data.text_field is empty; name the field of a record that holds the text")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}; it must be at least 0")
        if self.cache_dir == "":
            raise ConfigError("data.cache_dir is empty; name a directory, or leave it out")
        if self.chat_template == "":
            raise ConfigError("data.chat_template is empty; name a file, or leave it out")

    def _check_packing(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.files):
            raise ConfigError(
                f"data.weights has {len(self.weights)} values and data.files {len(self.files)} entries; give "
                "one for each"
            )
        if self.streaming and self.weights is not None:
            raise ConfigError(
                "data.streaming is true and data.weights is set, but how many samples an entry has is known "
                "only once they are all tokenised; leave out one of them"
            )
        if self.shuffle_window < 1:
            raise ConfigError(f"data.shuffle_window is {self.shuffle_window}; it must be >= 1")
        for weight in self.weights or ():
            if not 0 < weight < math.inf:
                raise ConfigError(f"data.weights is {self.weights}; each must be a number above 0")
        if self.too_long == "split" and self.packing != "none":
            raise ConfigError(
                f"data.too_long is split and data.packing is {self.packing}; split goes with packing: none "
                "only, and packing: stream cuts nothing off"
            )
