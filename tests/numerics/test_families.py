"""Every family against transformers itself: loss and every gradient of a step, rows in chunks, documents of
one row, tied and untied heads, evaluation. What they write is in test_generation.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.families import EAGER_ONLY, FAMILIES, MOE_FAMILIES, family_config
from support.rig import ROWS, Setup, batches, reference_model, rig

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.prepare import check_packing
from tierstream.engine.model import sink_attention
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.step.batch import Batch
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError

Gradients = dict[str, torch.Tensor]
DENSE = tuple(family for family in FAMILIES if family not in MOE_FAMILIES)
#: Largest relative difference of a gradient in fp32 where it is one of the order of sums.
ROUNDING = {"gemma4_moe": 5e-6, "qwen3_next": 5e-5}
#: In bf16 transformers adds the rows of embeddings, and experts their products, with 8 bits.
ROUNDING_BF16 = 1e-2


def setup(family: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> Setup:
    made = Setup(
        config=family_config(family, **(sizes or {})), loss_chunk_tokens=10_000, page=4096,
        attention="eager" if family in EAGER_ONLY else "sdpa",
        optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.5, warmup_steps=2),
    )  # fmt: skip
    return made.but(**changes)


def summed_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )


def plain(made: Setup, pieces: list[Batch]) -> tuple[float, Gradients]:
    """Loss and gradients of transformers' own model, the pieces one after another."""
    attention = "eager" if made.attention == sink_attention.NAME else made.attention
    model = reference_model(made.config, getattr(torch, made.dtype), attention)
    trained, total = sum(piece.trained_tokens for piece in pieces), 0.0
    torch.manual_seed(3)
    for piece in pieces:
        loss = summed_loss(model, piece)
        (loss / trained).backward()
        total += loss.double().item()
    return total / trained, {name: p.grad.float() for name, p in model.named_parameters()}


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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_fp32(family: str, packed: bool) -> None:
    made, batch = setup(family), batches(2)[packed]
    (loss, found), (wanted_loss, wanted) = streamed(made, batch), plain(made, [batch])
    assert loss == pytest.approx(wanted_loss, rel=0 if family in DENSE else 5e-7)
    check_bounds(family, different(found, wanted), ROUNDING.get(family, 1e-6))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_bf16(family: str) -> None:
    made, (batch,) = setup(family, dtype="bfloat16"), batches(1)
    (loss, found), (wanted_loss, wanted) = streamed(made, batch), plain(made, [batch])
    assert loss == pytest.approx(wanted_loss, rel=0 if family in DENSE else 1e-6)
    check_bounds(family, different(found, wanted), ROUNDING_BF16)


@pytest.mark.parametrize("family", DENSE)
def test_other_kinds_of_heads(family: str) -> None:
    """Tied ones untied and the others tied; an id whose row has no gradient, if it is not in the logits."""
    tied = not family_config(family).tie_word_embeddings
    if family == "phi" and tied:  # transformers itself cannot tie a head with a bias
        return
    made = setup(family, sizes={"tie_word_embeddings": tied, "pad_token_id": 7}, activations="gpu")
    (batch,) = batches(1)
    batch.input_ids[:, 3] = 7
    (loss, found), (wanted_loss, wanted) = streamed(made, batch), plain(made, [batch])
    assert ("lm_head.weight" in wanted) != tied
    assert loss == wanted_loss
    check_bounds(family, different(found, wanted), 1e-6)


#: phimoe is refused: its routers draw other numbers for rows in chunks.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phimoe"])
def test_rows_in_chunks(family: str) -> None:
    """One and two at a time, of five, change the order of sums alone."""
    made, batch = setup(family, moe=MoeConfig(stream="layers")), batches(2)[1]
    loss, wanted = streamed(made, batch)
    for rows in (1, 2):
        found_loss, found = streamed(made.but(rows_per_chunk=rows), batch)
        assert found_loss == pytest.approx(loss, rel=5e-7)
        check_order = max(ROUNDING.get(family, 0.0), 5e-6)
        assert not {name: d for name, d in different(found, wanted).items() if not d <= check_order}


def documents(batch: Batch) -> list[Batch]:
    """Each on a row of its own."""
    found = []
    for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in itertools.pairwise(begins):
            own = labels[None, begin:end]
            at = torch.arange(end - begin)[None]
            found.append(Batch(ids[None, begin:end], own, at, int((own != -100).sum())))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_row_do_not_see_each_other(family: str) -> None:
    """Or rows with several are refused. (Attention with sinks is the one that trains gpt-oss.)"""
    if family == "qwen3_next":
        refused = reference_model(family_config(family), torch.float32)
        with pytest.raises(ConfigError, match="carry a state from one document"):
            check_packing(DataConfig(files=["a"], packing="stream"), refused)
        return
    sink_attention.register()
    attention = {"gpt_oss": sink_attention.NAME, "gemma2": "eager"}.get(family, "sdpa")
    made, batch = setup(family, attention=attention), batches(2)[1]
    assert len(documents(batch)) > ROWS
    (loss, found), (wanted_loss, wanted) = streamed(made, batch), plain(made, documents(batch))
    if family == "phimoe":  # draws other numbers for other rows
        return
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert not {name: d for name, d in different(found, wanted).items() if not d <= 1e-4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation(family: str, dtype: str) -> None:
    made, batch = setup(family, dtype=dtype), batches(2)[1]
    model = reference_model(made.config, getattr(torch, dtype), made.attention).eval()
    with rig(made) as run, torch.no_grad():
        loss, _ = run.runtime.evaluate([batch])
        wanted = summed_loss(model, batch).double().item() / batch.trained_tokens
    assert loss == pytest.approx(wanted, rel=0 if family in DENSE else 1e-6)
