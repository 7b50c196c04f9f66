"""Samples between steps: which prompts, when, what is written down. How: `engine.step.generation`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tierstream.engine.config import RunConfig
from tierstream.engine.data.chat import ChatTemplate, given_template
from tierstream.engine.data.codec import Codec, default_template, end_of_answer_id
from tierstream.engine.data.formats import Conversation
from tierstream.engine.data.prepare import tokenizer_directory
from tierstream.engine.data.tokenizer import document_prefix, load_tokenizer
from tierstream.engine.json_lines import RecordWriter
from tierstream.engine.metrics import Sample
from tierstream.engine.run.callbacks import Callbacks
from tierstream.engine.step.generation import Draw, generate, greedy
from tierstream.engine.step.runtime import Runtime
from tierstream.io.errors import ConfigError

#: Formats of records that are conversations where the tokenizer has a template.
_CONVERSATIONS = {"alpaca", "sharegpt", "messages"}


class Prompts:
    """The prompts of a run as ids.

    Args:
        directory: of the run's data, where its tokenizer is.
        formats: of the records that are trained on.

    Raises:
        ConfigError: a chat template is missing or no Jinja, or a prompt does not fit into the model.
        DataError: the chat template fails.
    """

    def __init__(self, config: RunConfig, directory: Path, formats: set[str], hf_config: Any) -> None:
        self.texts = config.sample.prompts or []
        self._tokenizer = load_tokenizer(tokenizer_directory(config.data, config.model, directory))
        given = given_template(config.data)
        template = default_template(self._tokenizer) if given is None else given
        chat = config.sample.chat
        if chat is None:
            chat = template is not None and bool(formats & _CONVERSATIONS)
        if chat and template is None:
            raise ConfigError(
                "sample.chat is true, but the tokenizer has no chat template; name a file in "
                "data.chat_template, or set sample.chat to false"
            )
        template = template if chat else None
        asked = None if template is None else Codec.of(self._tokenizer).template(template)
        self.ids = [self._encode(text, asked) for text in self.texts]
        ends = hf_config.eos_token_id
        answer_end = end_of_answer_id(self._tokenizer, template)
        ends = [*(ends if isinstance(ends, list) else [ends]), self._tokenizer.eos_token_id, answer_end]
        self.end_ids = set(ends) - {None}
        self._check(config.sample.max_tokens, hf_config)

    def text(self, ids: Sequence[int]) -> str:
        """Of what was written, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _encode(self, text: str, template: ChatTemplate | None) -> list[int]:
        tokenizer = self._tokenizer
        if template is None:
            return [*document_prefix(tokenizer), *tokenizer(text, add_special_tokens=False).input_ids]
        rendered = template.prompt(Conversation([{"role": "user", "content": text}]))
        return list(tokenizer(rendered, add_special_tokens=False).input_ids)

    def _check(self, max_tokens: int, hf_config: Any) -> None:
        positions = getattr(hf_config, "max_position_embeddings", None)
        for text, ids in zip(self.texts, self.ids, strict=True):
            if not ids:
                raise ConfigError(f"sample.prompts: {text!r} has no token")
            if max(ids) >= hf_config.vocab_size:
                raise ConfigError(
                    f"sample.prompts: {text!r} has the token {max(ids)}, but the embedding of the model has "
                    f"only {hf_config.vocab_size} rows; raise model.vocab_size, or write another prompt"
                )
            if positions is not None and len(ids) + max_tokens > positions:
                raise ConfigError(
                    f"sample.max_tokens is {max_tokens}, and with the {len(ids)} tokens of {text[:40]!r} "
                    f"that is more than the {positions} positions of the model; lower it, or shorten the "
                    "prompt"
                )


class Sampler:
    """Has the run write its samples when they are due.

    Args:
        writer: of `samples.jsonl`.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: Prompts,
        runtime: Runtime,
        callbacks: Callbacks,
        writer: RecordWriter,
    ) -> None:
        self._config, self._train = config.sample, config.train
        self._prompts, self._runtime = prompts, runtime
        self._callbacks, self._writer = callbacks, writer

    def run(self, step: int) -> None:
        """After `step`. Raises StorageError: a record cannot be written."""
        config, prompts = self._config, self._prompts
        generator = torch.Generator().manual_seed(self._train.seed_of_step(step))
        draw = Draw(config.temperature, config.top_p, generator) if config.temperature else greedy
        begin = time.perf_counter()
        found = generate(
            self._runtime, prompts.ids, max_tokens=config.max_tokens, end_ids=prompts.end_ids, choose=draw
        )
        seconds = time.perf_counter() - begin
        for prompt, ids in zip(prompts.texts, found, strict=True):
            sample = Sample(
                step=step, prompt=prompt, text=prompts.text(ids), tokens=len(ids), seconds=seconds
            )
            self._writer.write(sample)
            self._callbacks.on_sample(sample)
