"""The sample section of a run file. Knows nothing of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """Texts that the model writes between steps. Each token of them takes all weights through the device
    once, for all prompts together.
    """

    prompts: list[str] | None = None
    """Texts to go on with; null: none."""
    every_steps: int | None = None
    """Steps between samples; null: at the end of the run."""
    at_end: bool = True
    """Write samples after the last step of the run."""
    max_tokens: int = 64
    """Tokens of a sample; it ends before that where the model ends it."""
    temperature: float = 0.0
    """0: the likeliest token each time; else tokens are drawn, by `train.seed` and the step, with logits
    divided by this."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest ones that have this much probability together."""
    chat: bool | None = None
    """Put each prompt into the chat template, as a user's turn; null: if the data are conversations and there
    is a template."""

    def __post_init__(self) -> None:
        if self.prompts is not None and (not self.prompts or not all(self.prompts)):
            raise ConfigError(f"sample.prompts is {self.prompts}; name at least one text, and none empty")
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"sample.every_steps is {self.every_steps}; it must be >= 1, or null")
        if self.every_steps is not None and self.prompts is None:
            raise ConfigError(
                f"sample.every_steps is {self.every_steps}, but there is nothing to go on with; give "
                "sample.prompts"
            )
        if self.prompts is not None and self.every_steps is None and not self.at_end:
            raise ConfigError(
                "sample.every_steps is null and sample.at_end is false, so no sample would be written; set "
                "one of them"
            )
        if self.max_tokens < 1:
            raise ConfigError(f"sample.max_tokens is {self.max_tokens}; it must be >= 1")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"sample.temperature is {self.temperature}; it must be a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sample.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                f"sample.top_p is {self.top_p} and sample.temperature is 0, which draws nothing; set "
                "sample.temperature, to 1 for example"
            )
