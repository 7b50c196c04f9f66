"""`tierstream check-model`: what it says, of what, and with which status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.command import Command
from support.families import save_family
from support.models import edit_json
from support.rig import tiny_config
from support.runs import dump, make_run


@pytest.fixture
def tierstream(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


def test_a_model_with_weights(tierstream: Command, tmp_path: Path) -> None:
    save_family(tmp_path / "model", "llama")
    status, out, err = tierstream.run("check-model", str(tmp_path / "model"))
    assert (status, err, out.splitlines()[-1]) == (0, "", "trains")
    assert f"the weights in {tmp_path / 'model'} have their place" in out
    edit_json(tmp_path / "model" / "config.json", lambda config: config.update(intermediate_size=48))
    tierstream.refused("check-model", str(tmp_path / "model"), said=["gate_proj", "[48, 40]"])


def test_a_run_file_and_json(tierstream: Command, tmp_path: Path) -> None:
    run_file = dump(make_run(tmp_path), tmp_path / "run.yaml")
    status, out, _ = tierstream.run("check-model", str(run_file), "--json", "true")
    found = json.loads(out)
    assert (status, found["trains"], found["packs"], found["model"]) == (0, True, True, "Qwen3ForCausalLM")


def test_what_is_given_beside_a_run_file_counts(tierstream: Command, tmp_path: Path) -> None:
    run_file = dump(make_run(tmp_path), tmp_path / "run.yaml")
    status, out, _ = tierstream.run("check-model", str(run_file), "--attention", "sinks")
    assert status == 2
    assert "cannot be trained: binds: model.attention='sinks' is for decoders with sinks" in out


def test_a_model_that_is_not_there(tierstream: Command, tmp_path: Path) -> None:
    """Named as it was given: no key of a run file was."""
    said = [f"{tmp_path}/none does not exist; MODEL must be a local directory"]
    tierstream.refused("check-model", str(tmp_path / "none"), said=said)


def test_weights_in_another_format_are_looked_at_too(tierstream: Command, tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    tierstream.refused("check-model", str(tmp_path), said=["pytorch_model.bin is no file of tensors"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(tierstream: Command, tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    tierstream.refused("check-model", str(tmp_path), "--device", "cuda", said=["sees no CUDA device"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "32"}, ["'hidden_size'", "expected int"]),
        ({"num_attention_heads": 7}, ["not a multiple of the number of attention heads (7)"]),
    ],
)
def test_a_configuration_with_wrong_values(
    tierstream: Command, tmp_path: Path, values: dict[str, Any], said: list[str]
) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(values))
    tierstream.refused("check-model", str(tmp_path), said=[str(tmp_path / "config.json"), *said])


def test_an_error_of_the_models_code_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    from tierstream.engine.model.config import ModelConfig
    from tierstream.engine.parity.gate import compare_twin

    tiny_config("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_llama, "rotate_half", None)
    verdict = compare_twin(tiny_config("llama"), ModelConfig(config=str(tmp_path)))
    assert verdict.why_not is not None
    assert re.search(r"TypeError: .* \(modeling_llama\.py:\d+\)$", verdict.why_not)


def test_an_error_of_our_code_is_placed_too() -> None:
    from tierstream.engine.model.meta_model import describe
    from tierstream.engine.step.layer_call import LayerCall

    with pytest.raises(KeyError) as caught:
        LayerCall(0, None, (), {}, 0)
    assert re.fullmatch(r"KeyError: 'hidden_states' \(layer_call\.py:\d+\)", describe(caught.value))


def test_one_that_cannot_be_trained(tierstream: Command, tmp_path: Path) -> None:
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=32)  # keeps layers' inputs in fp32
    config.save_pretrained(tmp_path / "mamba")
    status, out, _ = tierstream.run("check-model", str(tmp_path / "mamba"))
    assert status == 2
    assert out.splitlines()[-1].startswith(
        "cannot be trained: loss: layer 0 takes hidden states in bfloat16 and returns them in float32"
    )
    run = make_run(tmp_path)
    run.model.config = str(tmp_path / "mamba")
    tierstream.refused_train(run, ["MambaForCausalLM cannot be trained", "check-model"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.T5Config(), "T5Config is not a causal decoder"),
        (transformers.BertConfig(), "BertConfig is not a causal decoder"),
        (transformers.ViTConfig(), "no causal language model for ViTConfig"),
        (transformers.Gemma3Config(), "save its text model alone and train that"),
        (transformers.Qwen2_5_VLConfig(), "has no causal language model for its texts alone"),
    ],
)
def test_other_kinds_of_model(tierstream: Command, tmp_path: Path, config: Any, said: str) -> None:
    config.save_pretrained(tmp_path)
    tierstream.refused("check-model", str(tmp_path), said=[said])


def test_the_text_model_of_one_for_more_than_texts(tmp_path: Path) -> None:
    """As docs/how-to/own-model.md shows it."""

    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=seen, mm_tokens_per_image=4, image_token_index=60
    )
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    alone = transformers.AutoModelForCausalLM.from_config(whole.config.text_config, dtype=whole.dtype).eval()
    alone.model, alone.lm_head = whole.model.language_model, whole.lm_head
    alone.save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert type(back).__name__ == "Gemma3ForCausalLM"
        assert torch.equal(back(ids).logits, whole(input_ids=ids).logits)


def test_architectures_differ_by_flags_and_versions_and_not_by_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstream.engine.model.config import ModelConfig
    from tierstream.engine.model.meta_model import build_of
    from tierstream.engine.parity.cache import fingerprint
    from tierstream.engine.parity.twin import tiny_config as twin_of

    def key(**flags: Any) -> str:
        model, _ = build_of(twin_of(tiny_config(**flags)), ModelConfig(config="-"))
        return fingerprint(model, "cpu")

    assert key(vocab_size=1000, hidden_size=128, layers=40, intermediate_size=400) == key(
        vocab_size=2000, hidden_size=256, layers=80, intermediate_size=800
    )
    keys = {key(), key(tied=True), key(hidden_act="gelu"), key(family="mistral")}
    monkeypatch.setattr("transformers.__version__", "5.17.1")
    assert len(keys | {key()}) == 5


def test_a_verdict_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstream.engine.model.config import ModelConfig
    from tierstream.engine.parity import gate

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_config().save_pretrained(tmp_path)
    config, told = ModelConfig(config=str(tmp_path)), list[str]()
    verdict = gate.pass_gate(config, told.append)
    assert ["trains as in transformers" in line for line in told] == [True]
    with monkeypatch.context() as without:
        without.setattr(gate, "compare_twin", lambda *_: pytest.fail("compared again"))
        assert gate.pass_gate(config, told.append) == verdict
    (kept,) = (tmp_path / "cache" / "tierstream" / "models").iterdir()
    kept.write_text("{")
    assert gate.pass_gate(config, told.append) == verdict
    assert len(told) == 2
