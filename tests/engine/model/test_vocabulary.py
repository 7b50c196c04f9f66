"""A model with more rows for tokens than its directory, or fewer: loaded, trained, exported, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.exports import Loaded, pretrained
from support.families import family_config
from support.models import Flat, different, edit_json, rewrite, save_model
from support.runs import VOCABULARY, make_run, train, with_tokenizer

from tierstream.engine.config import RunConfig
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.initialise import init_weights
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.weights.source import plan_source
from tierstream.io.errors import CheckpointError, ConfigError, ModelSourceError
from tierstream.tools.export import ExportOptions, export

ROWS = 259


def save_phi(path: Path) -> None:
    """Untied, with a bias of the head."""
    torch.manual_seed(3)
    config = transformers.PhiConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.bias)
    model.to(torch.bfloat16).save_pretrained(path)


def save_kind(path: Path, kind: str) -> set[str]:
    """A model directory; gives the names of what has a row for each token."""
    if kind == "phi":
        save_phi(path)
        return {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"}
    save_model(path, tie_word_embeddings=kind == "tied")
    return {"model.embed_tokens.weight"} | ({"lm_head.weight"} if kind == "untied" else set())


KINDS = pytest.mark.parametrize("kind", ["tied", "untied", "phi"])


def plan_of(path: Path, rows: int | None) -> Any:
    config = ModelConfig(path=str(path), vocab_size=rows)
    return plan_source(build_meta_model(config)[0], config)


@KINDS
@pytest.mark.parametrize("rows", [ROWS - 100, ROWS, ROWS + 1, ROWS + 300])
def test_rows_are_added_as_the_mean_of_the_others_or_left_out(tmp_path: Path, kind: str, rows: int) -> None:
    ends, own = save_kind(tmp_path, kind), pretrained(tmp_path, dtype=torch.bfloat16)
    found = Loaded(tmp_path, low_bits=False, vocab_size=rows).flat.tensors()
    assert found.keys() == own.keys()
    for name in ends:
        assert found[name].shape == (rows, *own[name].shape[1:])
        assert torch.equal(found[name][:ROWS], own[name][:rows].float())
        mean = own[name].double().mean(dim=0).float()
        for row in found[name][ROWS:]:
            torch.testing.assert_close(row, mean, rtol=1e-6, atol=1e-9)
            assert torch.equal(row, found[name][-1])
        del found[name], own[name]
    assert different(found, own) == []


def test_new_rows_are_those_of_transformers_but_for_its_noise(tmp_path: Path) -> None:
    """`resize_token_embeddings` draws around the mean with a billionth of the covariance."""
    save_phi(tmp_path)
    found = Loaded(tmp_path, "float32", vocab_size=ROWS + 30, low_bits=False).flat.tensors()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.resize_token_embeddings(ROWS + 30, mean_resizing=True)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(found[name], model.get_parameter(name).detach(), rtol=0, atol=1e-3)


@KINDS
@pytest.mark.parametrize("rows", [ROWS - 100, ROWS + 300])
def test_an_export_has_the_new_size_and_loads_to_the_bit(tmp_path: Path, kind: str, rows: int) -> None:
    save_kind(tmp_path / "source", kind)
    loaded = Loaded(tmp_path / "source", vocab_size=rows)
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == rows
    assert different(pretrained(tmp_path / "out"), loaded.tensors(torch.bfloat16)) == []
    again = Loaded(tmp_path / "out", low_bits=False)
    assert len(again.model.get_input_embeddings().weight) == rows


def test_random_weights_are_those_of_a_configuration_with_so_many_rows(tmp_path: Path) -> None:
    save_model(tmp_path)
    found = []
    for rows in (ROWS + 41, None):
        model, hf_config = build_meta_model(ModelConfig(config=str(tmp_path), vocab_size=rows))
        assert hf_config.vocab_size == ROWS + 41
        flat = Flat(find_units(model).in_forward_order)
        init_weights(model, flat.units, 7, flat.write)
        found.append(flat.tensors())
        edit_json(tmp_path / "config.json", lambda config: config.update(vocab_size=ROWS + 41))
    assert different(*found) == []


def test_a_tied_matrix_that_is_stored_twice_is_still_compared(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path / "model.safetensors", change)
    Loaded(tmp_path, vocab_size=ROWS + 5)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelSourceError, match="with different values"):
        Loaded(tmp_path, vocab_size=ROWS + 5)


# What is refused


def test_a_directory_whose_rows_are_not_those_of_its_configuration_is_refused(tmp_path: Path) -> None:
    """A resize is no licence for files that do not belong together."""
    save_model(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(vocab_size=ROWS - 9))
    said = rf"embed_tokens\.weight is \[{ROWS}, 44\] where the model has \[{ROWS - 9}, 44\]"
    with pytest.raises(ModelSourceError, match=said):
        Loaded(tmp_path, vocab_size=ROWS + 5)


def test_a_nan_in_a_stored_row_is_named_and_not_spread(tmp_path: Path) -> None:
    save_model(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors["lm_head.weight"][3].fill_(torch.nan))
    with pytest.raises(ModelSourceError, match=r"44 values of tensor lm_head\.weight"):
        Loaded(tmp_path, vocab_size=ROWS + 5)


def test_heads_beside_the_model_cannot_be_resized(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=ROWS, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    name = "model.layers.61.shared_head.head.weight"
    rewrite(tmp_path / "model.safetensors", lambda t: t.update({name: torch.zeros(ROWS, 32)}))
    plan_of(tmp_path, ROWS)
    said = rf"rows of tokens beside the model: {name}; these are not resized: leave model\.vocab_size out"
    with pytest.raises(ModelSourceError, match=said):
        plan_of(tmp_path, ROWS + 1)


def test_special_tokens_keep_their_rows(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(eos_token_id=[2, 250]))
    build_meta_model(ModelConfig(path=str(tmp_path), vocab_size=251))
    said = r"model\.vocab_size is 250, but eos_token_id in .*config\.json is 250; give at least 251 rows"
    with pytest.raises(ConfigError, match=said):
        build_meta_model(ModelConfig(path=str(tmp_path), vocab_size=250))
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0; it must be >= 1, or null"):
        ModelConfig(path=str(tmp_path), vocab_size=0)


# A whole run


def run_from_weights(folder: Path, rows: int | None) -> RunConfig:
    config = make_run(folder, steps=2)
    assert config.model.config is not None
    hf_config = transformers.AutoConfig.from_pretrained(config.model.config)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    model.save_pretrained(with_tokenizer(config, folder / "weights"))
    config.model = ModelConfig(path=str(folder / "weights"), vocab_size=rows)
    return config


def test_a_run_trains_the_new_rows_exports_them_and_goes_on(tmp_path: Path) -> None:
    rows = VOCABULARY + 20
    config = run_from_weights(tmp_path, rows)
    config.optimizer.schedule = "constant"
    train(config)
    checkpoint = Path(config.run_dir) / "checkpoints" / "step-00000002"
    export(checkpoint, tmp_path / "out", ExportOptions())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len(stored["model.embed_tokens.weight"]) == rows
    assert different(pretrained(tmp_path / "out", dtype=torch.bfloat16), stored) == []
    config.checkpoint.resume, config.train.steps = "auto", 3
    train(config)


def test_a_resume_with_another_size_is_refused_as_other_planes(tmp_path: Path) -> None:
    config = run_from_weights(tmp_path, None)
    train(config)
    config.checkpoint.resume = "auto"
    config.checkpoint.allow_changed = ["model.vocab_size", "architecture.vocab_size"]
    config.model.vocab_size = VOCABULARY + 1
    said = rf"has {VOCABULARY} rows in the checkpoint and {VOCABULARY + 1} now .*are other planes.*export"
    with pytest.raises(CheckpointError, match=said):
        train(config)
    config.model.vocab_size = VOCABULARY  # the same, said
    train(config)


@pytest.mark.parametrize("rows", [None, VOCABULARY + 8])
def test_ids_beyond_the_model_name_the_key_as_a_remedy(tmp_path: Path, rows: int | None) -> None:
    config = make_run(tmp_path, steps=2)  # with random weights, so that a tokenizer is trained
    config.model.vocab_size, config.data.vocab_size = rows, VOCABULARY + 8
    if rows is None:
        with pytest.raises(ConfigError, match=r"has only 300 rows; .* or raise model\.vocab_size"):
            train(config)
    else:
        train(config)


def test_a_second_table_of_tokens_is_not_resized(tmp_path: Path) -> None:
    family_config("gemma3n").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"second table of tokens \(vocab_size_per_layer_input\)"):
        build_meta_model(ModelConfig(config=str(tmp_path), vocab_size=300))
    family_config("gemma").save_pretrained(tmp_path / "plain")
    build_meta_model(ModelConfig(config=str(tmp_path / "plain"), vocab_size=300))


def test_a_plan_names_what_it_resizes(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert plan_of(tmp_path, None).resized == plan_of(tmp_path, ROWS).resized == {}
    resized = plan_of(tmp_path, ROWS + 2).resized
    assert resized == dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (ROWS + 2) * 44)
