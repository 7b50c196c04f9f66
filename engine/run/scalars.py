"""A record of a step as named numbers, as trackers and plots want them: units in every name."""

from __future__ import annotations

import math

from tierstream.engine.metrics import EvalMetrics, StepMetrics


def perplexity(loss: float) -> float:
    """exp(loss in nats); infinite where that is beyond fp64."""
    return math.exp(loss) if loss < 709 or math.isnan(loss) else math.inf


def step_scalars(metrics: StepMetrics, bound_s: float | None) -> dict[str, float]:
    """Name -> value. A loss or norm that is not a number stays so.

    Args:
        bound_s: seconds that a step takes at least on this machine; None: not known.
    """
    values: dict[str, float] = {
        "train/loss_nats": metrics.loss,
        "train/perplexity": perplexity(metrics.loss),
        "train/grad_norm": metrics.grad_norm,
        "train/clip_factor": metrics.clip_factor,
        "train/lr": metrics.lr,
        "train/skipped_total_steps": metrics.skipped_total,
        "train/epoch": metrics.epoch,
        "train/trained_tokens": metrics.trained_tokens,
        "train/step_s": metrics.step_s,
        "train/tokens_per_s": metrics.tokens_per_s,
        "memory/host_peak_bytes": metrics.host_peak_bytes,
        "memory/gpu_peak_bytes": metrics.gpu_peak_bytes,
    }
    if bound_s is not None and metrics.step_s > 0:
        values["train/bound_percent"] = 100 * bound_s / metrics.step_s
    losses = {
        "router/aux_loss": metrics.router_aux_loss,
        "router/z_loss": metrics.router_z_loss,
        "train/z_loss": metrics.z_loss,
    }
    values |= {name: loss for name, loss in losses.items() if loss is not None}
    if metrics.experts is not None:
        values["experts/with_tokens_percent"] = 100 * metrics.experts.with_tokens / metrics.experts.experts
    values |= {f"stall/{cause}_s": seconds for cause, seconds in metrics.stall_s.items()}
    values |= {f"tier_wait/{cause}_s": seconds for cause, seconds in metrics.tier_wait_s.items()}
    values |= {f"tier/{tier}_read_bytes": nbytes for tier, nbytes in metrics.bytes_read.items()}
    values |= {f"tier/{tier}_written_bytes": nbytes for tier, nbytes in metrics.bytes_written.items()}
    for tier, hits in metrics.cache_hits.items():
        if uses := hits + metrics.cache_misses.get(tier, 0):
            values[f"tier/{tier}_hit_percent"] = 100 * hits / uses
    return values


def eval_scalars(metrics: EvalMetrics) -> dict[str, float]:
    """The same of an evaluation."""
    return {
        "eval/loss_nats": metrics.loss,
        "eval/perplexity": metrics.perplexity,
        "eval/seconds": metrics.seconds,
        "eval/tokens_per_s": metrics.tokens_per_s,
    }
