"""Architectures that speed is measured with: published dimensions, random weights.

Sources: the config.json files of Qwen2.5 (arXiv 2412.15115, table 1), OLMoE-1B-7B (2409.02060), Qwen3-30B-A3B
(2505.09388) and gpt-oss (2508.10925); `tiny` and `tiny-moe` are nobody's.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

ShapeName = Literal[
    "tiny", "tiny-moe", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "olmoe-7b", "qwen3-30b", "gpt-oss-20b",
    "gpt-oss-120b",
]  # fmt: skip
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)

_COMMON = {"max_position_embeddings": 32768, "initializer_range": 0.02, "use_cache": False}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
#: vocabulary, hidden size, layers, MLP size, heads, key-value heads, tied embeddings
_DENSE: dict[ShapeName, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (1000, 64, 4, 176, 4, 2, True),
    "qwen2.5-1.5b": (151936, 1536, 28, 8960, 12, 2, True),
    "qwen2.5-3b": (151936, 2048, 36, 11008, 16, 2, True),
    "qwen2.5-7b": (152064, 3584, 28, 18944, 28, 4, False),
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "norm_topk_prob": True,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
    },
}  # fmt: skip
_WITH_EXPERTS: dict[ShapeName, dict[str, Any]] = {
    "tiny-moe": {
        **_QWEN3_MOE, "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
        "intermediate_size": 176, "moe_intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True,
    },
    "olmoe-7b": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 50304,
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-30b": {
        **_QWEN3_MOE, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}  # fmt: skip


def has_experts(name: ShapeName) -> bool:
    """Whether the shape is a mixture of experts."""
    return name in _WITH_EXPERTS


def architecture(name: ShapeName, layers: int | None = None) -> dict[str, Any]:
    """The shape as the content of a config.json. `layers`: another depth than its own."""
    depth = {} if layers is None else {"num_hidden_layers": layers}
    if has_experts(name):
        return {**_COMMON, **_WITH_EXPERTS[name], **depth}
    vocabulary, hidden, own_depth, mlp, heads, kv_heads, tied = _DENSE[name]
    return {
        **_COMMON,
        **_QWEN2,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": own_depth,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        **depth,
    }
