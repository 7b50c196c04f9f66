"""Every family in what the gate (tests/engine/parity) does not compare: rows in chunks, tied and untied
heads, evaluation. What they write is in test_generation.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import EAGER_ONLY, FAMILIES, MOE_FAMILIES, family_config
from support.rig import Setup, batches, reference_model, rig
from torch.nn import functional as F

from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.parity.compare import plain_step
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig

Gradients = dict[str, torch.Tensor]
DENSE = tuple(family for family in FAMILIES if family not in MOE_FAMILIES)
#: Largest relative difference of a gradient in fp32 where it is one of the order of sums.
ROUNDING = {"gemma4_moe": 5e-6, "qwen3_next": 5e-5}


def setup(family: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> Setup:
    made = Setup(
        config=family_config(family, **(sizes or {})), loss_chunk_tokens=10_000, page=4096,
        attention="eager" if family in EAGER_ONLY else "sdpa",
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2),
    )  # fmt: skip
    return made.but(**changes)


def plain(made: Setup, batch: Batch) -> tuple[float, Gradients]:
    return plain_step(reference_model(made.config, getattr(torch, made.dtype), made.attention), batch)


def streamed(made: Setup, batch: Batch) -> tuple[float, Gradients]:
    with rig(made.but(rows=len(batch.input_ids))) as run:
        torch.manual_seed(3)
        return run.train([batch])[0].loss, run.tensors("grad")


def different(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Names of gradients that differ in a bit, and how far they are apart."""
    assert found.keys() == expected.keys()
    return {
        name: ((found[name] - grad).norm() / grad.norm().clamp(min=1e-12)).item()
        for name, grad in expected.items()
        if not torch.equal(found[name], grad)
    }


def check_bounds(family: str, apart: dict[str, float], bound: float) -> None:
    assert not {name: d for name, d in apart.items() if not d <= bound}
    if family in DENSE:  # rows of embeddings are added in fp32, in another order
        assert not [name for name in apart if "embed_tokens" not in name]


@pytest.mark.parametrize("family", DENSE)
def test_other_kinds_of_heads(family: str) -> None:
    """Tied ones untied and the others tied; an id whose row has no gradient, if it is not in the logits."""
    tied = not family_config(family).tie_word_embeddings
    if family == "phi" and tied:  # transformers itself cannot tie a head with a bias
        return
    made = setup(family, sizes={"tie_word_embeddings": tied, "pad_token_id": 7}, activations="gpu")
    (batch,) = batches(1)
    batch.input_ids[:, 3] = 7
    (loss, found), (wanted_loss, wanted) = streamed(made, batch), plain(made, batch)
    assert ("lm_head.weight" in wanted) != tied
    assert loss == wanted_loss
    check_bounds(family, different(found, wanted), 1e-6)


#: phimoe is refused: its routers draw other numbers for rows in chunks.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phimoe"])
def test_rows_in_chunks(family: str) -> None:
    """Two at a time, of five, and so one alone at the end, change the order of sums alone."""
    made, batch = setup(family, moe=MoeConfig(stream="layers")), batches(2)[1]
    loss, wanted = streamed(made, batch)
    found_loss, found = streamed(made.but(rows_per_chunk=2), batch)
    assert found_loss == pytest.approx(loss, rel=5e-7)
    check_order = max(ROUNDING.get(family, 0.0), 5e-6)
    assert not {name: d for name, d in different(found, wanted).items() if not d <= check_order}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ("float32", "bfloat16")[number % 2]) for number, family in enumerate(FAMILIES)],
)
def test_evaluation(family: str, dtype: str) -> None:
    made, batch = setup(family, dtype=dtype), batches(2)[1]
    model = reference_model(made.config, getattr(torch, dtype), made.attention).eval()
    with rig(made) as run, torch.no_grad():
        loss, _ = run.runtime.evaluate([batch])
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        summed = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum")
        wanted = summed.double().item() / batch.trained_tokens
    assert loss == pytest.approx(wanted, rel=0 if family in DENSE else 1e-6)
