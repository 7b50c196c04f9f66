"""What loads equals `from_pretrained` to the bit; what does not fit is refused by name before it is read."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.families import save_family
from support.models import DENSE, SIZES, Flat, different, edit_json, rewrite, save_model, tiny_model

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import build_meta_model, materialise_buffers
from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.source import LoadPlan, load_weights, plan_load
from tierstream.io.errors import InvariantError, ModelSourceError


def plan_of(path: Path, dtype: str = "bfloat16") -> tuple[Any, LoadPlan]:
    model, _ = build_meta_model(ModelConfig(path=str(path), dtype=dtype, attention="eager"))  # type: ignore[arg-type]
    return model, plan_load(model, open_checkpoint(path))


def loaded(path: Path, dtype: str = "bfloat16", **options: int) -> Flat:
    model, plan = plan_of(path, dtype)
    flat = Flat(find_units(model).in_forward_order)
    load_weights(plan, flat.units, flat.write, **options)
    return flat


def pretrained(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return dict(model.named_parameters())


def refusal(path: Path) -> str:
    with pytest.raises(ModelSourceError) as caught:
        plan_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_every_family_equals_from_pretrained(tmp_path: Path, family: str, tied: bool) -> None:
    save_model(tmp_path, shard="60KB", family=family, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert different(loaded(tmp_path, buffer_bytes=1000).tensors(), pretrained(tmp_path)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_stored_precision_reaches_the_master(tmp_path: Path, dtype: torch.dtype) -> None:
    """An fp32 checkpoint in a bf16 run keeps all its bits: they go into the master."""
    model = save_model(tmp_path, dtype=dtype)
    flat = loaded(tmp_path, "bfloat16")
    assert different(flat.tensors(), dict(model.named_parameters())) == []
    assert all(tensor.dtype == torch.float32 for tensor in flat.tensors().values())


def test_types_may_be_mixed(tmp_path: Path) -> None:
    """Norms in fp32, matrices in fp16, a bias in fp64; all bits reach the masters."""
    save_model(tmp_path, family="qwen2", dtype=torch.float32)

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if name.endswith("k_proj.bias"):
                tensors[name] = value.double()
            elif value.dim() > 1:
                tensors[name] = value.to(torch.float16 if "mlp" in name else torch.bfloat16)

    rewrite(tmp_path / "model.safetensors", mix)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len({value.dtype for value in tensors.values()}) == 4
    for dtype in ("bfloat16", "float32"):
        assert different(loaded(tmp_path, dtype).tensors(), tensors) == []


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    model, plan = plan_of(tmp_path)
    told: list[int] = []
    units = find_units(model).in_forward_order
    load_weights(plan, units, Flat(units).write, progress=told.append)
    assert sum(told) == 4 * sum(p.numel() for p in model.parameters())
    assert len(told) > len(list(model.parameters()))  # experts of a stack one by one


@pytest.mark.parametrize("buffer_bytes", [1, 64, 1000, 1 << 20])
def test_slices_are_bounded_and_cover_everything(tmp_path: Path, buffer_bytes: int) -> None:
    model = save_model(tmp_path, num_hidden_layers=1, intermediate_size=8, vocab_size=20)
    flat = loaded(tmp_path, buffer_bytes=buffer_bytes)
    assert flat.largest <= max(1, buffer_bytes // 6)
    assert different(flat.tensors(), dict(model.named_parameters())) == []


def test_loading_takes_only_its_buffers(tmp_path: Path) -> None:
    """A model of 13 MB within 1 MiB; the rest is what Python objects take."""
    save_model(tmp_path, vocab_size=40_000, intermediate_size=2000)
    model, plan = plan_of(tmp_path)
    units = find_units(model).in_forward_order
    assert 2 * sum(unit.numel for unit in units) > 8 << 20
    tracemalloc.start()
    load_weights(plan, units, lambda unit, start, values: None, buffer_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * (1 << 20)


# Experts


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt_oss", {"num_local_experts": 64, "intermediate_size": 192}),
        ("mixtral", {"num_local_experts": 64, "intermediate_size": 192}),
    ],
)
def test_one_expert_is_in_memory(tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    """A stack of 24 MiB in fp32, which a file holds whole, or as one tensor per expert."""
    save_family(tmp_path, family, shard="60KB", hidden_size=256, num_hidden_layers=1, **sizes)
    model, plan = plan_of(tmp_path)
    units = find_units(model).in_forward_order
    expert = max(spec.numel for unit in units for spec in unit.tensors) * 4
    written: list[int] = []
    tracemalloc.start()
    load_weights(plan, units, lambda unit, start, values: written.append(values.nbytes), buffer_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(written) <= expert
    assert sum(written) == sum(p.numel() for p in model.parameters()) * 4
    assert peak < 3 << 20


EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (["up"], [f"8 tensors like {EXPERT.format(0, 'gate')}", f"7 tensors like {EXPERT.format(0, 'up')}"]),
        (["gate", "up", "down"], [f"{EXPERT.format(0, 'down')} and 6 more make [7, ", "the model has [8, "]),
    ],
)
def test_an_expert_that_is_missing_is_refused_by_name(
    tmp_path: Path, lost: list[str], words: list[str]
) -> None:
    save_family(tmp_path, "qwen3_moe")
    rewrite(tmp_path / "model.safetensors", lambda t: [t.pop(EXPERT.format(4, name)) for name in lost])
    message = refusal(tmp_path)
    for word in words:
        assert word in message


def test_a_stack_of_too_few_experts_is_refused_by_name(tmp_path: Path) -> None:
    save_family(tmp_path, "gpt_oss")
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path / "model.safetensors", lambda t: t.update({name: t[name][1:].contiguous()}))
    assert f"1 of another shape: {name} is [7, " in refusal(tmp_path)


def test_units_without_one_of_the_experts_are_a_bug(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    model, plan = plan_of(tmp_path)
    units = [unit for unit in find_units(model).in_forward_order if unit.name != "layers.2.experts.7"]
    with pytest.raises(InvariantError, match=r"differ in model\.layers\.2\.mlp\.experts\.down_proj, "):
        load_weights(plan, units, Flat(units).write)


# What does not fit (C69)


@pytest.fixture(scope="session")
def untied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied")
    save_model(path, family="qwen3")
    return path


@pytest.fixture
def untied(untied_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untied_source, tmp_path / "model"))


def _without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"].T.contiguous()


MISFITS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], list[str]]] = {
    "prefix lost in one layer": (_without_prefix, ["layers.1.", "prefix 'model.'"]),
    "q_norm dropped": (
        lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"),
        ["1 missing: model.layers.0.self_attn.q_norm.weight"],
    ),
    "matrix transposed": (_transposed, ["model.layers.2.mlp.up_proj.weight", "[44, 77]", "[77, 44]"]),
    "tensor of another model": (
        lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(2)}),
        ["1 not of this model: model.layers.0.self_attn.sinks"],
    ),
    "one layer too many": (
        lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.ones(44)}),
        ["not of this model: model.layers.3.input_layernorm.weight"],
    ),
    "head missing though untied": (
        lambda t: t.pop("lm_head.weight"),
        ["1 missing: lm_head.weight", "set tie_word_embeddings to true"],
    ),
    "no rows": (
        lambda t: t.update({"lm_head.weight": torch.zeros(0, 44)}),
        ["1 without elements: lm_head.weight", "lm_head.weight is [0, 44] where the model has [259, 44]"],
    ),
    "quantised": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
        ["lm_head.weight is I8", "float"],
    ),
    "two tensors for one parameter": (
        lambda t: t.update({"norm.weight": torch.ones(44)}),
        ["model.norm.weight and norm.weight", "both the parameter model.norm.weight"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_by_name(untied: Path, case: str) -> None:
    change, words = MISFITS[case]
    rewrite(untied / "model.safetensors", change)
    message = refusal(untied)
    assert str(untied) in message
    for word in words:
        assert word in message


def test_keys_that_a_family_ignores_are_left_aside_and_listed(tmp_path: Path) -> None:
    """Old checkpoints keep the rotary frequencies of every layer."""
    model = save_model(tmp_path)
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.update({key: torch.ones(11)}))
    assert plan_of(tmp_path)[1].unused == (key,)
    assert different(loaded(tmp_path).tensors(), dict(model.named_parameters())) == []


def test_checkpoint_of_the_base_model_alone_loads(tmp_path: Path) -> None:
    """Saved by AutoModel: no name has the prefix, and a tied head needs no tensor of its own."""
    model = save_model(tmp_path, tie_word_embeddings=True)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tmp_path / "model.safetensors", strip)
    assert different(loaded(tmp_path).tensors(), dict(model.named_parameters())) == []


# Tied embeddings (C67)


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_tied_matrix_loads_once_from_whichever_name_holds_it(tmp_path: Path, stored: str) -> None:
    model = save_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if stored == "head":
            del tensors["model.embed_tokens.weight"]
        if stored == "embedding":
            del tensors["lm_head.weight"]

    rewrite(tmp_path / "model.safetensors", change)
    _, plan = plan_of(tmp_path)
    both = {"lm_head.weight": "model.embed_tokens.weight"}
    assert plan.tied == (both if stored == "both" else {})
    tensors = loaded(tmp_path).tensors()
    assert "lm_head.weight" not in tensors
    assert different(tensors, dict(model.named_parameters())) == []


def test_tied_by_config_but_stored_twice_with_a_difference_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite(tmp_path / "model.safetensors", change)
    message = refusal(tmp_path)
    assert "model.embed_tokens.weight and lm_head.weight with different values" in message
    assert "tie_word_embeddings is true" in message
    edit_json(tmp_path / "config.json", lambda config: config.update(tie_word_embeddings=False))
    tensors = loaded(tmp_path).tensors()
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_untied_with_equal_values_stays_two_parameters(tmp_path: Path) -> None:
    save_model(tmp_path)
    rewrite(
        tmp_path / "model.safetensors",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    tensors = loaded(tmp_path).tensors()
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


# Values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_weights_are_counted_and_named(tmp_path: Path, bad: float) -> None:
    save_model(tmp_path, shard="60KB")
    name = "model.layers.1.mlp.down_proj.weight"
    (file,) = [f for f in tmp_path.glob("*.safetensors") if name in load_file(f)]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[[0, 500, -1]] = bad

    rewrite(file, spoil)
    with pytest.raises(ModelSourceError, match=rf"3 values of tensor {name} in {file} are NaN or infinite"):
        loaded(tmp_path, buffer_bytes=600)


def test_largest_finite_values_are_no_infinity(tmp_path: Path) -> None:
    save_model(tmp_path)
    largest = torch.finfo(torch.bfloat16).max
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors["lm_head.weight"].fill_(largest))
    assert torch.all(loaded(tmp_path).tensors()["lm_head.weight"] == largest)


# Buffers


def test_buffers_equal_those_of_from_pretrained(tmp_path: Path) -> None:
    """Frequencies of a scaled rope; gemma's embedding scale, whose module also owns the embedding matrix."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    configs = [
        transformers.LlamaConfig(**SIZES, rope_parameters=rope),
        transformers.Gemma3TextConfig(**{**sizes, "num_hidden_layers": 6, "head_dim": 22, "pad_token_id": 0}),
    ]
    for number, config in enumerate(configs):
        path = tmp_path / str(number)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model, plan = plan_of(path)
        for source in (plan, None):
            materialise_buffers(model, source, "cpu")
        assert dict(model.named_buffers()).keys() == dict(expected.named_buffers()).keys() != set()
        for name, buffer in expected.named_buffers():
            got = model.get_buffer(name)
            assert got.dtype == buffer.dtype
            assert torch.equal(got, buffer), name
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(hasattr(parameter, "_is_hf_initialized") for parameter in model.parameters())


def test_persistent_buffers_come_from_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 2, "head_dim": 8}, moe_intermediate_size=12, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    made.get_buffer(name).copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    made.save_pretrained(tmp_path)
    model, plan = plan_of(tmp_path)
    assert name in plan.buffers
    materialise_buffers(model, plan, "cpu")
    assert model.get_buffer(name).dtype == torch.float32
    assert torch.equal(model.get_buffer(name), made.get_buffer(name))


def test_tiny_model_is_not_all_ones_and_zeros() -> None:
    """The oracle of this file: norms and biases differ from what an initialisation would give."""
    assert all(np.unique(p.detach().float().numpy()).size > 1 for p in tiny_model("qwen2").parameters())
