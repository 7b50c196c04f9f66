"""A tokenizer as the makers of samples use it: its backend and a few facts, small enough for a file.

Processes that tokenise load this and need neither transformers nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tierstream.engine.data.chat import ChatTemplate
from tierstream.engine.data.tokenizer import document_prefix
from tierstream.io import durable


@dataclass(frozen=True)
class Codec:
    """Texts to ids and back.

    Args:
        backend: without truncation, padding and post-processor. (That one adds special tokens, which are
            added here by hand, and moves character offsets.)
        prefix: ids in front of a document, such as a begin-of-text token.
        end_of_text_id: ends a document.
        special_tokens: as chat templates know them, {"eos_token": "</s>", ...}.
        chat_template: Jinja source, or None.
    """

    backend: Tokenizer
    prefix: list[int]
    end_of_text_id: int
    special_tokens: dict[str, str]
    chat_template: str | None

    @classmethod
    def of(cls, tokenizer: Any) -> Codec:
        """Of a fast transformers tokenizer, which stays as it is."""
        return cls(
            _bare(tokenizer.backend_tokenizer.to_str()),
            document_prefix(tokenizer),
            int(tokenizer.eos_token_id),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            default_template(tokenizer),
        )

    @classmethod
    def load(cls, path: Path) -> Codec:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return cls(_bare(facts.pop("backend")), **facts)

    def save(self, path: Path) -> None:
        """Raises StorageError: `path` cannot be written."""
        facts = dict(vars(self), backend=self.backend.to_str())
        durable.write_file(path, json.dumps(facts).encode())

    def special_texts(self) -> list[str]:
        """The texts of all special tokens, the longest first."""
        added = self.backend.get_added_tokens_decoder().values()
        return sorted((token.content for token in added if token.special), key=len, reverse=True)

    def template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, self.special_tokens, self.special_texts())

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        return str(self.backend.id_to_token(token_id))


def end_of_answer_id(tokenizer: Any, template: str | None) -> int | None:
    """The token at which a model stops that answers by `template`; see `ChatTemplate.end_of_answer`."""
    if template is None:
        return None
    codec = Codec.of(tokenizer)
    end = codec.template(template).end_of_answer()
    return None if end is None else codec.backend.token_to_id(end)


def default_template(tokenizer: Any) -> str | None:
    """The chat template of a transformers tokenizer; of several by name the default."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _bare(text: str) -> Tokenizer:
    backend = Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    return backend
