"""Which experts come to the device, how often, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.families import moe_config
from support.rig import Rig, Setup, batches, rig

from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import BudgetError

EXPERTS, LAYERS = 8, 3


def setup(slots: int, **other: Any) -> Setup:
    """Few tokens, so that experts stay idle."""
    config = moe_config("olmoe")
    made = Setup(config=config, page=4096, rows=1, rows_per_chunk=1, seq_len=3, loss_chunk_tokens=100)
    with rig(made) as run:
        nbytes = run.units.experts[0][0].numel * 4
    return made.but(expert_nbytes=slots * nbytes, **other)


@contextmanager
def watched(made: Setup) -> Iterator[tuple[Rig, Counter[str]]]:
    """A run, and how often each expert's weights were copied to the device."""
    copied = Counter[str]()
    with rig(made) as run:
        cache = run.runtime.experts
        assert cache is not None
        fill = cache._copies.fill

        def counted(buffer: Any, idle: Any, unit: str, *rest: Any) -> Any:
            copied[unit] += 1
            return fill(buffer, idle, unit, *rest)

        cache._copies.fill = counted  # type: ignore[method-assign]
        yield run, copied


def hit(run: Rig) -> list[set[str]]:
    """Of each layer the experts that had tokens in the latest step."""
    return [set(parts.experts.hit) for parts in run.runtime._sweep._parts if parts.experts is not None]


@pytest.mark.parametrize("slots", [1, 2, EXPERTS, LAYERS * EXPERTS])
def test_only_experts_with_tokens_come_and_once_per_pass(slots: int) -> None:
    """A pass over a layer takes each of its experts once; what is still there in backward does not come
    again. (In the first step outputs are computed again, too: what depends on them is not known yet.)
    """
    (batch,) = batches(1, rows=1, seq_len=3)
    with watched(setup(slots, optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0))) as (run, copied):
        run.train([batch])
        copied.clear()
        cache = run.runtime.experts
        assert cache is not None
        before = cache.counts
        run.train([batch])
        wanted = hit(run)
        assert all(0 < len(layer) < EXPERTS for layer in wanted)
        assert set(copied) == set().union(*wanted)
        assert max(copied.values()) <= 2
        kept = sum(copied[unit] == 1 for layer in wanted for unit in layer)
        if slots >= LAYERS * EXPERTS:
            assert kept == len(set(copied))
        if slots >= EXPERTS:  # forward ends and backward begins with the last layer
            assert all(copied[unit] == 1 for unit in wanted[-1])
        moved = cache.counts.since(before)
        hits, misses, guesses = moved.hits, moved.misses, moved.guesses
        assert hits + misses == 2 * sum(map(len, wanted))
        assert misses + guesses == sum(copied.values())


def test_experts_of_the_step_before_are_read_ahead() -> None:
    """The same rows again, unchanged weights: every guess is right."""
    (batch,) = batches(1, rows=1, seq_len=3)
    optimizer = OptimizerConfig(lr=0.0, weight_decay=0.0)
    with watched(setup(EXPERTS, optimizer=optimizer)) as (run, copied):
        run.train([batch] * 4)
        cache = run.runtime.experts
        assert cache is not None
        assert cache.counts.guesses > 0
        assert cache.counts.right_guesses == cache.counts.guesses
        assert set(copied) == set().union(*hit(run))


def test_room_for_less_than_one_expert_is_refused() -> None:
    said = r"moe\.gpu_cache is 100 B, and an expert takes .*; raise it to that"
    with pytest.raises(BudgetError, match=said):
        rig(setup(1).but(expert_nbytes=100)).__enter__()


def test_an_error_of_a_copy_reaches_the_step() -> None:
    (batch,) = batches(1, rows=1, seq_len=3)
    with watched(setup(2)) as (run, _):
        cache = run.runtime.experts
        assert cache is not None

        def fails(*_: Any) -> Any:
            raise OSError("no such page")

        cache._copies.fill = fails  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no such page"):
            run.train([batch])
