"""A model that was planned before is the same as one that is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from support.families import family_config
from support.runs import make_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.model.carve import units_of_run
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.planner import case, known
from tierstream.engine.planner.what_if import changed

FROZEN = {"model.freeze": ["*.layers.0.*"]}
GROUPS = {
    "optimizer.lr_scale_by_name": ["*.layers.1.*=0.5"],
    "optimizer.weight_decay_by_name": ["*.layers.0.*=0"],
}


def config_of(folder: Path, model: transformers.PreTrainedConfig, **changes: object) -> RunConfig:
    model.save_pretrained(folder / "family")
    return changed(make_run(folder), {"model.config": str(folder / "family"), **changes})


@pytest.mark.parametrize("changes", [{}, FROZEN, GROUPS, {"moe.stream": "layers"}])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3n", "gpt_oss", "deepseek_v3", "gemma4_moe"])
def test_units_are_read_as_they_were_found(
    tmp_path: Path, family: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, family_config(family), **changes)
    model, hf_config = build_meta_model(config.model)
    found = units_of_run(model, config.moe, config.optimizer)
    expected = replace(found, anatomy=replace(found.anatomy, decoder_output=object)), hf_config.vocab_size
    case.units_of(config)
    monkeypatch.setattr("tierstream.engine.model.build.build_model", None)  # is not called again
    units, vocabulary = case.units_of(config)
    assert (units, vocabulary) == expected
    assert (units.head is units.embed) == (found.head is found.embed)


def test_a_model_that_changed_is_built_anew(tmp_path: Path) -> None:
    def name(folder: str = "plain", hidden: int = 40, **changes: object) -> str | None:
        own = config_of(tmp_path / folder, family_config("llama", hidden_size=hidden), **changes)
        return known.name_of(case._of_units_alone(own))

    same = name()
    assert same is not None
    for changes in ({"optimizer.lr": 1.0}, {"moe.gpu_cache": ByteSize(1)}, {"train.rows_per_step": 64}):
        assert name("elsewhere", **changes) == same
    others = [
        name("wider", hidden=48), name(**FROZEN), name(**GROUPS), name(**{"moe.stream": "layers"}),
        name(**{"model.attention": "eager"}), name(**{"model.vocab_size": 300}),
        name(**{"optimizer.weight_decay": 0.5}),
    ]  # fmt: skip
    assert None not in others
    assert len({same, *others}) == 1 + len(others)
    assert name(**{"model.trust_remote_code": True}) is None


def test_what_cannot_be_read_is_found_anew(tmp_path: Path) -> None:
    config = config_of(tmp_path, family_config("llama"))
    units = case.units_of(config)
    name = known.name_of(case._of_units_alone(config))
    assert name is not None
    for damage in ("", "{", "[]", "{}", '{"units": {}, "vocabulary": 1}'):
        (file := known.user_cache._file("units", name)).write_text(damage)
        assert known.find(name) is None
        again = case.units_of(config)
        assert again[0].layers == units[0].layers
        assert file.read_text() != damage
