"""Tokens of experts, added up, and their picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.families import moe_config
from support.runs import VOCABULARY, make_run, records, train

from tierstream.engine.moe.picture import expert_picture
from tierstream.engine.moe.use import NO_COUNTS, CacheCounts, ExpertUse

PNG = b"\x89PNG\r\n\x1a\n"


def test_tokens_and_steps_of_each_expert() -> None:
    use = ExpertUse({1: 4, 3: 2}, expert_bytes=600)
    assert use.add([{0: 5, 3: 1}, {1: 7}], NO_COUNTS).with_tokens == 3
    step = use.add([{0: 2}, {0: 1, 1: 1}], NO_COUNTS)
    assert (step.with_tokens, step.experts) == (3, 6)
    assert use.layers == [1, 3]
    assert use.tokens.tolist() == [[7, 0, 0, 1], [1, 8, 0, 0]]
    assert use.steps.tolist() == [[2, 0, 0, 1], [1, 2, 0, 0]]
    np.testing.assert_allclose(use.hit_share(), [3 / 8, 3 / 4])


def test_what_streaming_experts_alone_has_spared() -> None:
    """Against all of them twice a step: 600 bytes each way, 1000 of which moved."""
    use = ExpertUse({0: 4}, expert_bytes=600)
    now, before = CacheCounts(9, 8, 7, 6, 1500), CacheCounts(1, 2, 3, 4, 500)
    moved = now.since(before)
    assert moved == CacheCounts(8, 6, 4, 2, 1000)
    assert use.add([{0: 1}], moved).bytes_spared == 2 * 600 - 1000
    assert use.add([{0: 1, 1: 3}], CacheCounts(2, 0, 0, 0, 0)).bytes_spared == 2 * 600
    assert use.moved == CacheCounts(10, 6, 4, 2, 1000)
    assert use.describe() == (
        "experts: 38 % had tokens in a step; 62 % of their uses found them on the device (50 % of 4 "
        "guesses were right); 1.37 KiB less copied than by whole layers"
    )


def test_the_picture_of_no_step_and_of_some() -> None:
    use = ExpertUse({0: 3, 1: 5}, expert_bytes=1)
    assert expert_picture(use, "nothing yet").startswith(PNG)
    use.add([{0: 1, 2: 900}, {4: 3}], NO_COUNTS)
    assert expert_picture(use, "one step").startswith(PNG)


def test_a_run_says_which_experts_had_tokens(tmp_path: Path) -> None:
    """In every record, and as a picture at its end."""
    config = make_run(tmp_path, steps=3)
    moe_config("mixtral", vocab_size=VOCABULARY).save_pretrained(tmp_path / "model")
    config.train.rows_per_chunk = None
    train(config)
    for line in records(config):
        experts, cache = line["experts"], line["experts"]["cache"]
        assert 0 < experts["with_tokens"] <= experts["experts"] == 4 * 3
        assert cache["hits"] + cache["misses"] >= 2 * experts["with_tokens"]
        assert cache["bytes_up"] > 0
    assert (Path(config.run_dir) / "experts.png").read_bytes().startswith(PNG)
