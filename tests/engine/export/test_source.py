"""What an export takes over from the model directory that the run began with: its files, the tensors that the
family leaves aside, code, licence, card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import save_file
from support.exports import Loaded, stored
from support.families import save_family
from support.models import dequantised_by_transformers, different, edit_json, rewrite, save_model, tiny_model

from tierstream import __version__
from tierstream.engine.export.model_card import RunFacts


def files(path: Path) -> dict[str, list[str]]:
    """File of weights -> its tensors."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found[file.name] = sorted(opened.keys())
    return found


# Files


def scatter(path: Path) -> None:
    """Tensors in files of odd names, whatever their order in the model."""
    tensors = stored(path)
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    places = {name: f"weights-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: tensors[name] for name in names if places[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_files_are_those_of_the_source(tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    scatter(tmp_path / "source")
    loaded = Loaded(tmp_path / "source", low_bits=False)
    info = loaded.export(tmp_path / "out", source=loaded.plan)
    assert info.shards == 3
    assert files(tmp_path / "out") == files(tmp_path / "source")
    assert different(stored(tmp_path / "out"), stored(tmp_path / "source")) == []
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert different(dict(back.named_parameters()), loaded.flat.tensors()) == []


@pytest.mark.parametrize("options", [{"max_shard_bytes": 60_000}, {"dtype": "float32"}])
def test_files_are_cut_anew_when_asked_for_or_when_tensors_grow(tmp_path: Path, options: Any) -> None:
    save_model(tmp_path / "source")
    scatter(tmp_path / "source")
    loaded = Loaded(tmp_path / "source")
    loaded.export(tmp_path / "out", source=loaded.plan, **options)
    names = files(tmp_path / "out")
    assert not any(name.startswith("weights") for name in names)
    assert (len(names) > 2) is ("max_shard_bytes" in options)


def test_one_file_has_the_name_that_transformers_looks_for(tmp_path: Path) -> None:
    save_model(tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").rename(tmp_path / "source" / "other.safetensors")
    loaded = Loaded(tmp_path / "source")
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert list(files(tmp_path / "out")) == ["model.safetensors"]


def test_names_of_another_time_become_those_of_today(tmp_path: Path) -> None:
    """A checkpoint of the base model alone: no name of it is in the export."""
    model = save_model(tmp_path / "source", shard="60KB", tie_word_embeddings=True)
    for file in (tmp_path / "source").glob("*.safetensors"):

        def strip(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("model.")] = tensors.pop(name)

        rewrite(file, strip)

    def rename(index: dict[str, Any]) -> None:
        index["weight_map"] = {k.removeprefix("model."): v for k, v in index["weight_map"].items()}

    edit_json(tmp_path / "source" / "model.safetensors.index.json", rename)
    loaded = Loaded(tmp_path / "source", low_bits=False)
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert different(stored(tmp_path / "out"), dict(model.named_parameters())) == []


# Tensors that the family leaves aside


EXTRA = {  # family -> layers that predict further tokens, as its checkpoints name them
    "deepseek_v3": "model.layers.61.",
    "glm4_moe": "model.layers.46.",
    "qwen3_next": "mtp.",
}


@pytest.mark.parametrize("family", EXTRA)
def test_further_heads_are_carried_untouched(tmp_path: Path, family: str) -> None:
    source = tmp_path / "source"
    save_family(source, family)
    torch.manual_seed(5)
    extra = {
        f"{EXTRA[family]}eh_proj.weight": torch.randn(40, 80).bfloat16(),
        f"{EXTRA[family]}enorm.weight": torch.randn(40),
        f"{EXTRA[family]}half": torch.randn(3, 1).half(),
        f"{EXTRA[family]}counts": torch.arange(5),
        f"{EXTRA[family]}nothing": torch.empty(0, 4),
    }
    rewrite(source / "model.safetensors", lambda tensors: tensors.update(extra))
    loaded = Loaded(source)
    assert set(loaded.plan.unused) == extra.keys()
    info = loaded.export(tmp_path / "out", source=loaded.plan, buffer_bytes=100)
    assert info.carried == len(extra)
    tensors = stored(tmp_path / "out")
    assert tensors.keys() == stored(source).keys()
    for name, value in extra.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert different(dict(back.named_parameters()), loaded.tensors(torch.bfloat16)) == []
    loaded.export(tmp_path / "without")
    assert stored(tmp_path / "without").keys() == tensors.keys() - extra.keys()


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_keys_of_layers_that_take_those_of_others_are_carried(tmp_path: Path, family: str) -> None:
    """Published checkpoints hold them, and no layer computes with them."""
    source, key = tmp_path / "source", "model.layers.4.self_attn.k_proj.weight"
    save_family(source, family)
    rewrite(source / "model.safetensors", lambda tensors: tensors.update({key: torch.ones(16, 40)}))
    loaded = Loaded(source)
    assert loaded.plan.unused == (key,)
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert files(tmp_path / "out") == files(source)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert different(dict(back.named_parameters()), loaded.tensors(torch.bfloat16)) == []


def test_further_heads_in_fp8_are_carried_dequantised(tmp_path: Path) -> None:
    source, name = tmp_path / "source", "model.layers.61.eh_proj.weight"
    save_family(source, "deepseek_v3")
    weight, grid = (torch.randn(32, 64) * 30).to(torch.float8_e4m3fn), torch.rand(2, 4) / 100
    extra = {name: weight, f"{name}_scale_inv": grid}
    rewrite(source / "model.safetensors", lambda tensors: tensors.update(extra))
    loaded = Loaded(source)
    values = dequantised_by_transformers(weight, grid)
    for dtype in ("bfloat16", "float32"):
        loaded.export(tmp_path / dtype, source=loaded.plan, dtype=dtype, buffer_bytes=1000)
        tensors = stored(tmp_path / dtype)
        assert torch.equal(tensors[name], values.to(getattr(torch, dtype)))
        assert f"{name}_scale_inv" not in tensors


def test_a_second_copy_of_a_tied_matrix_is_not_carried(tmp_path: Path) -> None:
    """It would be the one from before the run."""
    save_model(tmp_path / "source", tie_word_embeddings=True)
    rewrite(
        tmp_path / "source" / "model.safetensors",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    loaded = Loaded(tmp_path / "source")
    assert loaded.export(tmp_path / "out", source=loaded.plan).carried == 0
    assert "lm_head.weight" not in stored(tmp_path / "out")


def test_rows_beyond_the_tokenizer_stay(tmp_path: Path) -> None:
    """A vocabulary padded to a multiple of 64 keeps all of its rows, bit for bit."""
    model = tiny_model(vocab_size=320)
    model.save_pretrained(tmp_path / "source")
    loaded = Loaded(tmp_path / "source", low_bits=False)
    loaded.export(tmp_path / "out", source=loaded.plan)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320
    assert different(stored(tmp_path / "out"), dict(model.named_parameters())) == []


# Code, licence, card


@pytest.mark.parametrize("there", [True, False])
def test_code_comes_along_or_is_not_promised(tmp_path: Path, there: bool) -> None:
    source = tmp_path / "source"
    save_model(source)
    promised = {
        "AutoConfig": "configuration_mine.Mine", "AutoTokenizer": ["tokenization_mine.Slow", None],
        "AutoModel": "somebody/else--modeling.Other",
    }  # fmt: skip
    edit_json(source / "config.json", lambda config: config.update(auto_map=promised))
    for name in ("configuration_mine.py", "helpers.py", *(["tokenization_mine.py"] if there else [])):
        (source / name).write_text("raise RuntimeError('run')")
    (source / "LICENSE.txt").write_text("terms")
    loaded = Loaded(source)
    loaded.export(tmp_path / "out", source=loaded.plan)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("auto_map") == (promised if there else None)
    copied = sorted(file.name for file in (tmp_path / "out").glob("*.py"))
    assert copied == (["configuration_mine.py", "helpers.py", "tokenization_mine.py"] if there else [])
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "terms"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)


FACTS = RunFacts(
    base_model="/cache/models--some--base-7b/snapshots/0123", steps=1200, updates=1199, tokens=5_000_000,
    loss=1.23456, data_fingerprint="abc123",
)  # fmt: skip


def test_card_says_what_was_done_and_keeps_the_licence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source)
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: x\nlanguage: [de]\n---\n# Base\n")
    loaded = Loaded(source)
    loaded.export(tmp_path / "mine", source=loaded.plan, facts=FACTS)
    card = ModelCard.load(tmp_path / "mine" / "README.md")
    data = card.data.to_dict()
    assert data["base_model"] == "some/base-7b"
    assert (data["license"], data["license_name"], data["language"]) == ("other", "x", ["de"])
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert card.text.startswith("\n# mine\n")
    for words in ("`some/base-7b`", "1,200", "1,199", "5,000,000", "1.2346", "`abc123`", __version__):
        assert words in card.text


@pytest.mark.parametrize("readme", ["no metadata", "---\n[\n---\n"])
def test_card_of_a_new_model_or_beside_an_odd_one(tmp_path: Path, readme: str) -> None:
    source = tmp_path / "source"
    save_model(source)
    (source / "README.md").write_text(readme)
    loaded = Loaded(source)
    facts = RunFacts(base_model=None, steps=1, updates=1, tokens=None, loss=None, data_fingerprint=None)
    loaded.export(tmp_path / "out", source=loaded.plan, facts=facts)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "from random weights" in card.text
    assert not {"license", "base_model"} & card.data.to_dict().keys()
    assert "None" not in card.text


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    save_model(tmp_path / "source", shard="60KB")
    loaded = Loaded(tmp_path / "source")
    told: list[tuple[int, int]] = []
    info = loaded.export(tmp_path / "out", progress=lambda *now: told.append(now), buffer_bytes=1000)
    assert told == sorted(told)
    assert {total for _, total in told} == {info.nbytes}
    assert told[-1][0] == info.nbytes
