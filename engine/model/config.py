"""The `model` section of a run: where the architecture and the first weights come from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Exactly one of `path` and `config` is given."""

    path: str | None = None
    """Local Hugging Face model directory (config.json and safetensors) that training starts from."""

    config: str | None = None
    """config.json, or a directory that holds one: the architecture alone, with seeded random weights."""

    vocab_size: int | None = None
    """Rows of embedding and output matrix, for a tokenizer with more tokens than the model, or fewer; null:
    the model's own. With `path`, new rows begin as the mean of the stored ones; fewer leave out the last."""

    freeze: list[str] | None = None
    """Parameters that are not trained, by patterns of their names, such as model.embed_tokens.* or
    *.layers.[0-7].*: they have no optimizer state, no gradient and no decay. Layers before the first that is
    trained need no backward."""

    train_only: list[str] | None = None
    """The only parameters that are trained, by patterns such as *norm* or *.self_attn.*; of them those that
    `freeze` names are not."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which weights are computed with. The optimizer keeps an fp32 master in both."""

    attention: Literal["auto", "sdpa", "eager", "sinks"] = "auto"
    """Those of transformers, and sinks: attention with sinks (gpt-oss) by flash kernels. auto: sinks where a
    model has some, else sdpa, or eager where it has no sdpa or caps scores (gemma2)."""

    trust_remote_code: bool = False
    """Run the Python code that the model directory brings along (`auto_map` in its config.json), for
    architectures that transformers does not have. It may do whatever you may do: read it first."""

    @property
    def directory(self) -> Path:
        """That of config.json and of what lies beside it."""
        place = Path(os.path.abspath(self.path or self.config or ""))
        return place.parent if place.is_file() else place

    @property
    def code_dir(self) -> Path | None:
        """Where code of its own lies that may run; None: none may."""
        return self.directory if self.trust_remote_code else None

    def __post_init__(self) -> None:
        given = {key: value for key in ("path", "config") if (value := getattr(self, key)) is not None}
        if len(given) != 1:
            got = " and ".join(f"model.{key}={value!r}" for key, value in given.items()) or "neither"
            raise ConfigError(
                "give exactly one of model.path (train on from these weights) and model.config (start from "
                f"random weights); got {got}"
            )
        ((key, value),) = given.items()
        if not value:
            raise ConfigError(f"model.{key} is empty; give a directory")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"model.vocab_size is {self.vocab_size}; it must be >= 1, or null")
        attentions = ("auto", "sdpa", "eager", "sinks")
        for key, allowed in (("dtype", ("bfloat16", "float32")), ("attention", attentions)):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"model.{key}={getattr(self, key)!r}; choose one of {', '.join(allowed)}")
