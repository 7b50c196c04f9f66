"""Small models of 22 families, in which all that makes a family awkward is there: tied heads, windows shorter
than a test's rows, layers that share keys and values, inputs of their own for each layer, scaled positions,
shared experts, dense layers between others, linear attention.

Biases, sinks, and buffers that belong to the weights are not zero, and routers far from uniform: what is zero
by accident proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tierstream.engine.parity.twin import randomise

#: Sizes that all have: no tensor is a multiple of a page; grouped_mm wants rows of 16 bytes in bf16.
_COMMON = {
    "vocab_size": 259, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GEMMA = {"intermediate_size": 44, "head_dim": 8}
_WINDOWED = {**_GEMMA, "sliding_window": 6, "query_pre_attn_scalar": 8}
#: The last two layers take keys and values from the last one of their kind before them.
_SHARING = {
    **_GEMMA, "num_hidden_layers": 5, "sliding_window": 6, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 259, "hidden_size_per_layer_input": 8,
    "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    ],
}  # fmt: skip
_Family = tuple[str, dict[str, Any]]
#: transformers has no attention by torch's function for these.
EAGER_ONLY = ("gemma2", "gpt_oss")
#: Class of the configuration, and what is the family's own.
_DENSE: dict[str, _Family] = {
    "llama": (
        "LlamaConfig",
        {
            "intermediate_size": 44,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_tied": ("LlamaConfig", {"intermediate_size": 44, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"intermediate_size": 44}),
    "qwen3": ("Qwen3Config", {"intermediate_size": 44, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"intermediate_size": 44, "sliding_window": 6}),
    "gemma": ("GemmaConfig", _GEMMA),
    "gemma2": ("Gemma2Config", _WINDOWED),
    "gemma3": (  # other positions in layers with a window
        "Gemma3TextConfig",
        {**_WINDOWED, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SHARING, "intermediate_size": [44] * 5, "activation_sparsity_pattern": [0.0] * 5,
            "laurel_rank": 4, "altup_num_inputs": 2, "altup_active_idx": 0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_SHARING, "global_head_dim": 8, "final_logit_softcapping": 5.0},
    ),
    "phi": (  # biases everywhere, in the output matrix too
        "PhiConfig",
        {"intermediate_size": 44, "qk_layernorm": True, "partial_rotary_factor": 0.4},
    ),
    "phi3": (
        "Phi3Config",
        {
            "intermediate_size": 44, "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
                "original_max_position_embeddings": 64,
            },
        },
    ),
}  # fmt: skip
_MOE: dict[str, _Family] = {
    "gpt_oss": (
        "GptOssConfig",
        {
            "intermediate_size": 24, "head_dim": 8, "sliding_window": 6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (  # a dense layer between two others
        "Qwen3MoeConfig",
        {**_ROUTED, "intermediate_size": 44, "head_dim": 8, "num_experts": 8, "mlp_only_layers": [1],
         "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_ROUTED, "intermediate_size": 44, "shared_expert_intermediate_size": 24, "num_experts": 8},
    ),
    "mixtral": (
        "MixtralConfig",
        {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}),
    "phimoe": (  # draws random numbers to choose experts
        "PhimoeConfig",
        {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (  # router in fp32, correction bias, groups of experts, shared experts, latent attention
        "DeepseekV3Config",
        {
            **_ROUTED, "num_key_value_heads": 4, "intermediate_size": 44, "n_routed_experts": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
            "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_ROUTED, "intermediate_size": 44, "n_routed_experts": 8, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "head_dim": 8},
    ),
    "qwen3_next": (  # linear attention in two of three layers
        "Qwen3NextConfig",
        {
            **_ROUTED, "intermediate_size": 44, "head_dim": 8, "shared_expert_intermediate_size": 16,
            "num_experts": 8, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "gemma4_moe": (  # experts beside a dense part in every layer, both normed
        "Gemma4TextConfig",
        {
            **_GEMMA, "global_head_dim": 8, "sliding_window": 6, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 259, "num_kv_shared_layers": 0, "enable_moe_block": True,
            "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip
_FAMILIES = {**_DENSE, **_MOE}

#: All of them; those with experts.
FAMILIES = tuple(_FAMILIES)
MOE_FAMILIES = tuple(_MOE)


def family_config(family: str, **other: Any) -> Any:
    """The configuration of a small model."""
    name, own = _FAMILIES[family]
    return getattr(transformers, name)(**{**_COMMON, **own, **other})


def moe_config(family: str, **other: Any) -> Any:
    """The configuration of a small model with experts."""
    assert family in MOE_FAMILIES
    return family_config(family, **other)


def save_family(
    path: Path, family: str, dtype: torch.dtype = torch.bfloat16, shard: str = "5GB", **sizes: Any
) -> None:
    """A model directory with random weights."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(family_config(family, **sizes), dtype=dtype)
    randomise(model)
    model.save_pretrained(path, max_shard_size=shard)
