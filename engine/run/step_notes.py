"""What a reader of the log must be told of a step: clipped, skipped, or without a trained token."""

from __future__ import annotations

from collections.abc import Iterator

from tierstream.engine.metrics import StepMetrics
from tierstream.engine.update.optimizer import OptimizerConfig

_SAMPLES_SHOWN = 8


class StepNotes:
    """Lines about the steps of a run. What may be true of every step is explained the first time only."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._clipping_explained = self._empty_explained = False

    def of(self, record: StepMetrics, skipped_in_a_row: int) -> Iterator[str]:
        """Lines about the step of `record`.

        Args:
            skipped_in_a_row: steps up to this one.
        """
        if record.skipped:
            yield (
                f"step {record.step}: the gradient is not finite (norm {record.grad_norm:.4g}, loss "
                f"{record.loss:.4g}): skipped, nothing has changed; {skipped_in_a_row} in a row of at most "
                f"{self._config.max_skipped_in_a_row}{_samples(record.sample_ids)}"
            )
        elif not record.trained_tokens and not self._empty_explained:
            self._empty_explained = True
            yield (
                f"step {record.step}: no token of it is trained on, so it has no loss (nan) and changes "
                "nothing; metrics.jsonl has trained_tokens of every step"
            )
        elif record.clip_factor < 1 and not self._clipping_explained:
            self._clipping_explained = True
            yield (
                f"step {record.step}: first clipped step: the gradient's norm {record.grad_norm:.4g} is "
                f"above optimizer.clip_norm {record.clip_norm:g}, so it was multiplied with "
                f"{record.clip_factor:.4g}; norms are always those before clipping"
            )


def _samples(names: list[str] | None) -> str:
    if not names:
        return ""
    more = len(names) - _SAMPLES_SHOWN
    rest = f" and {more} more, all in metrics.jsonl" if more > 0 else ""
    return f"; its samples: {', '.join(names[:_SAMPLES_SHOWN])}{rest}"
