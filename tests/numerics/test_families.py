"""Every family against transformers itself: loss and every gradient of a step, rows in chunks, documents packed,
tied and untied heads, evaluation and greedy generation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, MOE_FAMILIES, family_config
from support.rig import PlainTraining, Setup, batches, reference_model, rig

from tierstream.engine.batch import Batch
from tierstream.engine.optimizer import OptimizerConfig

Gradients = dict[str, torch.Tensor]
DENSE = [family for family in FAMILIES if family not in MOE_FAMILIES]
#: Neither has attention by torch's function.
EAGER = ("gemma2", "gpt_oss")


def setup(family: str, **changes: Any) -> Setup:
    sizes = changes.pop("sizes", {})
    made = Setup(
        config=family_config(family, **sizes), loss_chunk_tokens=10_000, page=4096,
        attention="eager" if family in EAGER else "sdpa",
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2),
    )  # fmt: skip
    return made.but(**changes)


def plain(made: Setup, batch: Batch) -> tuple[float, Gradients]:
    """Loss and gradients of transformers' own model."""
    model = reference_model(made.config, getattr(torch, made.dtype), made.attention)
    torch.manual_seed(3)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    (summed / batch.trained_tokens).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    return summed.double().item() / batch.trained_tokens, gradients


def streamed(made: Setup, batch: Batch) -> tuple[float, Gradients]:
    with rig(made.but(rows=len(batch.input_ids))) as run:
        torch.manual_seed(3)
        return run.train([batch])[0].loss, run.tensors("grad")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def report(family, **changes):
    made = setup(family, **changes)
    for n, batch in enumerate(batches(2)):
        loss, want = plain(made, batch)
        found_loss, found = streamed(made, batch)
        far = {k: distance(found[k], g) for k, g in want.items() if not torch.equal(found[k], g)}
        worst = max(far, key=far.get) if far else None
        print(f"{family:12s} {changes} packed={n} dloss {abs(found_loss-loss):.1e} equal {len(want)-len(far)}/{len(want)} worst {worst} {far.get(worst)} {[k for k in far][:6] if family in DENSE else ''}", flush=True)
