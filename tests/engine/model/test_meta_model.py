"""The model without memory, and the errors of a configuration that cannot be trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import DENSE, edit_json, tiny_hf_config

from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.io.errors import ConfigError, ModelSourceError


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("as_file", [False, True])
def test_model_is_on_meta_with_the_types_asked_for(tmp_path: Path, family: str, as_file: bool) -> None:
    tiny_hf_config(family).save_pretrained(tmp_path)
    source = str(tmp_path / "config.json") if as_file else str(tmp_path)
    model, config = build_meta_model(ModelConfig(config=source, dtype="float32", attention="eager"))
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    assert model.training
    assert config._attn_implementation == "eager"
    assert config.hidden_size == 44
    model, config = build_meta_model(ModelConfig(config=source))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert config._attn_implementation == "sdpa"


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tiny_hf_config(tie_word_embeddings=True).save_pretrained(tmp_path)
    model, _ = build_meta_model(ModelConfig(config=str(tmp_path)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.BertConfig(), "BertConfig is not a causal decoder"),
        (transformers.T5Config(), "T5Config is not a causal decoder"),
        (transformers.ViTConfig(), "no causal language model for ViTConfig"),
    ],
)
def test_other_kinds_of_model_are_refused(tmp_path: Path, config: object, words: str) -> None:
    config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    with pytest.raises(ModelSourceError, match=words) as caught:
        build_meta_model(ModelConfig(config=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_quantised_model_is_refused(tmp_path: Path) -> None:
    tiny_hf_config().save_pretrained(tmp_path)
    quantisation = {"quant_method": "gptq", "bits": 4}
    edit_json(tmp_path / "config.json", lambda config: config.update(quantization_config=quantisation))
    with pytest.raises(ModelSourceError, match=r"quantised \(gptq\)"):
        build_meta_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model_type": "no such family"}', '{"model_type": "llama", "hidden_size": "x"}'],
)
def test_unreadable_configuration_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelSourceError, match=r"config\.json is no configuration") as caught:
        build_meta_model(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_code_in_the_model_directory_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}'
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelSourceError):
        build_meta_model(ModelConfig(path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_missing_directory_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="hub are not looked up"):
        build_meta_model(ModelConfig(path="meta-llama/Llama-3.2-1B"))


def test_the_root_of_a_cached_model_names_its_snapshot(tmp_path: Path) -> None:
    root = tmp_path / "models--mine--tiny"
    tiny_hf_config().save_pretrained(root / "snapshots" / "0123abc")
    with pytest.raises(ModelSourceError, match=f"set model.path to {root}/snapshots/0123abc$"):
        build_meta_model(ModelConfig(path=str(root)))


def test_attention_that_the_family_lacks_is_a_configuration_error(tmp_path: Path) -> None:
    transformers.GptOssConfig(num_hidden_layers=2, hidden_size=32, num_local_experts=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=r"model\.attention='sdpa' cannot be used with GptOssConfig"):
        build_meta_model(ModelConfig(config=str(tmp_path), attention="sdpa"))


@pytest.mark.parametrize(
    ("config", "asked", "got"),
    [
        (transformers.GptOssConfig, "auto", "sinks"),
        (transformers.GraniteSWAConfig, "auto", "sinks"),
        (transformers.GptOssConfig, "sinks", "sinks"),
        (transformers.GptOssConfig, "eager", "eager"),
        (transformers.LlamaConfig, "auto", "sdpa"),
        (transformers.Gemma2Config, "auto", "eager"),
    ],
)
def test_sinks_decide_the_attention(tmp_path: Path, config: Any, asked: Any, got: str) -> None:
    config(num_hidden_layers=2).save_pretrained(tmp_path)
    model, hf_config = build_meta_model(ModelConfig(config=str(tmp_path), attention=asked))
    assert hf_config._attn_implementation == got
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    hf_config.save_pretrained(tmp_path / "exported")
    assert '"sinks"' not in (tmp_path / "exported" / "config.json").read_text()


@pytest.mark.parametrize(
    ("config", "asked", "words"),
    [
        (transformers.LlamaConfig(), "sinks", "'sinks' is for .* LlamaForCausalLM has not; leave .* to auto"),
        (
            transformers.GptOssConfig(num_hidden_layers=2, attention_dropout=0.1),
            "auto",
            r"attention_dropout is 0\.1 .* eager",
        ),
        (transformers.Gemma2Config(), "sdpa", "caps no scores, .* attn_logit_softcapping 50"),
        # Sinks, but keys that are chosen for each token: no causal mask says which.
        (transformers.DeepseekV4Config(), "sinks", "'sinks' is for .* DeepseekV4ForCausalLM has not"),
    ],
)
def test_sinks_are_for_models_that_have_some(tmp_path: Path, config: Any, asked: Any, words: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        build_meta_model(ModelConfig(config=str(tmp_path), attention=asked))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "exactly one of model.path .* and model.config .*; got neither"),
        ({"path": "a", "config": "b"}, "model.path='a' and model.config='b'"),
        ({"path": ""}, "model.path is empty"),
        ({"path": "a", "dtype": "float16"}, "model.dtype='float16'; choose one of bfloat16, float32"),
        (
            {"path": "a", "attention": "flash"},
            "model.attention='flash'; choose one of auto, sdpa, eager, sinks",
        ),
    ],
)
def test_configuration_is_checked(keys: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**keys)


def test_configuration_modules_do_not_import_torch() -> None:
    """`--help` must be quick."""
    module = "tierstream.engine.model.config"
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
