"""Records of steps, as a run would write them."""

from __future__ import annotations

from typing import Any

from tierstream.engine.metrics import StepMetrics


def record(step: int, **changed: Any) -> StepMetrics:
    """A plausible record of `step`, with the fields of `changed` replaced."""
    values: dict[str, Any] = {
        "step": step,
        "optimizer_step": step,
        "loss": 10.0 / step,
        "grad_norm": 2.0,
        "clip_factor": 0.5,
        "lr": 1e-4,
        "skipped": False,
        "skipped_total": 0,
        "epoch": step / 10,
        "samples": 7,
        "tokens": 128,
        "trained_tokens": 100,
        "step_s": 0.5,
        "tokens_per_s": 256.0,
        "stall_s": {"weights": 0.125},
        "bytes_read": {"nvme": 4096, "dram": 8192},
        "bytes_written": {"nvme": 1},
        "cache_hits": {"dram": 3},
        "cache_misses": {"dram": 1},
        "host_peak_bytes": 1000 + step,
        "gpu_peak_bytes": 7,
    }
    return StepMetrics(**values | changed)
