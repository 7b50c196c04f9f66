"""The eval section of a run file. Knows nothing of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstream.io.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on texts that are not trained on, between steps; all but the files is as in `data`."""

    files: list[str] | None = None
    """Files to evaluate on, named as in `data.files`; null, and no `share`: no evaluation."""
    share: float | None = None
    """Or a share of the samples of each entry of `data.files`, drawn by `train.seed`, that is never trained
    on."""
    every_steps: int | None = None
    """Steps between evaluations; null: one at the end of the run."""
    at_end: bool = True
    """Evaluate after the last step of the run."""
    rows_per_step: int | None = None
    """Rows that run through the model at once; null: `train.rows_per_step`."""
    patience: int | None = None
    """End the run after so many evaluations in a row without a lower loss; null: never."""
    min_delta: float = 0.0
    """A loss is lower if it is by more than this."""

    def __post_init__(self) -> None:
        if self.files is not None and (not self.files or not all(self.files)):
            raise ConfigError(
                f"eval.files is {self.files}; name at least one file or pattern, and none empty"
            )
        if self.files is not None and self.share is not None:
            raise ConfigError(
                f"eval.files and eval.share ({self.share}) are both given; leave one of them out"
            )
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(f"eval.share is {self.share}; it must be between 0 and 1")
        for key in ("every_steps", "rows_per_step", "patience"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"eval.{key} is {value}; it must be >= 1, or null")
            if value is not None and not self.wanted:
                raise ConfigError(
                    f"eval.{key} is {value}, but there is nothing to evaluate on; name eval.files, or set "
                    "eval.share"
                )
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"eval.min_delta is {self.min_delta}; it must be a finite number >= 0")
        if self.patience is not None and self.every_steps is None:
            raise ConfigError(
                f"eval.patience is {self.patience}, and eval.every_steps is null, so there is one evaluation "
                "at the end; set eval.every_steps"
            )
        if self.wanted and self.every_steps is None and not self.at_end:
            raise ConfigError(
                "eval.every_steps is null and eval.at_end is false, so nothing would be evaluated; set one "
                "of them"
            )

    @property
    def wanted(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.files is not None or self.share is not None
