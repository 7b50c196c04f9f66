"""The `model` section of a run: where the architecture and the first weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Exactly one of `path` and `config` is given."""

    path: str | None = None
    """Local Hugging Face model directory (config.json and safetensors) that training starts from."""

    config: str | None = None
    """config.json, or a directory that holds one: the architecture alone, with seeded random weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which weights are computed with. The optimizer keeps an fp32 master in both."""

    attention: Literal["auto", "sdpa", "eager", "sinks"] = "auto"
    """Those of transformers, and sinks: attention with sinks (gpt-oss) by flash kernels. auto: sinks where a
    model has some, else sdpa."""

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
        attentions = ("auto", "sdpa", "eager", "sinks")
        for key, allowed in (("dtype", ("bfloat16", "float32")), ("attention", attentions)):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"model.{key}={getattr(self, key)!r}; choose one of {', '.join(allowed)}")
