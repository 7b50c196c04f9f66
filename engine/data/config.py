"""The data section of a run file. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass

from tierstream.engine.data.tokenizer import TRAINED_VOCAB_MIN
from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Plain text files, each one document."""

    files: list[str]
    """Text files (UTF-8) or patterns such as corpus/**/*.txt."""

    tokenizer: str | None = None
    """Directory of a transformers tokenizer; null: that of the model if it has one, else one is trained."""

    vocab_size: int = 4096
    """Tokens of a tokenizer that is trained; of no meaning otherwise."""

    seq_len: int = 1024
    """Tokens of a row."""

    isolate_documents: bool = True
    """Attention stays within a document, and positions restart at each one."""

    pack: bool = True
    """Documents share rows, end to end; false: each begins a row, and its last row ends in padding."""

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
        if self.tokenizer == "":
            raise ConfigError("data.tokenizer is empty; name a directory, or leave it out")
