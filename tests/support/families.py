"""Small models of families with experts, in which all that makes a family awkward is there.

Biases, sinks and correction biases are not zero, and routers far from uniform: gradients that are zero by
accident prove nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

#: Sizes that all have: no tensor is a multiple of a page; grouped_mm wants rows of 16 bytes in bf16.
_COMMON = {
    "vocab_size": 259, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "use_cache": False,
}  # fmt: skip
_ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
#: Class of the configuration, and what is the family's own.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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
}  # fmt: skip
MOE_FAMILIES = tuple(_FAMILIES)


def moe_config(family: str, **other: Any) -> Any:
    """The configuration of a small model with experts."""
    name, own = _FAMILIES[family]
    return getattr(transformers, name)(**{**_COMMON, **own, **other})


def has_experts(config: Any) -> bool:
    return config.model_type in _FAMILIES


def random_weights(model: Any, seed: int = 1) -> Any:
    """Fills parameters and persistent buffers, each of its own size and type; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and not name.endswith("_bias"):
                parameter.copy_(values * 0.6 / max(parameter.shape[-1], 4) ** 0.5)
            else:
                parameter.add_(values * 0.1)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def save_mixture(path: Path, family: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
    """A model directory with random weights."""
    torch.manual_seed(3)
    config = moe_config(family, **sizes)
    random_weights(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)).save_pretrained(path)
