"""Architectures that speed is measured with: published dimensions, random weights.

Source: the config.json files of Qwen2.5 (arXiv 2412.15115, table 1); `tiny` is nobody's.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

ShapeName = Literal["tiny", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"]
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)

_COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "use_cache": False,
}
#: vocabulary, hidden size, layers, MLP size, heads, key-value heads, tied embeddings
_DIMENSIONS: dict[ShapeName, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (1000, 64, 4, 176, 4, 2, True),
    "qwen2.5-1.5b": (151936, 1536, 28, 8960, 12, 2, True),
    "qwen2.5-3b": (151936, 2048, 36, 11008, 16, 2, True),
    "qwen2.5-7b": (152064, 3584, 28, 18944, 28, 4, False),
}


def architecture(name: ShapeName, layers: int | None = None) -> dict[str, Any]:
    """The shape as the content of a config.json. `layers`: another depth than its own."""
    vocabulary, hidden, depth, mlp, heads, kv_heads, tied = _DIMENSIONS[name]
    return {
        **_COMMON,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": depth if layers is None else layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }
