"""One matrix or two (C67): what the configuration says is what is trained."""

from __future__ import annotations

import torch
from support.rig import Setup, batches, rig, tiny_config

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_untied_matrices_that_begin_equal_become_two() -> None:
    with rig(Setup()) as run:
        run.overwrite(HEAD, run.tensors()[EMBED])
        begin = run.tensors()
        assert torch.equal(begin[HEAD], begin[EMBED])
        run.train(batches(3))
        run.runtime.flush()
        end = run.tensors()
    assert not torch.equal(end[HEAD], end[EMBED])
    assert not torch.equal(end[HEAD], begin[HEAD])
    assert not torch.equal(end[EMBED], begin[EMBED])


def test_a_tied_matrix_has_one_state() -> None:
    with rig(Setup(config=tiny_config(tied=True))) as run:
        run.train(batches(3))
        run.runtime.flush()
        for plane in ("weight", "exp_avg"):
            assert HEAD not in run.tensors(plane)
            assert run.tensors(plane)[EMBED].any()
